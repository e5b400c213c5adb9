"""The length of an epoch (`--num-epochs`)."""

from __future__ import annotations

from megafp8.config import derived
from megafp8.config.data_blend import parse_blend
from megafp8.config.schema import DataConfig
from megafp8.config.schema.io import BEST_FIT
from megafp8.errors import ConfigError


def samples_of_epoch(data: DataConfig) -> int:
    """Training sequences that the documents of the shards fill once.

    Raises:
        ConfigError: what is no list of shards.
        DataError: a shard cannot be read.
        ValueError: the split or the list of shards cannot be parsed.
    """
    from megafp8.data.packing import pack_lengths  # numpy must come after torch, see manifest_tokenizer.py
    from megafp8.data.shards import read_index

    words = data.train_data_path or data.data_path
    if not words or data.mock_data:
        raise ConfigError("an epoch needs the shards of --data-path or --train-data-path")
    blend = parse_blend(words)
    if blend.weights is not None:
        raise ConfigError("a blend with weights has no epochs")
    if data.seq_length is None:
        raise ConfigError("--seq-length is missing")
    if data.packing == BEST_FIT:
        lengths = [read_index(prefix).sequence_lengths for prefix in blend.prefixes]
        trained = [each[: derived.num_training_documents(data, len(each))] for each in lengths]
        return max(1, sum(pack_lengths(each, data.seq_length).num_sequences for each in trained))
    split = derived.split(data)
    shares = (1.0,) if split is None else derived.split_shares(split)
    tokens = sum(read_index(prefix).num_tokens for prefix in blend.prefixes)
    return max(1, int(tokens * shares[0] / sum(shares)) // data.seq_length)
