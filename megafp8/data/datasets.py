"""Training, validation and test datasets on megatron-core's GPTDataset and its blends.

A dataset maps a sample index to tokens: documents are shuffled by the seed and laid end to end, cut into pieces of
`seq_length + 1` tokens that overlap by one, and the pieces shuffled. megafp8 adds what megatron-core leaves out: shards
are checked before use, a split that cannot fill one sample is an error (megatron-core loops forever over an empty one),
and the cache of indices follows the content of the shards, not their path.

megatron-core loads that cache with `allow_pickle=True`; whoever can write to the cache folder can run code in the run.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

import numpy as np
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset

from megafp8.config import derived
from megafp8.config.schema import DataConfig, RunConfig
from megafp8.data.blend import Blend, check_split, parse_blend
from megafp8.data.guarded_dataset import GuardedGPTDataset
from megafp8.data.shard_checks import check_shard, content_key
from megafp8.data.shards import ShardIndex
from megafp8.data.tokenizer import Tokenizer
from megafp8.errors import ConfigError, DataError

SPLITS = ("training", "validation", "test")
SPLIT_FLAGS = ("--train-data-path", "--valid-data-path", "--test-data-path")
Datasets = tuple[Optional[Any], Optional[Any], Optional[Any]]


def build_datasets(config: RunConfig, tokenizer: Tokenizer, num_samples: tuple[int, int, int]) -> Datasets:
    """Build the datasets of a run; every rank calls it, inside an initialized process group.

    Rank 0 builds and caches the indices, the others load them. Checks come first and give the same answer on all ranks.
    A test part of the default split that is too small for one sample is no error, since nobody asked for it.

    Args:
        config: its data section, seed, and --save for the place of the cache.
        tokenizer: of the shards.
        num_samples: sequences that training, validation and test will read; 0 builds no such dataset.

    Returns:
        Training, validation and test; None where no samples or no data are asked for. Each holds at least the samples
        asked for; `dataset[i]` is a dict of tensors [seq_length]: tokens, labels, position_ids (int64) and
        loss_mask (float32).

    Raises:
        ConfigError: settings that contradict each other or are not available.
        DataError: a shard that is damaged, does not fit the tokenizer, or is too small; a cache that cannot be written.
    """
    assert torch.distributed.is_initialized(), "megatron-core's blends need a process group"
    data = config.data
    _check_settings(data)
    wanted = [count > 0 for count in num_samples]
    blends = _blends(data, wanted)
    prefixes = sorted({prefix for blend in blends if blend is not None for prefix in blend.prefixes})
    if not any(wanted) or not (prefixes or data.mock_data):
        return None, None, None
    identifiers = None if data.allow_other_tokenizer else tokenizer.unique_identifiers
    indices = {
        prefix: check_shard(prefix, tokenizer.vocab_size, tokenizer_identifiers=identifiers) for prefix in prefixes
    }
    cache = None if data.mock_data else _cache_folder(config, prefixes)
    gpt_config = _gpt_config(config, tokenizer, blends, cache)
    _leave_out_unneeded_splits(gpt_config, data, wanted, indices)
    _check_sizes(gpt_config, blends, indices)
    builder = BlendedMegatronDatasetBuilder(
        MockGPTDataset if data.mock_data else GuardedGPTDataset, list(num_samples), lambda: True, gpt_config
    )
    datasets = builder.build()
    _check_lengths(datasets, num_samples)
    return datasets[0], datasets[1], datasets[2]


def _check_settings(data: DataConfig) -> None:
    problems = []
    given = [flag for flag, paths in zip(SPLIT_FLAGS, _paths_per_split(data), strict=True) if paths]
    if data.data_path and given:
        problems.append(f"--data-path (split by --split) and {', '.join(given)} exclude each other.")
    if data.split is not None and given:
        problems.append(f"--split divides --data-path, but the shards come from {', '.join(given)}. Leave it out.")
    if data.mock_data and (data.data_path or given):
        problems.append("--mock-data makes tokens up and reads no shards. Leave it or the data paths out.")
    if not (data.mock_data or data.data_path or given):
        problems.append("No data: give --data-path, or --train-data-path, or --mock-data.")
    if problems:
        raise ConfigError(problems)
    if data.split is not None:
        check_split(data.split)


def _paths_per_split(data: DataConfig) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    return data.train_data_path, data.valid_data_path, data.test_data_path


def _blends(data: DataConfig, wanted: Sequence[bool]) -> list[Optional[Blend]]:
    """The blend of each split, None where there is none or no sample of it is wanted."""
    if data.data_path:
        blend = parse_blend(data.data_path, "--data-path")
        return [blend if is_wanted else None for is_wanted in wanted]
    return [
        parse_blend(paths, flag) if paths and is_wanted else None
        for flag, paths, is_wanted in zip(SPLIT_FLAGS, _paths_per_split(data), wanted, strict=True)
    ]


def _gpt_config(
    config: RunConfig, tokenizer: Tokenizer, blends: Sequence[Optional[Blend]], cache: Optional[Path]
) -> GPTDatasetConfig:
    data = config.data
    as_megatron = [None if blend is None else (list(blend.prefixes), _as_list(blend.weights)) for blend in blends]
    sources: dict[str, Any] = {}
    if data.data_path:
        sources = {"blend": next(filter(None, as_megatron)), "split": derived.split(config)}
    elif not data.mock_data:
        sources = {"blend_per_split": as_megatron}
    assert data.seq_length is not None
    return GPTDatasetConfig(
        random_seed=config.training.seed,
        sequence_length=data.seq_length,
        path_to_cache=None if cache is None else str(cache),
        mmap_bin_files=data.mmap_bin_files,
        tokenizer=tokenizer,
        reset_position_ids=data.reset_position_ids,
        reset_attention_mask=False,
        eod_mask_loss=data.eod_mask_loss,
        create_attention_mask=False,
        **sources,
    )


def _as_list(weights: Optional[tuple[float, ...]]) -> Optional[list[float]]:
    return None if weights is None else list(weights)


def _leave_out_unneeded_splits(
    gpt_config: GPTDatasetConfig, data: DataConfig, wanted: Sequence[bool], indices: dict[str, ShardIndex]
) -> None:
    """Keep megatron-core from building splits without samples: over an empty one it would loop forever."""
    matrix = gpt_config.split_matrix
    if matrix is None:
        return
    for number, is_wanted in enumerate(wanted):
        if not is_wanted:
            matrix[number] = None
    by_default = data.split is None and not data.mock_data
    if by_default and matrix[2] is not None:
        smallest = min(_tokens_of_share(index, matrix[2])[0] for index in indices.values())
        if smallest <= gpt_config.sequence_length:
            matrix[2] = None


def _tokens_of_share(index: ShardIndex, share: tuple[float, float]) -> tuple[int, int, int]:
    """Tokens, first and last + 1 sequence of a share of a shard, rounded as megatron-core rounds."""
    count = len(index.sequence_lengths)
    begin, end = (int(round(bound * float(count))) for bound in share)
    return int(index.sequence_lengths[begin:end].sum(dtype=np.int64)), begin, end


def _check_sizes(
    gpt_config: GPTDatasetConfig, blends: Sequence[Optional[Blend]], indices: dict[str, ShardIndex]
) -> None:
    """Check that every split of every shard holds one sample: seq_length tokens and the label of the last."""
    needed = gpt_config.sequence_length + 1
    problems = []
    for number, (split, blend) in enumerate(zip(SPLITS, blends, strict=True)):
        share = (0.0, 1.0) if gpt_config.split_matrix is None else gpt_config.split_matrix[number]
        if blend is None or share is None:
            continue
        for prefix in blend.prefixes:
            tokens, begin, end = _tokens_of_share(indices[prefix], share)
            if tokens < needed:
                problems.append(
                    f"The {split} part of {prefix} holds {tokens} tokens (documents {begin} to {end} of "
                    f"{len(indices[prefix].sequence_lengths)}), but one sample takes {needed} (--seq-length "
                    f"{needed - 1} + 1). {_remedy(split, gpt_config.split)}"
                )
    if problems:
        raise DataError("\n".join(problems))


def _remedy(split: str, shares: Optional[str]) -> str:
    ways = ["use more text", "a shorter --seq-length"]
    if shares is not None:
        ways.insert(0, f"Give it a larger share (--split, now {shares})")
    if split == "validation":
        ways.append("no validation (--eval-iters 0)")
    text = ", ".join(ways[:-1]) + f", or {ways[-1]}."
    return text[0].upper() + text[1:]


def _check_lengths(datasets: Sequence[Optional[Any]], num_samples: Sequence[int]) -> None:
    """Several shards without weights are drawn once each; then there may be fewer samples than asked for."""
    for split, dataset, count in zip(SPLITS, datasets, num_samples, strict=True):
        if dataset is not None and len(dataset) < count:
            raise DataError(
                f"The {split} data has {len(dataset)} samples, but {count} are to be read. Several shards without "
                "weights are drawn once only: give each a weight (--data-path 0.5 A 0.5 B), which repeats them as "
                "often as needed, or read fewer samples."
            )


def _cache_folder(config: RunConfig, prefixes: Sequence[str]) -> Path:
    """Return the folder for the indices of these shards, named after their content, and make it fit for use.

    `--data-cache-path`, else below `--save`, else beside the first shard.
    """
    if config.data.data_cache_path:
        parent = Path(config.data.data_cache_path)
    elif config.checkpoint.save:
        parent = Path(config.checkpoint.save) / "data_cache"
    else:
        parent = Path(prefixes[0]).parent / "data_cache"
    keys = "\n".join(content_key(prefix) for prefix in prefixes)
    folder = parent / hashlib.sha256(keys.encode()).hexdigest()[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    if not writable and not any(folder.glob("*.npy")):
        raise DataError(
            f"The folder {folder} for the datasets' indices cannot be written. Name another with --data-cache-path."
        )
    if writable and torch.distributed.get_rank() == 0:
        discard_broken_indices(folder)
    return folder


def discard_broken_indices(folder: Path) -> None:
    """Delete indices that a killed run left half-written, so that megatron-core builds them again."""
    for path in folder.glob("*.npy"):
        try:
            np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError, OSError):
            path.unlink(missing_ok=True)
