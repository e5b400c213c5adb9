"""What a check has to say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

OK, WARNING, ERROR = "ok", "warning", "error"
"""Error: training cannot run here, or not as the machine is meant to. Warning: it runs slower, or untried."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a check has to say.

    Attributes:
        mend: a command, or a sentence where no command mends it; None where nothing is wrong.
    """

    check: str
    level: str
    text: str
    mend: Optional[str] = None


def ok(check: str, text: str) -> Finding:
    """Nothing is wrong."""
    return Finding(check=check, level=OK, text=text)


def warning(check: str, text: str, mend: str) -> Finding:
    """Training runs, and could do better."""
    return Finding(check=check, level=WARNING, text=text, mend=mend)


def error(check: str, text: str, mend: str) -> Finding:
    """Training does not run."""
    return Finding(check=check, level=ERROR, text=text, mend=mend)
