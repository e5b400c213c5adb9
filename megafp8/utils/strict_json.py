"""Strict JSON: no NaN or infinity, and limits on the length of numbers and on nesting.

Python's `json` accepts these, and they then fail far from the file that caused them, with a RecursionError, an
OverflowError or a ValueError of the interpreter.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn, Optional, Union

from megafp8.utils.files import MAX_BYTES, AnyPath, UnreadableFile, decode, read_bytes

MAX_DEPTH = 100
MAX_NUMBER_LENGTH = 64  # characters; integers of this length, and products of a few of them, fit a float
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def read_json(path: AnyPath, max_bytes: int = MAX_BYTES) -> Any:
    """The content of a JSON file.

    Raises:
        UnreadableFile: it cannot be read, or as `parse_json`.
    """
    return parse_json(read_bytes(path, max_bytes), path)


def parse_json(text: Union[str, bytes], path: Optional[AnyPath] = None, *, unique_keys: bool = False) -> Any:
    """Parse JSON text.

    Args:
        text: bytes are UTF-8.
        path: source of the text, for error messages.
        unique_keys: refuse an object with equal keys, of which Python keeps the last one.

    Raises:
        UnreadableFile: the text is not JSON, has a number that is not finite or longer than `MAX_NUMBER_LENGTH`
            characters, is nested deeper than `MAX_DEPTH`, or has a lone surrogate, which UTF-8 cannot encode.
    """
    text = decode(text, path) if isinstance(text, bytes) else text
    try:
        tree = json.loads(
            text, parse_int=_whole_number, parse_float=_number, parse_constant=_refuse_constant,
            object_pairs_hook=_unique if unique_keys else None,
        )  # fmt: skip
        if _SURROGATE.search(text):
            json.dumps(tree, ensure_ascii=False).encode()
    except RecursionError:  # `from None`, because its traceback has a thousand frames
        raise too_deep(path) from None
    except UnreadableFile as error:
        raise UnreadableFile(error.reason, path) from None
    except UnicodeEncodeError as error:
        raise UnreadableFile("not JSON: a string holds half of a surrogate pair", path) from error
    except ValueError as error:
        raise UnreadableFile(f"not JSON: {error}", path) from error
    if _is_deep(tree):
        raise too_deep(path)
    return tree


def too_deep(path: Optional[AnyPath]) -> UnreadableFile:
    """The error for a file that is nested deeper than `MAX_DEPTH` levels."""
    return UnreadableFile(f"nested deeper than {MAX_DEPTH} levels", path)


def to_strict_json(content: Any, *, indent: int = 2) -> str:
    """Serialize plain data as indented JSON with a final newline. Non-finite numbers become null."""
    return json.dumps(finite_or_null(content), indent=indent, allow_nan=False) + "\n"


def finite_or_null(content: Any) -> Any:
    """A copy of plain data in which non-finite numbers are None."""
    if isinstance(content, dict):
        return {key: finite_or_null(item) for key, item in content.items()}
    if isinstance(content, (list, tuple)):
        return [finite_or_null(item) for item in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def check_number(text: str) -> None:
    """Check the length of a number's text.

    Raises:
        UnreadableFile: it has more than `MAX_NUMBER_LENGTH` characters.
    """
    if len(text) > MAX_NUMBER_LENGTH:
        raise UnreadableFile(f"the number {text[:8]}... has {len(text):,} characters, more than {MAX_NUMBER_LENGTH}")


def _whole_number(text: str) -> int:
    check_number(text)
    return int(text)


def _number(text: str) -> float:
    check_number(text)
    value = float(text)
    if not math.isfinite(value):
        raise UnreadableFile(f"the number {text} is too large")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise UnreadableFile(f"{key!r} is given twice: keep one")
        found[key] = value
    return found


def _refuse_constant(text: str) -> NoReturn:
    raise UnreadableFile(f"not JSON: {text} is no JSON number")


def _is_deep(tree: Any) -> bool:
    level = [tree]
    for _ in range(MAX_DEPTH + 1):
        level = [
            inner
            for outer in level if isinstance(outer, (dict, list))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]  # fmt: skip
        if not level:
            return False
    return True
