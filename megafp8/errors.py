"""Exceptions for user-facing errors, and the exit status of each.

Exit statuses follow BSD's sysexits where one fits, so that a launcher can tell invalid input from a failed run.
"""

from collections.abc import Iterator
from typing import Optional


class Megafp8Error(ValueError):
    """Base class of errors that a user can fix. The message names the problem, the values, the flag and the fix."""

    exit_status = 70


class ConfigError(Megafp8Error):
    """Invalid or contradictory settings.

    Attributes:
        problems: every problem that was found, not only the first.
    """

    exit_status = 64
    subject = "the settings"

    def __init__(self, problems: "str | list[str]"):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        count = len(self.problems)
        head = "1 problem" if count == 1 else f"{count} problems"
        super().__init__(f"{head} with {self.subject}:\n" + "\n".join(f"  - {text}" for text in self.problems))


class CapabilityError(ConfigError):
    """A setting that this machine does not support: a missing device, library or kernel."""

    subject = "the settings or this machine"


class DataError(Megafp8Error):
    """Training data that is missing, corrupt or incompatible with the tokenizer or the model."""

    exit_status = 66


class NumericsError(Megafp8Error):
    """A non-finite loss or gradient."""

    exit_status = 65


class CheckpointError(Megafp8Error):
    """A checkpoint that is missing, corrupt or incompatible with the model."""

    exit_status = 74


class RunFolderInUse(Megafp8Error):
    """Another run holds the write lease of the same folder."""

    exit_status = 73


class PeerLost(Megafp8Error):
    """Another rank of this run has exited. A restart may help."""

    exit_status = 70


class OutOfMemory(Megafp8Error):
    """A rank that ran out of memory."""

    exit_status = 70


def causes(error: Optional[BaseException]) -> Iterator[BaseException]:
    """An error, what caused it or was handled when it was raised, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


# Exit statuses without an exception class: an internal error, a hang found by the watchdog, and preemption.
INTERNAL = 70
HUNG = 71
PREEMPTED = 75
