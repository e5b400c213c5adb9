"""Training, validation and test datasets, built from the settings of a run.

A dataset maps a sample index to tokens. Documents are shuffled by the seed, concatenated, and cut into pieces of
`seq_length + 1` tokens that overlap by one; the pieces are shuffled (see `gpt_dataset`). In addition to megatron-core,
shards are checked before use, a split that is too small for one sample is an error (megatron-core loops forever over an
empty one), and indices are cached under a hash of everything that decides them. With `--packing best-fit` sequences
have whole documents instead (see `packed_dataset`).
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Optional, TypeVar

import numpy as np
import torch.distributed as dist
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.datasets.utils import Split, normalize

from megafp8.config import derived
from megafp8.config.data_blend import Blend, parse_blend
from megafp8.config.data_phases import parse_phases
from megafp8.config.schema import DataConfig
from megafp8.config.schema.io import BEST_FIT
from megafp8.data.gpt_dataset import EpochsBlend, EpochsConfig, EpochsDataset, MockEpochsDataset
from megafp8.data.index_cache import IndexCache
from megafp8.data.packed_dataset import MockPackedDataset, PackedDataset
from megafp8.data.phases import concatenate_phases
from megafp8.data.shard_verification import check_shard, content_key
from megafp8.data.shards import num_token_bytes
from megafp8.data.tokenizers.build import Tokenizer
from megafp8.errors import DataError
from megafp8.utils.object_store import is_url, local_path

SPLITS = ("training", "validation", "test")
MOCK_PREFIX = "made-up data"
MOCK_SPLIT = "1,1,1"  # megatron-core's
PROGRESS_INTERVAL_S = 5.0
Dataset = Any
Datasets = tuple[Optional[Dataset], Optional[Dataset], Optional[Dataset]]
Result = TypeVar("Result")


@dataclass(frozen=True)
class SplitPlan:
    """What one of the three datasets is built from.

    Attributes:
        split: training, validation or test.
        blend: its shards.
        bounds: first and last + 1 document of each shard, as fractions of its documents.
        num_samples: number of samples that will be read.
        phases: of the training data: name, blend and number of samples of each; the blend above then has all shards.
        is_optional: no setting asks for it, so that it is left out if it is too small for one sample.
    """

    split: Split
    blend: Blend
    bounds: tuple[float, float]
    num_samples: int
    phases: tuple[tuple[str, Blend, int], ...] = ()
    is_optional: bool = False

    @property
    def name(self) -> str:
        """Name for messages."""
        return SPLITS[self.split.value]


@dataclass(frozen=True)
class CheckedShard:
    """A shard as rank 0 found it.

    Attributes:
        content: key of its content.
        num_bytes: size of its tokens.
    """

    content: str
    num_bytes: int


def build_datasets(
    data: DataConfig,
    tokenizer: Tokenizer,
    num_samples: tuple[int, int, int],
    *,
    seed: int,
    save: Optional[str] = None,
    phase_starts: Sequence[int] = (),
    on_progress: Callable[[str], None] = lambda text: None,
    is_first_of_machine: bool = True,
) -> Datasets:
    """Build the datasets of a run with valid settings. All ranks call it, or one process without ranks.

    Rank 0 checks the shards, and builds and caches the indices. The first rank of each other machine then loads and
    checks them, or builds them in a cache of its own. The others load them after that. An error of rank 0
    is raised on all ranks.

    Args:
        tokenizer: tokenizer of the shards.
        num_samples: sequences that training, validation and test will read; 0 builds no such dataset.
        seed: of the order of the samples.
        save: folder of the run, which has the cache unless `--data-cache-path` is given.
        phase_starts: the first training sample of each phase (`data_phases.first_samples`).
        on_progress: called on rank 0 with a message about each index that is built, and about a long check of shards.
        is_first_of_machine: this rank is.

    Returns:
        Training, validation and test dataset; None where no samples or no data are asked for. Each holds at least the
        requested samples. `dataset[i]` is a dict of tensors [seq_length]: tokens, labels, position_ids (int64) and
        loss_mask (float32). They have `sources` and `sample_ids`, see `sample_hash`.

    Raises:
        DataError: a shard that is damaged, does not fit the tokenizer, or is too small; a cache that cannot be written.
    """
    plans = _plan_splits(data, num_samples)
    if phase_starts and num_samples[0]:
        plans = _plan_phases(data, num_samples[0], phase_starts) + [each for each in plans if each.split.value]
    if not plans:
        return None, None, None
    prefixes = sorted({prefix for plan in plans for prefix in plan.blend.prefixes})
    build = partial(_build, data, seed, save, tokenizer, plans)
    built: Optional[Datasets] = None

    def check_and_build() -> dict[str, CheckedShard]:
        nonlocal built
        shards = _check_shards(data, prefixes, tokenizer, on_progress)
        built = build(shards, on_progress)
        return shards

    shards = _call_on_rank_zero(check_and_build)
    try:
        if built is None and is_first_of_machine:
            built = build(shards, lambda text: None)
    finally:
        if dist.is_initialized():
            dist.barrier()  # also after an error, so that no rank waits
    return build(shards, lambda text: None, is_checked=False) if built is None else built


def _plan_splits(data: DataConfig, num_samples: tuple[int, int, int]) -> list[SplitPlan]:
    """The datasets that the settings ask for, with the documents and shards of each."""
    own_paths = (data.train_data_path, data.valid_data_path, data.test_data_path)
    if not data.mock_data and derived.split(data) is None:
        return [
            SplitPlan(split, parse_blend(words), (0.0, 1.0), count)
            for split, words, count in zip(Split, own_paths, num_samples, strict=True)
            if words and count
        ]
    blend = Blend((MOCK_PREFIX,), None) if data.mock_data else parse_blend(data.data_path)
    text = MOCK_SPLIT if data.mock_data and data.split is None else derived.split(data)
    matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(text))
    return [
        SplitPlan(split, blend, bounds, count, is_optional=split is Split.test and data.split is None)
        for split, bounds, count in zip(Split, matrix, num_samples, strict=True)
        if bounds is not None and count and blend.prefixes
    ]


def _plan_phases(data: DataConfig, num_samples: int, starts: Sequence[int]) -> list[SplitPlan]:
    """The training data of a run with phases. With `--data-path`, `--split` divides the shards of phases, too."""
    phases = [(phase.name, parse_blend(phase.words)) for phase in parse_phases(data)]
    sizes = [end - start for start, end in pairwise([*starts, num_samples])]
    prefixes = dict.fromkeys(prefix for _, blend in phases for prefix in blend.prefixes)
    split = derived.split(data) or "1"
    bounds, *_ = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    named = tuple((*phase, size) for phase, size in zip(phases, sizes, strict=True))
    return [SplitPlan(Split.train, Blend(tuple(prefixes), None), bounds, num_samples, named)] if bounds else []


def _call_on_rank_zero(function: Callable[[], Result]) -> Result:
    """Call `function` on rank 0, and return its result or raise its DataError on every rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return function()
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = function()
        except DataError as error:
            outcome[1] = str(error)
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise DataError(outcome[1])
    return outcome[0]


def _check_shards(
    data: DataConfig, prefixes: Sequence[str], tokenizer: Tokenizer, on_progress: Callable[[str], None]
) -> dict[str, CheckedShard]:
    if data.mock_data:
        return {prefix: CheckedShard(f"{MOCK_PREFIX}:{tokenizer.vocab_size}:{tokenizer.eod}", 0) for prefix in prefixes}
    identifiers = None if data.allow_other_tokenizer else tokenizer.unique_identifiers
    checked: dict[str, CheckedShard] = {}
    last_report = time.monotonic()
    for prefix in prefixes:
        if time.monotonic() - last_report > PROGRESS_INTERVAL_S:
            on_progress(f"checked {len(checked)} of {len(prefixes)} shards")
            last_report = time.monotonic()
        check_shard(prefix, tokenizer.vocab_size, tokenizer_identifiers=identifiers)
        checked[prefix] = CheckedShard(content_key(prefix), num_token_bytes(prefix))
    remote_gib = sum(shard.num_bytes for prefix, shard in checked.items() if is_url(prefix)) / (1 << 30)
    if remote_gib > data.data_cache_gib:
        on_progress(
            f"the shards in object storage have {remote_gib:.1f} GiB, more than --data-cache-gib "
            f"{data.data_cache_gib:g}: parts of them are downloaded repeatedly"
        )
    return checked


def _build(
    data: DataConfig,
    seed: int,
    save: Optional[str],
    tokenizer: Tokenizer,
    plans: Sequence[SplitPlan],
    shards: dict[str, CheckedShard],
    on_progress: Callable[[str], None],
    is_checked: bool = True,
) -> Datasets:
    """Build the datasets from the shards that rank 0 has checked.

    Args:
        is_checked: compare the hashes of cached indices.
    """
    kinds = (PackedDataset, MockPackedDataset) if data.packing == BEST_FIT else (EpochsDataset, MockEpochsDataset)
    kind: type[EpochsDataset] = kinds[data.mock_data]
    folder = None if data.mock_data else _cache_folder(data, save, list(shards))
    cache = IndexCache(folder, lambda label: on_progress(f"building the index of {label}"), is_checked)
    datasets_config = _datasets_config(data, seed, tokenizer, shards, cache)
    opened = {prefix: _open_shard(kind, prefix, shard, datasets_config) for prefix, shard in shards.items()}
    problems = {plan.split: _size_problems(plan, opened, data) for plan in plans}
    plans = [plan for plan in plans if not (plan.is_optional and problems[plan.split])]
    if lines := [line for plan in plans for line in problems[plan.split]]:
        raise DataError("\n".join(lines))
    built = {plan.split: _build_split(plan, kind, opened, datasets_config) for plan in plans}
    return built.get(Split.train), built.get(Split.valid), built.get(Split.test)


def _datasets_config(
    data: DataConfig, seed: int, tokenizer: Tokenizer, shards: dict[str, CheckedShard], cache: IndexCache
) -> EpochsConfig:
    assert data.seq_length is not None
    return EpochsConfig(
        random_seed=seed,
        sequence_length=data.seq_length,
        # megatron-core takes a configuration without a blend for one of mock data.
        blend=None if data.mock_data else (list(shards), None),
        split=derived.DEFAULT_SPLIT,  # required, but unused: each dataset is given its documents
        mmap_bin_files=data.mmap_bin_files,
        tokenizer=tokenizer,
        reset_position_ids=data.reset_position_ids,
        reset_attention_mask=data.reset_attention_mask,
        eod_mask_loss=data.eod_mask_loss,
        create_attention_mask=False,
        cache=cache,
        object_cache_bytes=int(data.data_cache_gib * (1 << 30)),
        contents={prefix: shard.content for prefix, shard in shards.items()},
    )


def _open_shard(kind: type[EpochsDataset], prefix: str, shard: CheckedShard, config: EpochsConfig) -> Any:
    """Open a shard, and check that it has the same size as on rank 0."""
    opened = kind.build_low_level_dataset(prefix, config)
    num_bytes = 0 if config.mock else num_token_bytes(prefix)
    if num_bytes != shard.num_bytes:
        raise DataError(
            f"{prefix}.bin has {num_bytes} bytes on {socket.gethostname()}, but {shard.num_bytes} bytes on the "
            "machine of rank 0: all machines need the same shards."
        )
    return opened


def _document_range(plan: SplitPlan, opened: Any) -> tuple[int, int]:
    """First and last + 1 document of a shard that belong to a split, rounded as megatron-core rounds."""
    first, end = (int(round(bound * float(len(opened.sequence_lengths)))) for bound in plan.bounds)
    return first, end


def _size_problems(plan: SplitPlan, opened: dict[str, Any], data: DataConfig) -> list[str]:
    """Report each shard whose part is smaller than one sample: seq_length tokens and the label of the last."""
    assert data.seq_length is not None
    needed, problems = data.seq_length + 1, []
    for prefix in plan.blend.prefixes:
        lengths = opened[prefix].sequence_lengths
        first, end = _document_range(plan, opened[prefix])
        tokens = int(lengths[first:end].sum(dtype=np.int64))
        if tokens < needed:
            start, stop = plan.bounds
            share = int(lengths.sum(dtype=np.int64)) * (stop - start)
            problems.append(
                f"The {plan.name} part of {prefix} has {tokens} tokens (documents {first} to {end} of {len(lengths)}), "
                f"but one sample needs {needed} (--seq-length {needed - 1} + 1). "
                f"{_suggestion(plan, data, has_enough_text=share >= needed)}"
            )
    return problems


def _suggestion(plan: SplitPlan, data: DataConfig, has_enough_text: bool) -> str:
    ways = ["use more text", "a shorter --seq-length"]
    if has_enough_text:
        ways = [
            "Documents are not divided: preprocess with --text-separator, which makes more of a .txt file",
            "use text of its own (--train-data-path, --valid-data-path)",
        ]
    elif derived.split(data) is not None:
        ways.insert(0, f"Increase its proportion (--split, now {derived.split(data)}; for example --split 90,10,0)")
    if plan.split is Split.valid:
        ways.append("no validation (--eval-iters 0)")
    text = ", ".join(ways[:-1]) + f", or {ways[-1]}."
    return text[0].upper() + text[1:]


def _build_split(plan: SplitPlan, kind: type[EpochsDataset], opened: dict[str, Any], config: EpochsConfig) -> Dataset:
    """Build the dataset of one split: of its phases, of its shard, or the blend of its shards."""
    if plan.phases:
        return _build_phases(plan, kind, opened, config)
    blend, total = plan.blend, plan.num_samples
    weights = None if blend.weights is None else normalize(list(blend.weights))
    datasets = [
        _build_shard(plan, prefix, count, kind, opened, config)
        for prefix, count in zip(blend.prefixes, _most_draws(blend, total), strict=True)
    ]
    if len(datasets) == 1:
        return datasets[0]
    if weights is None:
        weights = [len(dataset) for dataset in datasets]
        if sum(weights) < total:
            raise DataError(
                f"The {plan.name} data has {sum(weights)} samples, but {total} are needed. Several shards without "
                "weights are read only once: give each a weight (--data-path 0.5 A 0.5 B), so that they are repeated "
                "as needed, or train on fewer samples."
            )
    return EpochsBlend(datasets, weights, total, config)


def _most_draws(blend: Blend, total: int) -> list[Optional[int]]:
    """Samples that are drawn from each shard, at most; None: each once."""
    if len(blend.prefixes) == 1:
        return [total]
    if blend.weights is None:
        return [None] * len(blend.prefixes)
    # A blend draws at most one sample more than the shard's fraction.
    return [math.ceil(weight * total) + 1 for weight in normalize(list(blend.weights))]


def _build_shard(
    plan: SplitPlan,
    prefix: str,
    count: Optional[int],
    kind: type[EpochsDataset],
    opened: dict[str, Any],
    config: EpochsConfig,
) -> EpochsDataset:
    """Build the dataset of a shard's part, of at least `count` samples."""
    documents = np.arange(*_document_range(plan, opened[prefix]), dtype=np.int32)
    return kind(opened[prefix], prefix, documents, count, plan.split, config)


def _build_phases(plan: SplitPlan, kind: type[EpochsDataset], opened: dict[str, Any], config: EpochsConfig) -> Dataset:
    """Build the training dataset of a run with phases: each shard once, for all phases that draw from it."""
    counts = dict.fromkeys(plan.blend.prefixes, 0)
    for _, blend, size in plan.phases:
        for prefix, count in zip(blend.prefixes, _most_draws(blend, size), strict=True):
            assert count is not None  # a rule requires weights
            counts[prefix] += count
    shards = {prefix: _build_shard(plan, prefix, count, kind, opened, config) for prefix, count in counts.items()}
    names, blends, sizes = zip(*plan.phases, strict=True)
    parts = [
        ([shards[prefix] for prefix in blend.prefixes], normalize(list(blend.weights or (1.0,)))) for blend in blends
    ]
    return concatenate_phases(names, sizes, parts, config)


def _cache_folder(data: DataConfig, save: Optional[str], prefixes: Sequence[str]) -> Path:
    """Return the folder for indices: `--data-cache-path`, else in `--save`, else next to the first shard."""
    if data.data_cache_path:
        return Path(data.data_cache_path)
    if save:
        return Path(save) / "data_cache"
    return local_path(prefixes[0]).parent / "data_cache"
