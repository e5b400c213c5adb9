"""Training, validation and test datasets, from the settings of a run.

A dataset maps a sample index to tokens: documents are shuffled by the seed and laid end to end, cut into pieces of
`seq_length + 1` tokens that overlap by one, and the pieces shuffled (see `epochs`). What megatron-core leaves to chance
is settled here: shards are checked before use, a split that cannot fill one sample is an error (megatron-core loops
forever over an empty one), and indices are cached under what decides them.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from megafp8.config.schema import DataConfig, RunConfig
from megafp8.data.gpt_dataset import EpochsBlend, EpochsConfig, EpochsDataset, MockEpochsDataset
from megafp8.data.index_cache import IndexCache
from megafp8.data.shard_verification import check_shard, content_key
from megafp8.data.shards import bin_path
from megafp8.data.tokenizers.build import Tokenizer
from megafp8.errors import DataError

SPLITS = ("training", "validation", "test")
MOCK = "made-up data"
MOCK_SPLIT = "1,1,1"  # megatron-core's
SECONDS_BETWEEN_LINES = 5.0
Dataset = Any
Datasets = tuple[Optional[Dataset], Optional[Dataset], Optional[Dataset]]
Result = TypeVar("Result")


@dataclass(frozen=True)
class DatasetPart:
    """What one of the three datasets is made of.

    Attributes:
        split: training, validation or test.
        blend: its shards.
        share: first and last + 1 document of a shard, as fractions of all.
        num_samples: that will be read.
        may_be_too_small: nobody asked for it, so it is left out where it cannot fill one sample.
    """

    split: Split
    blend: Blend
    share: tuple[float, float]
    num_samples: int
    may_be_too_small: bool = False

    @property
    def name(self) -> str:
        """For messages."""
        return SPLITS[self.split.value]


@dataclass(frozen=True)
class Shard:
    """A shard as rank 0 found it.

    Attributes:
        content: key of its content.
        num_bytes: of its tokens.
    """

    content: str
    num_bytes: int


def build_datasets(
    config: RunConfig,
    tokenizer: Tokenizer,
    num_samples: tuple[int, int, int],
    on_progress: Callable[[str], None] = lambda text: None,
) -> Datasets:
    """Build the datasets of a run whose settings break no rule. All ranks call it, or one process without ranks.

    Rank 0 checks the shards, and builds and caches the indices; the others then load them, or build them in a cache of
    their own machine. What is wrong is the same error on all ranks.

    Args:
        config: its data section, seed, and --save for the place of the cache.
        tokenizer: of the shards.
        num_samples: sequences that training, validation and test will read; 0 builds no such dataset.
        on_progress: called, on rank 0, with a line about each index that is built, and about a long check of shards.

    Returns:
        Training, validation and test; None where no samples or no data are asked for. Each holds at least the samples
        asked for; `dataset[i]` is a dict of tensors [seq_length]: tokens, labels, position_ids (int64) and
        loss_mask (float32). They have `sources` and `sample_ids`, see `sample_chain`.

    Raises:
        DataError: a shard that is damaged, does not fit the tokenizer, or is too small; a cache that cannot be written.
    """
    parts = plan_parts(config, num_samples)
    if not parts:
        return None, None, None
    prefixes = sorted({prefix for part in parts for prefix in part.blend.prefixes})
    built: Optional[Datasets] = None

    def check_and_build() -> dict[str, Shard]:
        nonlocal built
        shards = _check_all(config.data, prefixes, tokenizer, on_progress)
        built = _build(config, tokenizer, parts, shards, on_progress)
        return shards

    shards = _on_rank_zero(check_and_build)
    return _build(config, tokenizer, parts, shards, lambda text: None) if built is None else built


def plan_parts(config: RunConfig, num_samples: tuple[int, int, int]) -> list[DatasetPart]:
    """Which datasets the settings ask for, from which documents of which shards."""
    data = config.data
    own_shards = (data.train_data_path, data.valid_data_path, data.test_data_path)
    if any(own_shards):
        return [
            DatasetPart(split, parse_blend(words), (0.0, 1.0), count)
            for split, words, count in zip(Split, own_shards, num_samples, strict=True)
            if words and count
        ]
    blend = Blend((MOCK,), None) if data.mock_data else parse_blend(data.data_path)
    split = MOCK_SPLIT if data.mock_data and data.split is None else derived.split(config)
    matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    return [
        DatasetPart(part, blend, share, count, may_be_too_small=part is Split.test and data.split is None)
        for part, share, count in zip(Split, matrix, num_samples, strict=True)
        if share is not None and count and blend.prefixes
    ]


def _on_rank_zero(function: Callable[[], Result]) -> Result:
    """What `function` returns or raises as DataError on rank 0, on every rank; it runs there only."""
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


def _check_all(
    data: DataConfig, prefixes: Sequence[str], tokenizer: Tokenizer, on_progress: Callable[[str], None]
) -> dict[str, Shard]:
    """Check every shard; from time to time tell how far that is."""
    checked: dict[str, Shard] = {}
    told = time.monotonic()
    for prefix in prefixes:
        if time.monotonic() - told > SECONDS_BETWEEN_LINES:
            on_progress(f"checked {len(checked)} of {len(prefixes)} shards")
            told = time.monotonic()
        checked[prefix] = _check(data, prefix, tokenizer)
    return checked


def _check(data: DataConfig, prefix: str, tokenizer: Tokenizer) -> Shard:
    if data.mock_data:
        return Shard(f"{MOCK}:{tokenizer.vocab_size}:{tokenizer.eod}", 0)
    identifiers = None if data.allow_other_tokenizer else tokenizer.unique_identifiers
    check_shard(prefix, tokenizer.vocab_size, tokenizer_identifiers=identifiers)
    return Shard(content_key(prefix), bin_path(prefix).stat().st_size)


def _build(
    config: RunConfig,
    tokenizer: Tokenizer,
    parts: Sequence[DatasetPart],
    shards: dict[str, Shard],
    on_progress: Callable[[str], None],
) -> Datasets:
    """The datasets of shards that rank 0 has checked."""
    kind = MockEpochsDataset if config.data.mock_data else EpochsDataset
    folder = None if config.data.mock_data else cache_folder(config, list(shards))
    cache = IndexCache(folder, on_build=lambda label: on_progress(f"building the index of {label}"))
    datasets_config = _datasets_config(config, tokenizer, shards, cache)
    opened = {prefix: _open(kind, prefix, shard, datasets_config) for prefix, shard in shards.items()}
    too_small = {part.split: _too_small(part, opened, config) for part in parts}
    parts = [part for part in parts if not (part.may_be_too_small and too_small[part.split])]
    problems = [problem for part in parts for problem in too_small[part.split]]
    if problems:
        raise DataError("\n".join(problems))
    built = {part.split: _build_part(part, kind, opened, datasets_config) for part in parts}
    return built.get(Split.train), built.get(Split.valid), built.get(Split.test)


def _datasets_config(
    config: RunConfig, tokenizer: Tokenizer, shards: dict[str, Shard], cache: IndexCache
) -> EpochsConfig:
    data = config.data
    assert data.seq_length is not None
    return EpochsConfig(
        random_seed=config.training.seed,
        sequence_length=data.seq_length,
        # megatron-core takes a configuration without a blend for one of made-up data.
        blend=None if data.mock_data else (list(shards), None),
        split=derived.DEFAULT_SPLIT,  # must be there; each dataset is given its documents
        mmap_bin_files=data.mmap_bin_files,
        tokenizer=tokenizer,
        reset_position_ids=data.reset_position_ids,
        reset_attention_mask=False,
        eod_mask_loss=data.eod_mask_loss,
        create_attention_mask=False,
        cache=cache,
        contents={prefix: shard.content for prefix, shard in shards.items()},
    )


def _open(kind: type[EpochsDataset], prefix: str, shard: Shard, config: EpochsConfig) -> Any:
    """Open a shard, which must be as large here as where it was checked."""
    opened = kind.build_low_level_dataset(prefix, config)
    num_bytes = 0 if config.mock else bin_path(prefix).stat().st_size
    if num_bytes != shard.num_bytes:
        raise DataError(
            f"{bin_path(prefix)} is {num_bytes} bytes long on {socket.gethostname()} and {shard.num_bytes} on rank 0's "
            "machine: all machines need the same shards."
        )
    return opened


def _documents(share: tuple[float, float], opened: Any) -> tuple[int, int]:
    """First and last + 1 document of a share of a shard, rounded as megatron-core rounds."""
    first, end = (int(round(bound * float(len(opened.sequence_lengths)))) for bound in share)
    return first, end


def _too_small(part: DatasetPart, opened: dict[str, Any], config: RunConfig) -> list[str]:
    """The shards whose part does not hold one sample: seq_length tokens and the label of the last."""
    assert config.data.seq_length is not None
    needed, problems = config.data.seq_length + 1, []
    for prefix in part.blend.prefixes:
        lengths = opened[prefix].sequence_lengths
        first, end = _documents(part.share, opened[prefix])
        tokens = int(lengths[first:end].sum(dtype=np.int64))
        if tokens < needed:
            problems.append(
                f"The {part.name} part of {prefix} holds {tokens} tokens (documents {first} to {end} of "
                f"{len(lengths)}), but one sample takes {needed} (--seq-length {needed - 1} + 1). "
                f"{_remedy(part, config)}"
            )
    return problems


def _remedy(part: DatasetPart, config: RunConfig) -> str:
    ways = ["use more text", "a shorter --seq-length"]
    if derived.split(config) is not None:
        ways.insert(0, f"Give it a larger share (--split, now {derived.split(config)})")
    if part.split is Split.valid:
        ways.append("no validation (--eval-iters 0)")
    text = ", ".join(ways[:-1]) + f", or {ways[-1]}."
    return text[0].upper() + text[1:]


def _build_part(part: DatasetPart, kind: type[EpochsDataset], opened: dict[str, Any], config: EpochsConfig) -> Dataset:
    """The dataset of one part: its shard's, or the blend of its shards'."""
    blend, total = part.blend, part.num_samples
    weights = None if blend.weights is None else normalize(list(blend.weights))
    counts: list[Optional[int]] = [total]
    if len(blend.prefixes) > 1:
        # A blend never draws more than its share and one; without weights, each shard once.
        counts = [None] * len(blend.prefixes) if weights is None else [math.ceil(w * total) + 1 for w in weights]
    datasets = []
    for prefix, count in zip(blend.prefixes, counts, strict=True):
        documents = np.arange(*_documents(part.share, opened[prefix]), dtype=np.int32)
        datasets.append(kind(opened[prefix], prefix, documents, count, part.split, config))
    if len(datasets) == 1:
        return datasets[0]
    if weights is None:
        weights = [len(dataset) for dataset in datasets]
        if sum(weights) < total:
            raise DataError(
                f"The {part.name} data has {sum(weights)} samples, but {total} are to be read. Several shards without "
                "weights are drawn once only: give each a weight (--data-path 0.5 A 0.5 B), which repeats them as "
                "often as needed, or read fewer samples."
            )
    return EpochsBlend(datasets, weights, total, config)


def cache_folder(config: RunConfig, prefixes: Sequence[str]) -> Path:
    """Return the folder for indices: `--data-cache-path`, else below `--save`, else beside the first shard."""
    if config.data.data_cache_path:
        return Path(config.data.data_cache_path)
    if config.checkpoint.save:
        return Path(config.checkpoint.save) / "data_cache"
    return Path(prefixes[0]).parent / "data_cache"
