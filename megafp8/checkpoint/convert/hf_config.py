"""Typed access to the fields of a `config.json` of transformers."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Optional

LARGEST_NUMBER = sys.float_info.max  # integers of JSON may be longer


class HFConfig:
    """Typed access to the fields of a `config.json`, which collects all problems.

    Args:
        fields: content of the file.
        name: of the file or section, for problems.

    Attributes:
        problems: found so far. An invalid field reads as a placeholder of its type.
    """

    def __init__(self, fields: Mapping[str, Any], name: str = "config.json"):
        self.fields, self.name = fields, name
        self.problems: list[str] = []

    def positive_int(self, field: str, default: Optional[int] = None) -> int:
        """Return a positive integer; 10000.0 is accepted."""
        value = self.number(field, default)
        if value != int(value) or value < 1:
            self.problems.append(f"{self.name}: {field} is {value}, and has to be a whole number above 0")
            return 1
        return int(value)

    def count(self, field: str, default: int) -> int:
        """Return an integer of at least 0."""
        return 0 if self._get(field, default) == 0 else self.positive_int(field, default)

    def number(self, field: str, default: Optional[float] = None) -> float:
        """Return a finite number."""
        value = self._get(field, default)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not abs(value) <= LARGEST_NUMBER:  # also false for NaN
            self.problems.append(f"{self.name}: {field} is {value!r} and no number")
            return 1
        return value

    def base(self, field: str, default: float) -> float:
        """Return a number of at least 1; an integer if it is whole."""
        value = self.number(field, default)
        if value < 1:
            self.problems.append(f"{self.name}: {field} is {value}, and has to be at least 1")
            return 1
        return int(value) if value == int(value) else value

    def flag(self, field: str, default: bool) -> bool:
        """Return a boolean."""
        value = self._get(field, default)
        if not isinstance(value, bool):
            self.problems.append(f"{self.name}: {field} is {value!r}, and has to be true or false")
        return bool(value)

    def section(self, field: str) -> HFConfig:
        """Return a nested object, empty if it is absent. It shares the problems."""
        value = self.fields.get(field) or {}
        if not isinstance(value, Mapping):
            self.problems.append(f"{self.name}: {field} is {value!r} and no object")
            value = {}
        section = HFConfig(value, f"{self.name}: {field}")
        section.problems = self.problems
        return section

    def require(self, field: str, *allowed: Any, default: Any) -> Any:
        """Return a field's value, which must be one of `allowed`."""
        value = self._get(field, default)
        if value not in allowed:
            self.problems.append(
                f"{self.name}: {field} is {value!r}; megafp8's models have {' or '.join(map(repr, allowed))}"
            )
            return allowed[0]
        return value

    def _get(self, field: str, default: Any) -> Any:
        """Return a field's value; null counts as absent."""
        value = self.fields.get(field)
        return default if value is None else value
