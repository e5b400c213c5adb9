"""Comparison of version numbers."""

from __future__ import annotations

import re
from typing import Optional


def version_numbers(version: str) -> tuple[int, ...]:
    """The numbers of a version: (2, 11, 0) for 2.11.0+cu130."""
    return tuple(map(int, re.findall(r"\d+", version.split("+")[0])))


def matches_version(found: Optional[str], wanted: str) -> bool:
    """Whether a version is `wanted`, or starts with it."""
    return found is not None and version_numbers(found)[: len(version_numbers(wanted))] == version_numbers(wanted)
