"""Plain data to dataclasses: nothing is converted that JSON can say, and all problems are told at once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Optional

import pytest

from megafp8.utils.files import UnreadableFile
from megafp8.utils.plain_data import MAX_LISTED_PROBLEMS, Float, from_plain


@dataclass(frozen=True)
class Part:
    size: int
    name: str = ""


@dataclass(frozen=True)
class Whole:
    parts: tuple[Part, ...]
    ratio: Float = 0.0
    limit: Optional[float] = None
    named: Mapping[str, Part] = field(default_factory=dict)
    other: Any = None


def test_nested_dataclasses_are_built() -> None:
    plain = {"parts": [{"size": 1}, {"size": 2, "name": "b"}], "ratio": 3, "limit": 1e300, "named": {"a": {"size": 3}}}
    built = from_plain(Whole, plain | {"other": {"nan": ["nan"]}})
    assert built == Whole((Part(1), Part(2, "b")), 3.0, 1e300, {"a": Part(3)}, {"nan": ["nan"]})
    assert type(built.ratio) is float


@pytest.mark.parametrize(
    ("written", "read"), [("inf", math.inf), ("-inf", -math.inf), (1e39, math.inf), (-(10**39), -math.inf)]
)
def test_numbers_of_fp32(written: object, read: float) -> None:
    assert from_plain(Whole, {"parts": (), "ratio": written}).ratio == read


def test_not_a_number() -> None:
    assert math.isnan(from_plain(Whole, {"parts": (), "ratio": "nan"}).ratio)


@pytest.mark.parametrize(
    ("plain", "told"),
    [
        ({}, "w.parts is missing"),
        ({"parts": [{"size": 1.5}]}, "w.parts.0.size must be a valid integer, not 1.5"),
        ({"parts": [{"size": True}]}, "w.parts.0.size must be a valid integer, not True"),
        ({"parts": [], "ratio": "3"}, "w.ratio must be a valid number, not '3'"),
        ({"parts": [], "limit": "nan"}, "w.limit must be a valid number, not 'nan'"),
        ({"parts": [], "extra": 1}, "w.extra is unknown"),
        ([], "w must be an object, not []"),
        ({"parts": [{"size": 1, "name": 2}, 3]}, "w.parts.0.name must be a valid string, not 2; w.parts.1 must be"),
    ],
)
def test_problems_are_told_with_their_place(plain: object, told: str) -> None:
    with pytest.raises(UnreadableFile) as refused:
        from_plain(Whole, plain, "w")
    assert refused.value.reason.startswith(told)


def test_all_problems_are_counted() -> None:
    with pytest.raises(UnreadableFile, match="parts.7.size is missing and 2 more$"):
        from_plain(Whole, {"parts": [{}] * (MAX_LISTED_PROBLEMS + 2)})


def test_fields_of_other_versions_can_be_left_out() -> None:
    assert from_plain(Part, {"size": 1, "weight": 2}, ignores_unknown=True) == Part(1)
    with pytest.raises(UnreadableFile, match="parts.0.weight is unknown"):  # those of its fields may matter
        from_plain(Whole, {"parts": [{"size": 1, "weight": 2}]}, ignores_unknown=True)
