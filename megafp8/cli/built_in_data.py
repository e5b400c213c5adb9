"""Data of built-in runs: the bytes of Python's standard library as shards, without a network."""

from __future__ import annotations

import io
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

from megafp8.errors import ConfigError

if TYPE_CHECKING:
    from megafp8.config.rules.base import Rule
    from megafp8.config.schema import DataConfig

TOKENIZER = "ByteLevelTokenizer"
BYTES_PER_TEXT_BYTE = 3.1
"""On disk: the text, two bytes for each of its tokens, and the indices."""


def data_flags(folder: Path, data: DataConfig) -> tuple[str, ...]:
    """Flags of the data that `prepare_data` writes below a folder; none if the settings name data."""
    if data.data_path or data.train_data_path or data.data_phases or data.mock_data:
        return ()
    return (
        "--tokenizer-type", TOKENIZER, "--data-path", _shard_path(folder), "--split", "90,10,0",
        "--data-cache-path", str(_prefix(folder).parent / "cache"),
    )  # fmt: skip


def is_built_in(data: DataConfig, folder: Path) -> bool:
    """Whether runs with these settings read the shards that `prepare_data` writes."""
    return data.data_path == (_shard_path(folder),)


def check_data(data: DataConfig, folder: Path) -> None:
    """Check that the shards that `prepare_data` writes are read with their tokenizer.

    Raises:
        ConfigError: the flags name another one, and no data.
    """
    if is_built_in(data, folder) and data.tokenizer_type != TOKENIZER:
        raise ConfigError(
            f"--tokenizer-type {data.tokenizer_type}: the built-in data are for {TOKENIZER}; give --data-path or "
            "--mock-data after --, or remove it"
        )


def rules_before(data: DataConfig, folder: Path) -> tuple[Rule, ...]:
    """The rules of runs that are checked before `prepare_data` writes their shards."""
    from megafp8.config import rules

    written = {rules.paths.shards_are_there} if is_built_in(data, folder) else set()
    return tuple(rule for rule in rules.ALL_RULES if rule not in written)


def prepare_data(data: DataConfig, folder: Path, max_bytes: int) -> None:
    """Write the bytes of Python's standard library as shards, unless they exist or the settings name other data.

    Raises:
        ConfigError: the corpus or the shards cannot be written.
    """
    if not is_built_in(data, folder):
        return
    from megafp8.cli import corpus, preprocess

    prefix = _prefix(folder)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    text = prefix.with_suffix(".jsonl")
    steps = (
        (corpus.main, ["--output", str(text), "--max-bytes", str(max_bytes)]),
        (preprocess.main, ["--input", str(text), "--output-prefix", str(prefix), "--append-eod", "--tokenizer-type",
                           TOKENIZER]),
    )  # fmt: skip
    if not os.path.exists(f"{_shard_path(folder)}.idx"):
        print(f"writing {max_bytes / 1e6:,.0f} MB of Python's standard library to {prefix.parent}", file=sys.stderr)
    with redirect_stdout(io.StringIO()):  # their lines are about the tokenizer and its speed; errors are not in it
        failed = any(step(arguments) for step, arguments in steps)
    if failed:
        raise ConfigError(f"{prefix}: the built-in data could not be prepared; see above, or give --data-path")


def _prefix(folder: Path) -> Path:
    return folder / "data" / "bytes"


def _shard_path(folder: Path) -> str:
    return f"{_prefix(folder)}_text_document"
