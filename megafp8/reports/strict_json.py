"""JSON as its standard has it, which knows no number that is not finite."""

from __future__ import annotations

import json
import math
from typing import Any


def to_strict_json(content: Any, *, indent: int = 2) -> str:
    """Plain data as a file's text; numbers that are not finite become null."""
    return json.dumps(finite_or_null(content), indent=indent, allow_nan=False) + "\n"


def finite_or_null(content: Any) -> Any:
    """A copy of plain data in which numbers that JSON does not have are None."""
    if isinstance(content, dict):
        return {key: finite_or_null(item) for key, item in content.items()}
    if isinstance(content, (list, tuple)):
        return [finite_or_null(item) for item in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content
