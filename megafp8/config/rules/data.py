"""Training data and tokenizer."""

from __future__ import annotations

import re
from collections.abc import Iterator

from megafp8.config import derived
from megafp8.config.blend import parse_blend
from megafp8.config.rules.rule import Rule, shards_by_flag
from megafp8.config.schema import RunConfig

_OVERRIDE = re.compile(r"(transformer|ddp|optimizer)\.[A-Za-z_]\w*=.*", re.DOTALL)


def data_has_one_source(config: RunConfig, world_size: int) -> Iterator[str]:
    """Tokens come from shards that are split, from shards for each purpose, or are made up."""
    data = config.data
    sources = {
        "--data-path": bool(data.data_path),
        "--train-data-path": bool(data.train_data_path),
        "--mock-data": data.mock_data,
    }
    given = [flag for flag, is_given in sources.items() if is_given]
    if not given:
        yield "no data: give --data-path or --train-data-path (shards made by preprocess_data), or --mock-data"
    elif len(given) > 1:
        yield f"{' and '.join(given)} are given: the data has one source, keep one"


def evaluation_shards_need_training_shards(config: RunConfig, world_size: int) -> Iterator[str]:
    """Shards of their own for validation or testing go with shards of their own for training."""
    data = config.data
    for flag, shards in (("--valid-data-path", data.valid_data_path), ("--test-data-path", data.test_data_path)):
        if shards and not data.train_data_path:
            yield f"{flag} goes with --train-data-path; one set of shards is divided with --data-path and --split"


def split_has_three_parts(config: RunConfig, world_size: int) -> Iterator[str]:
    """--split is the relative size of training, validation and test."""
    split = config.data.split
    if split is None:
        return
    if config.data.train_data_path:
        yield f"--split {split} has no effect with --train-data-path: remove it"
    try:
        shares = derived.split_shares(split)
    except ValueError:
        yield f"--split {split!r} is not up to three numbers with a sum above 0, such as 969,30,1"
        return
    if not shares[0] and not config.training.skip_train:
        yield f"--split {split} leaves nothing to train on: the first part is training's"


def blends_are_pairs(config: RunConfig, world_size: int) -> Iterator[str]:
    """A weighted blend is weight, prefix, weight, prefix, ..., with weights that are numbers above 0."""
    for flag, words in shards_by_flag(config.data):
        try:
            parse_blend(words)
        except ValueError as error:
            yield f"{flag} {' '.join(words)}: {error}"


def tokenizer_has_its_files(config: RunConfig, world_size: int) -> Iterator[str]:
    """Each tokenizer is made from files, but for NullTokenizer, which is made from a number, and that of bytes."""
    data, kind = config.data, derived.tokenizer_type(config.data)
    if kind is None:
        mend = "for --mock-data, --tokenizer-type NullTokenizer --vocab-size N" if data.mock_data else "see --help"
        yield f"--tokenizer-type is missing: what the tokens mean and which ends a document; {mend}"
        return
    needed = {
        "GPT2BPETokenizer": {"--vocab-file": data.vocab_file, "--merge-file": data.merge_file},
        "NullTokenizer": {"--vocab-size": config.model.vocab_size},
        "ByteLevelTokenizer": {},
    }.get(kind, {"--tokenizer-model": data.tokenizer_model})
    missing = [flag for flag, value in needed.items() if value is None]
    if missing:
        yield f"--tokenizer-type {kind} needs {' and '.join(missing)}"


def overrides_name_a_field(config: RunConfig, world_size: int) -> Iterator[str]:
    """--override has the form SECTION.FIELD=VALUE; the field and its type are checked by whoever knows them."""
    for override in config.overrides:
        if not _OVERRIDE.fullmatch(override):
            yield (
                f"--override {override!r} is not transformer.FIELD=VALUE, ddp.FIELD=VALUE or optimizer.FIELD=VALUE"
            )


RULES: tuple[Rule, ...] = (
    data_has_one_source,
    evaluation_shards_need_training_shards,
    split_has_three_parts,
    blends_are_pairs,
    tokenizer_has_its_files,
    overrides_name_a_field,
)
