"""The command line of tools/compare_runs.py as a user starts it."""

import csv
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from megafp8.metrics.records import EvalRecord, RunRecord, StepRecord
from megafp8.metrics.sinks.jsonl import JsonlSink

TOOL = Path(__file__).resolve().parents[2] / "tools" / "compare_runs.py"
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "comparing.md"
OUTPUTS = {"comparison.md", "comparison.json", "loss_curves.png", "report.html", "gaps.svg"}


def compare(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, str(TOOL), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.fixture
def folders(tmp_path):
    paths = []
    for name, loss in (("bf16", 3.0), ("fp8", 3.3)):
        sink = JsonlSink(tmp_path / name / "records.jsonl")
        recipe = f"{name} arithmetic"
        sink.write(RunRecord(config_hash="00", config={}, world_size=1, layout={}, recipe=recipe, device_name="cpu"))
        common = {"step": 1, "loss": loss, "consumed_tokens": 1000}
        sink.write(StepRecord(**common, consumed_samples=1, learning_rate=1e-3, step_ms=10.0, tokens_per_second=1e5))
        sink.write(EvalRecord(**common, split="valid", perplexity=math.exp(loss), num_tokens=500, eval_ms=1.0))
        sink.close()
        paths.append(tmp_path / name)
    return paths


def test_the_table_and_the_files(folders, tmp_path) -> None:
    result = compare(*folders, "--output-dir", tmp_path / "out")
    assert result.returncode == 0, result.stderr
    assert "fp8 arithmetic" in result.stdout
    assert "+10.00%" in result.stdout
    assert {path.name for path in (tmp_path / "out").iterdir()} == OUTPUTS


def test_runs_and_steps_as_csv(folders, tmp_path) -> None:
    assert compare(*folders, "--csv", "--output-dir", tmp_path / "out").returncode == 0
    runs, steps = (list(csv.DictReader((tmp_path / "out" / name).open())) for name in ("runs.csv", "steps.csv"))
    assert [row["name"] for row in runs] == ["bf16", "fp8"] and float(runs[1]["validation_loss"]) == 3.3
    assert [(row["run"], row["step"], row["validation_loss"]) for row in steps] == [
        ("bf16", "1", "3.0"),
        ("fp8", "1", "3.3"),
    ]
    assert "--csv has no effect without --output-dir" in compare(*folders, "--csv").stderr


def test_json_and_baseline(folders) -> None:
    result = compare(*folders, "--json", "--baseline", folders[1])
    content = json.loads(result.stdout)
    assert content["baseline"] == "fp8"
    assert content["rows"][0]["relative_gap_fraction"] == pytest.approx(-0.3 / 3.3)


def test_bad_input_is_a_one_line_error_with_status_66(folders, tmp_path) -> None:
    result = compare(folders[0], tmp_path / "absent")
    assert result.returncode == 66
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert "there is no records.jsonl" in result.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "the following arguments are required: RUN"),
        (["a", "--bound", "much"], "'much' is not a number"),
        (["a", "--bound", "-1"], "--bound -1 must be from 0 to below 100 percent"),
        (["a", "--confidence", "100"], "--confidence 100 must be above 0 and below 100 percent"),
        (["a", "--warmup-steps", "-3"], "--warmup-steps -3 must be at least 0"),
    ],
)
def test_wrong_flags_are_named_with_status_64(words: list[str], said: str) -> None:
    result = compare(*words)
    assert result.returncode == 64 and said in result.stderr
    assert result.stderr.count(" must be ") == said.count(" must be ")


def test_help_names_every_flag() -> None:
    result = compare("--help")
    assert result.returncode == 0
    flags = ("--baseline", "--output-dir", "--warmup-steps", "--title", "--json", "--bound", "--include-unfinished")
    for flag in flags:
        assert flag in result.stdout
    for name in OUTPUTS:
        assert name in result.stdout and name in DOCUMENT.read_text(encoding="utf-8")
