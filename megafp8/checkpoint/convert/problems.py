"""Problems of a conversion, which are collected and reported together."""

from __future__ import annotations

from pathlib import Path

from megafp8.errors import CheckpointError

MAX_LISTED_PROBLEMS = 12


def check_problems(folder: Path, problems: list[str]) -> None:
    """Raise if there are problems.

    Raises:
        CheckpointError: with all of them.
    """
    if problems:
        raise CheckpointError(f"{folder} cannot be expressed here:\n{format_problems(problems)}")


def format_problems(problems: list[str]) -> str:
    """Return the first problems, one per line, and the number of others."""
    shown = problems[:MAX_LISTED_PROBLEMS] + (
        [f"and {len(problems) - MAX_LISTED_PROBLEMS} more"] if len(problems) > MAX_LISTED_PROBLEMS else []
    )
    return "\n".join(f"  {problem}" for problem in shown)
