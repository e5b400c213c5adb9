"""Paths that no file can have."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from megafp8.utils.files import path_argument, path_problem, path_text

FAULTS = {
    "x" * 256: "256 bytes",
    "runs/" + "é" * 128: "256 bytes",
    "ab/" * 1366: "4,098 bytes",
    "runs/\udcff": "not UTF-8",
    "runs/a\0b": "null character",
}


@pytest.mark.parametrize("path", FAULTS)
def test_faults(path: str) -> None:
    assert FAULTS[path] in (path_problem(path) or "")
    with pytest.raises(argparse.ArgumentTypeError, match=FAULTS[path]) as caught:
        path_argument(path)
    assert len(str(caught.value)) < 200 and str(caught.value).isprintable()


@pytest.mark.parametrize("path", ["", "x" * 255, "é" * 127, "a/" * 1919, "/", "runs/größe 1"])
def test_sound_paths(path: str) -> None:
    assert path_problem(path) is None and path_text(path) == path and path_argument(path) == Path(path)
