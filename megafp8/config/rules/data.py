"""Rules about training data and the tokenizer."""

from __future__ import annotations

import re
from collections.abc import Iterator

from megafp8.config import derived
from megafp8.config.data_blend import parse_blend
from megafp8.config.data_phases import FLAG, first_samples, parse_phases
from megafp8.config.features import given_flags
from megafp8.config.rules.base import all_positive, batch_size, shards_by_flag
from megafp8.config.schema import RunConfig
from megafp8.errors import ConfigError

_OVERRIDE = re.compile(r"(transformer|ddp|optimizer)\.[A-Za-z_]\w*=.*", re.DOTALL)


def data_has_one_source(config: RunConfig, world_size: int) -> Iterator[str]:
    """Tokens come from shards to split, from shards per split, or are synthetic."""
    given = given_flags(config, ("--data-path", "--train-data-path", "--mock-data"))
    phases = config.data.data_phases
    if phases and (others := [flag for flag in given if flag != "--data-path"]):
        yield f"{FLAG} and {' and '.join(others)} are given, but training has only one source of data: keep one"
    if not given and not phases:
        yield (
            "no training data: give --data-path or --train-data-path (shards from megafp8 preprocess), or --mock-data"
        )
    elif len(given) > 1:
        yield f"{' and '.join(given)} are given, but only one source of data is supported: keep one"


def evaluation_shards_need_training_shards(config: RunConfig, world_size: int) -> Iterator[str]:
    """Separate shards for validation or testing need separate shards for training."""
    if not config.data.train_data_path and (config.data.data_path or not config.data.data_phases):
        for flag in given_flags(config, ("--valid-data-path", "--test-data-path")):
            yield f"{flag} needs --train-data-path; to divide one set of shards, use --data-path and --split"


def split_has_three_parts(config: RunConfig, world_size: int) -> Iterator[str]:
    """--split is the relative size of training, validation and test."""
    split = config.data.split
    if split is None:
        return
    if config.data.train_data_path:
        yield f"--split {split} has no effect with --train-data-path: remove it"
    elif config.data.data_phases and not config.data.data_path:
        yield f"--split {split} with {FLAG} divides --data-path and the phases: give --data-path, or remove it"
    try:
        shares = derived.split_shares(split)
    except ValueError:
        yield f"--split {split!r} must be up to three numbers with a sum above 0, such as 969,30,1"
        return
    if not shares[0] and not config.training.skip_train:
        yield (
            f"--split {split} leaves no training data: the first number is the proportion of the training data and "
            "must be above 0"
        )


def blends_are_pairs(config: RunConfig, world_size: int) -> Iterator[str]:
    """A weighted blend is weight, prefix, weight, prefix, ... with positive weights."""
    for flag, words in shards_by_flag(config.data):
        try:
            parse_blend(words)
        except ValueError as error:
            yield f"{flag} {' '.join(words)}: {error}"


def data_phases_follow_each_other(config: RunConfig, world_size: int) -> Iterator[str]:
    """The phases of data can be read, begin one after the other, and are within the run."""
    training, size = config.training, batch_size(config, world_size)
    length = training.train_samples if training.train_iters is None else training.train_iters
    try:
        if all_positive(length, size):
            first_samples(config, world_size)
        else:
            parse_phases(config.data)
    except ConfigError as error:
        yield from error.problems


def tokenizer_has_its_files(config: RunConfig, world_size: int) -> Iterator[str]:
    """Every tokenizer needs files, except NullTokenizer, which needs a size, and ByteLevelTokenizer."""
    data, kind = config.data, derived.tokenizer_type(config.data)
    if kind is None:
        fix = (
            "for --mock-data, --tokenizer-type NullTokenizer --vocab-size N" if data.mock_data
            else "give the one that made the shards, which have no PREFIX.manifest.json with it" if data.data_path
            else "give the one that made the shards"
        )  # fmt: skip
        yield f"--tokenizer-type is missing; it defines the vocabulary and the end-of-document token; {fix}"
        return
    needed: dict[str, dict[str, object]] = {
        "GPT2BPETokenizer": {"--vocab-file": data.vocab_file, "--merge-file": data.merge_file},
        "NullTokenizer": {"--vocab-size": config.model.vocab_size},
        "ByteLevelTokenizer": {},
    }
    missing = [
        flag for flag, value in needed.get(kind, {"--tokenizer-model": data.tokenizer_model}).items() if value is None
    ]
    if missing:
        yield f"--tokenizer-type {kind} needs {' and '.join(missing)}"


def overrides_name_a_field(config: RunConfig, world_size: int) -> Iterator[str]:
    """--override has the form SECTION.FIELD=VALUE. `mcore/overrides.py` checks the field and its type."""
    for override in config.overrides:
        if not _OVERRIDE.fullmatch(override):
            yield (f"--override {override!r} must be transformer.FIELD=VALUE, ddp.FIELD=VALUE or optimizer.FIELD=VALUE")
