"""The benchmark of delayed scaling's start: its measurements, on given numbers and on a run of two steps."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from test_benchmarks_run import result_of

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmarks import delayed_start, stdlib_text
from benchmarks.delayed_start import BASELINE, CALIBRATED, STARTS, TE, Start

SMALL = (
    "--hidden-size 64 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16 --attention-dropout 0 "
    "--hidden-dropout 0 --init-method-std 0.006"
)
MADE_UP = "--mock-data --tokenizer-type NullTokenizer --vocab-size 63"


def starts(**gaps: float) -> dict[str, Start]:
    """Runs with these errors of gradient and losses."""
    exact = torch.tensor([3.0, 4.0])
    offs = [0.0, *gaps.values()]
    return {
        name: Start(exact + torch.tensor([off, 0.0]), (5.0 + off, 4.0 - off))
        for name, off in zip(STARTS, offs, strict=True)
    }


def test_measures() -> None:
    one, other = starts(tensorwise=0.5, calibrated=1.0, te=2.0), starts(tensorwise=0.5, calibrated=-1.0, te=1.0)
    assert delayed_start.gradient_errors(one) == {
        BASELINE: 0.0, "tensorwise": pytest.approx(0.1), CALIBRATED: pytest.approx(0.2), TE: pytest.approx(0.4)
    }  # fmt: skip
    assert delayed_start.mean_errors([one, other])[TE] == pytest.approx(0.3)
    distances = delayed_start.loss_distances([one, other])
    assert distances[CALIBRATED] == [1.0, 1.0], "signs do not cancel"
    assert distances[TE] == [pytest.approx(2.5**0.5)] * 2


def test_two_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(stdlib_text, "prepare_data", lambda data: None)
    monkeypatch.setattr(delayed_start, "data_flags", lambda data: MADE_UP)
    picture = tmp_path / "starts.png"

    def main() -> None:
        delayed_start.main(["--model", SMALL, "--depths", "2", "--seeds", "1", "--steps", "2", *sys.argv[1:],
                            "--plot", str(picture)])  # fmt: skip

    result = result_of(main, "", tmp_path)
    errors = result["errors"]["2"]
    assert errors[BASELINE] == 0 < errors["tensorwise"]
    assert errors[CALIBRATED] < 1.2 * errors["tensorwise"] < errors[TE]
    assert all(len(distances) == 2 for distances in result["distances"].values())
    assert picture.stat().st_size > 10_000
    assert "| delayed, te " in capfd.readouterr().out
