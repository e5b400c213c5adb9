"""The command line of tools/plot_lr_schedule.py: it shows what a run would do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megafp8.cli import plot_schedule
from megafp8.config import flags, rules

FLAGS = "--train-iters 100 --micro-batch-size 4 --global-batch-size 8 --seq-length 32 --lr 1e-3 --min-lr 1e-4"
RUN = FLAGS.split()
STYLES = {
    "constant": "--lr-decay-style constant",
    "linear": "--lr-decay-style linear",
    "cosine": "--lr-decay-style cosine --lr-decay-iters 80",
    "inverse-square-root": "--lr-decay-style inverse-square-root",
    "WSD": "--lr-decay-style WSD --lr-wsd-decay-iters 20 --lr-wsd-decay-style linear",
}


@pytest.fixture(scope="module")
def tool():
    return plot_schedule


def rates(tool, capsys: pytest.CaptureFixture[str], *words: str) -> dict[int, float]:
    assert tool.main(["--json", *RUN, *words]) == 0
    return {each["step"]: each["learning_rate"] for each in json.loads(capsys.readouterr().out)}


@pytest.mark.parametrize("style", STYLES)
def test_every_decay_style_has_a_table_and_a_picture(tool, style: str, tmp_path: Path, capsys) -> None:
    picture = tmp_path / "new" / "schedule.png"
    words = [*RUN, *STYLES[style].split(), "--lr-warmup-iters", "10", "--output", str(picture)]
    assert tool.main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert " ".join(lines[0].split()) == "step samples before tokens before learning rate weight decay"
    assert lines[2].split() == ["1", "0", "0", "0", "0.01"]
    marked = [line for line in lines if "warm-up ends" in line]
    assert len(marked) == 1 and marked[0].split()[:4] == ["11", "80", "2,560", "0.001"]
    assert picture.read_bytes()[:4] == b"\x89PNG" and picture.stat().st_size > 5000


def test_wsd_by_hand(tool, capsys) -> None:
    """Up over ten steps, constant until twenty before the end, then linearly down. Step n follows n - 1 steps."""
    found = rates(tool, capsys, *STYLES["WSD"].split(), "--lr-warmup-iters", "10")
    assert found[1] == 0.0
    assert found[11] == found[81] == pytest.approx(1e-3)
    assert found[100] == pytest.approx(1e-4 + 9e-4 * (1 - 19 / 20))


def test_a_batch_schedule_has_its_column_and_picture(tool, tmp_path: Path, capsys) -> None:
    """Sizes 8, 16 and 24 from samples 0, 100 and 200: 13 steps of 8, 6 of 16 and 33 of 24."""
    picture = tmp_path / "schedule.png"
    words = RUN[2:] + ["--train-samples", "1000", "--lr-decay-style", "linear", "--global-batch-size", "24"]
    assert tool.main([*words, "--rampup-batch-size", "8", "8", "200", "--output", str(picture)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert " ".join(lines[0].split()) == "step samples before tokens before batch learning rate weight decay"
    rows = {int(line.split()[0]): line.split()[1:4] for line in lines[2:]}
    assert rows[1] == ["0", "0", "8"]
    assert rows[14] == ["104", "3,328", "16"]
    assert rows[20] == ["200", "6,400", "24"]
    assert rows[52] == ["968", "30,976", "24"]
    assert picture.stat().st_size > 5000


def test_embedding_and_output_have_their_own_column(tool, capsys) -> None:
    assert tool.main([*RUN, "--decoupled-lr", "5e-3", "--lr-decay-style", "constant"]) == 0
    header, _, first, *_ = capsys.readouterr().out.splitlines()
    assert "embedding and output" in header and first.split()[4] == "0.005"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--lr-warmup-iters 100", "not shorter than the schedule"),
        ("--lr-warmup-iters 200 --lr-decay-iters 200", "not shorter than the schedule of 1600 samples (200 steps)"),
        ("--lr-decay-style WSD", "--lr-wsd-decay-iters"),
        ("--lr-warmup-iters -1", "--lr-warmup-iters -1 must be"),
        ("--no-such-flag", "--no-such-flag"),
    ],
)
def test_schedules_that_a_run_refuses_are_refused(tool, capsys, words: str, said: str) -> None:
    assert tool.main([*RUN, *words.split()]) == 64
    captured = capsys.readouterr()
    assert said in captured.err and captured.out == ""
    parsed, problems = flags.parse_with_problems([*RUN, *words.split()])
    assert any(said in text for text in problems + rules.setting_problems(parsed.config, 1))


def test_a_run_within_its_warmup_gives_a_warning(tool, capsys) -> None:
    assert tool.main([*RUN, "--lr-warmup-fraction", "0.6", "--lr-decay-iters", "200"]) == 0
    captured = capsys.readouterr()
    assert "notice: the warmup of 120 steps is not shorter than the run of 100" in captured.err
    assert captured.out.splitlines()[-1].split()[3] == "0.000825"  # 99 / 120 of the peak


def test_a_short_run_of_a_long_schedule_may_warm_up(tool, capsys) -> None:
    found = rates(tool, capsys, "--lr-warmup-iters", "99", "--lr-decay-iters", "200")
    assert found[100] == pytest.approx(1e-3)


def test_a_picture_that_cannot_be_written_is_an_error(tool, tmp_path: Path, capsys) -> None:
    assert tool.main([*RUN, "--output", str(tmp_path / "x.xyz")]) == 64
    (tmp_path / "file").touch()
    assert tool.main([*RUN, "--output", str(tmp_path / "file" / "x.png")]) == 74
    told = capsys.readouterr().err
    assert "must end in .png, .svg, .pdf" in told and "Traceback" not in told


def test_phases_of_data_are_marked_with_those_of_the_rate(tool, tmp_path: Path, capsys) -> None:
    phases = tmp_path / "phases.yaml"
    phases.write_text("- data_path: a\n- {name: anneal, start: 80%, data_path: b}\n")
    assert tool.main([*RUN, *STYLES["WSD"].split(), "--data-phases", str(phases)]) == 0
    assert "decay begins, data: anneal" in capsys.readouterr().out
    phases.write_text("- data_path: a\n- {name: anneal, start: 801 samples, data_path: b}\n")
    assert tool.main([*RUN, "--data-phases", str(phases)]) != 0
    assert "beyond the run's 800" in capsys.readouterr().err
