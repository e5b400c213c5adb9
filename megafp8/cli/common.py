"""The command lines of the tools that compare runs.

The flags that name a tokenizer, on the command lines of the data tools: those of `pretrain_gpt.py`.
"""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn, Optional

from megafp8.config.flags import add_setting
from megafp8.config.schema import DataConfig
from megafp8.config.settings import settings_by_name
from megafp8.data.tokenizers.build import TOKENIZER_SETTINGS
from megafp8.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """argparse that ends with megafp8's status for wrong flags: its own, 2, is one of no kind of error here."""

    def error(self, message: str) -> NoReturn:
        """Show the usage and the message, and end with status 64."""
        self.print_usage(sys.stderr)
        self.exit(ConfigError.exit_status, f"{self.prog}: error: {message}\n")


_VOCAB_SIZE = "model.vocab_size"


def add_tokenizer_flags(parser: argparse.ArgumentParser, description: Optional[str] = None) -> None:
    """Add a group of the flags that name a tokenizer."""
    group = parser.add_argument_group("tokenizer", description)
    for name in (*(f"data.{setting}" for setting in TOKENIZER_SETTINGS), _VOCAB_SIZE):
        add_setting(group, settings_by_name()[name])


def read_tokenizer_flags(options: argparse.Namespace) -> tuple[DataConfig, Optional[int]]:
    """Return what `build_tokenizer` takes: the data section, and --vocab-size."""
    values = {setting: getattr(options, f"data.{setting}") for setting in TOKENIZER_SETTINGS}
    return DataConfig(**values), getattr(options, _VOCAB_SIZE)
