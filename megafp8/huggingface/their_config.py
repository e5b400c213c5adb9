"""Reading a `config.json` of transformers: values of the right type, and everything that is wrong with them at once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Optional


class TheirConfig:
    """The fields of a model's configuration.

    Args:
        fields: what the file holds.
        name: how problems name the file, or the part of it.

    Attributes:
        problems: what was found wrong so far. A field that is wrong reads as a stand-in of its type.
    """

    def __init__(self, fields: Mapping[str, Any], name: str = "config.json"):
        self.fields, self.name = fields, name
        self.problems: list[str] = []

    def whole(self, field: str, default: Optional[int] = None) -> int:
        """A whole number above 0; 10000.0 is one."""
        value = self.number(field, default)
        if value != int(value) or value < 1:
            self.problems.append(f"{self.name}: {field} is {value}, and has to be a whole number above 0")
            return 1
        return int(value)

    def number(self, field: str, default: Optional[float] = None) -> float:
        """A number."""
        value = self._given(field, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            self.problems.append(f"{self.name}: {field} is {value!r} and no number")
            return 1
        return value

    def flag(self, field: str, default: bool) -> bool:
        """True or false."""
        value = self._given(field, default)
        if not isinstance(value, bool):
            self.problems.append(f"{self.name}: {field} is {value!r}, and has to be true or false")
        return bool(value)

    def part(self, field: str) -> TheirConfig:
        """An object inside; empty where it is left out. It shares the problems."""
        value = self.fields.get(field) or {}
        if not isinstance(value, Mapping):
            self.problems.append(f"{self.name}: {field} is {value!r} and no object")
            value = {}
        inner = TheirConfig(value, f"{self.name}: {field}")
        inner.problems = self.problems
        return inner

    def demand(self, field: str, *allowed: Any, default: Any) -> Any:
        """The value of a field of which only these can be expressed here."""
        value = self._given(field, default)
        if value not in allowed:
            self.problems.append(
                f"{self.name}: {field} is {value!r}; megafp8's models have {' or '.join(map(repr, allowed))}"
            )
            return allowed[0]
        return value

    def _given(self, field: str, default: Any) -> Any:
        """null is as good as absent."""
        value = self.fields.get(field)
        return default if value is None else value
