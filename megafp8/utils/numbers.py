"""Numbers in the text of a command line: plain ASCII decimals, as in JSON.

Python's `int` and `float` also read the digits of every script, spaces around a number and underscores in it.
"""

from __future__ import annotations

import argparse
import math
import re

from megafp8.utils.files import printable

_WHOLE = re.compile(r"-?[0-9]{1,64}")
_NUMBER = re.compile(r"(?=.{1,64}$)-?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


def is_number(text: str) -> bool:
    """Whether `number` reads this text, but for numbers beyond FP64."""
    return _NUMBER.fullmatch(text) is not None


def whole_number(text: str) -> int:
    """argparse `type` of an integer: at most 64 of the digits 0 to 9, and perhaps a minus sign.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    if _WHOLE.fullmatch(text):
        return int(text)
    raise _refused(text, "an integer")


def number(text: str) -> float:
    """argparse `type` of a finite number of at most 64 characters, with or without an exponent.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    if is_number(text) and math.isfinite(value := float(text)):
        return value
    raise _refused(text, "a number")


def _refused(text: str, kind: str) -> argparse.ArgumentTypeError:
    hint = ": no shell replaced this variable" if text.startswith("$") else ""
    try:
        if not math.isfinite(float(text)):
            kind = "a finite number"
        elif kind == "a number" or (float(text).is_integer() and not is_number(text)):
            hint = ": write it in the digits 0 to 9 alone, without + _ and spaces"
        elif float(text).is_integer():
            hint = ": write all digits, without point or exponent"
    except ValueError:
        pass
    return argparse.ArgumentTypeError(f"'{printable(text)}' is not {kind}{hint}")
