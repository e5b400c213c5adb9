"""A few command lines of Megatron-LM train; `train.py` trains all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line_corpus import Line, read_cover, read_lines
from shrink import shrink, without_unused_flags
from train import fault_of

LINES = read_lines()


@pytest.mark.parametrize("number", [number for number in read_cover() if LINES[number].family == "dense"][:3])
def test_a_command_line_trains(number: int) -> None:
    assert fault_of(LINES[number]) == ""


def test_a_small_run_keeps_what_the_line_asks_for(tmp_path: Path) -> None:
    argv = "--num-layers 96 --swiglu --tensor-model-parallel-size 8 --use-mcore-models --tp-comm-overlap --bf16"
    world_size, words = shrink(Line(0, "", "dense", 8, tuple(argv.split())), tmp_path)
    text = " ".join(words)
    assert world_size == 2 and "--num-layers 4 --swiglu --tensor-model-parallel-size 2" in text
    assert "--bf16" in words and "--tp-comm-overlap" not in words
    plain, unused = without_unused_flags(words)
    assert unused == ["--use-mcore-models"] and set(words) - set(plain) == {"--use-mcore-models"}


def test_a_line_that_differs_without_its_unused_flags_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = iter([[1.0, 0.9, 0.8], [1.0, 0.9, 0.7]])
    monkeypatch.setattr("train.train", lambda *_: next(losses))
    line = Line(0, "", "dense", 1, ("--use-mcore-models",))
    assert "--use-mcore-models" in fault_of(line)
