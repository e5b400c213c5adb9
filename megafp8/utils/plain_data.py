"""Plain data, as JSON has it, to dataclasses. pydantic checks all fields and finds all problems at once."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable
from typing import Annotated, Any, TypeVar, cast

from megafp8.utils.files import UnreadableFile, printable

T = TypeVar("T")
MAX_LISTED_PROBLEMS = 8
FP32_MAX = (2 - 2**-23) * 2.0**127


def from_plain(kind: Callable[..., T], content: Any, name: str = "", *, ignores_unknown: bool = False) -> T:
    """The object of a dataclass whose fields, and those of its fields, are in a mapping. Nothing is converted, but
    integers to floats and lists to tuples.

    Args:
        kind: the class.
        name: of the object in messages.
        ignores_unknown: leave out fields that the class itself does not have; those of its fields are never left out.

    Raises:
        UnreadableFile: fields are unknown, missing or of a wrong type, with all of them.
    """
    from pydantic import ValidationError  # here, because its import takes 0.1 s

    try:
        # In its strict mode pydantic takes a mapping for a dataclass and a list for a tuple from JSON only.
        if ignores_unknown and isinstance(content, dict):
            known = {field.name for field in dataclasses.fields(cast(Any, kind))}
            content = {name: value for name, value in content.items() if name in known}
        return _adapter(kind).validate_json(json.dumps(content), strict=True, extra="forbid")
    except ValidationError as error:
        problems = [_describe(each, name) for each in error.errors()]
        more = f" and {len(problems) - MAX_LISTED_PROBLEMS} more" if len(problems) > MAX_LISTED_PROBLEMS else ""
        raise UnreadableFile("; ".join(problems[:MAX_LISTED_PROBLEMS]) + more) from None


def _describe(problem: Any, name: str) -> str:
    where = ".".join(map(str, (name, *problem["loc"]))).lstrip(".")
    if problem["type"] == "missing":
        return f"{where} is missing"
    if problem["type"] == "unexpected_keyword_argument":
        return f"{where} is unknown; it may have been written by a newer version of megafp8"
    wrong = f"{problem['msg'].replace('Input should be', 'must be')}, not {printable(repr(problem['input']))}"
    return f"{where} {wrong}".lstrip()


@functools.cache
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


class _Fp32Range:
    """Annotation for pydantic: the strings of numbers that are not finite are numbers, too.

    Runs compute in FP32: a larger number in a file is read as infinity, with which readers can deal.
    """

    def __get_pydantic_core_schema__(self, kind: Any, handler: Any) -> Any:
        from pydantic_core.core_schema import no_info_before_validator_function

        return no_info_before_validator_function(_in_fp32_range, handler(kind))


def _in_fp32_range(value: Any) -> Any:
    if type(value) in (int, float):
        return math.copysign(math.inf, value) if abs(value) > FP32_MAX else value
    return float(value) if value in ("nan", "inf", "-inf") else value


Float = Annotated[float, _Fp32Range()]
"""A float that JSON has as a number, or as "nan", "inf" or "-inf"."""
