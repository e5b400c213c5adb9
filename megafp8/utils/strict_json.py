"""JSON of files of a limited size, without NaN and infinity, which Python's `json` accepts."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn, Optional, Union

from megafp8.utils.files import MAX_BYTES, AnyPath, UnreadableFile, decode, read_bytes


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
        UnreadableFile: the text is not JSON, or has a number that is not finite.
    """
    text = decode(text, path) if isinstance(text, bytes) else text
    try:
        tree = json.loads(
            text, parse_int=_whole, parse_float=_finite, parse_constant=_refuse_constant,
            object_pairs_hook=_unique if unique_keys else None,
        )  # fmt: skip
        if "\\ud" in text.lower():  # perhaps half of a surrogate pair, which UTF-8 cannot encode
            json.dumps(tree, ensure_ascii=False).encode()
        return tree
    except RecursionError:  # `from None`, because its traceback has a thousand frames
        raise UnreadableFile("nested too deeply", path) from None
    except UnreadableFile as error:
        raise UnreadableFile(error.reason, path) from None
    except ValueError as error:
        raise UnreadableFile(f"not JSON: {error}", path) from error


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


def _whole(text: str) -> int:
    _finite(text)  # what has the range of a float can be compared with, and multiplied by, one
    return int(text)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise UnreadableFile(f"the number {text[:12]}{'...' * (len(text) > 12)} is too large")
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
