"""The command lines of the tools that compare runs."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

from megafp8.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """argparse that ends with megafp8's status for wrong flags: its own, 2, is one of no kind of error here."""

    def error(self, message: str) -> NoReturn:
        """Show the usage and the message, and end with status 64."""
        self.print_usage(sys.stderr)
        self.exit(ConfigError.exit_status, f"{self.prog}: error: {message}\n")
