"""The planner as a user runs it: its flags are flags of pretrain_gpt.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from forked_script import run_script

from megafp8.cli import plan

ROOT = Path(__file__).resolve().parents[2]
ARGUMENTS = ("--model-preset", "llama3-70b", "--gpus", "512", "--gpu", "h200", "--fp8-recipe", "tensorwise")


def run(script: str, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(ROOT / script), *arguments], capture_output=True, text=True, cwd=ROOT, timeout=120
    )


@pytest.fixture(scope="module")
def planned() -> dict:
    result = run("tools/plan.py", *ARGUMENTS, "--scaling", "--json")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_the_flags_of_the_best_layout_pass_a_dry_run(planned) -> None:
    argv = planned["layouts"][0]["argv"]
    result = run_script("pretrain_gpt.py", "--dry-run", "--world-size", "512", "--target", "h200", *argv)
    assert result.returncode == 0, result.stderr
    assert "layout: 512 x h200, transformer_engine layers: tensor" in result.stdout


def test_text_and_picture_without_torch(tmp_path: Path) -> None:
    picture = tmp_path / "plan.png"
    code = (
        "import sys; from megafp8.cli import plan; status = plan.main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules; sys.exit(status)"
    )
    arguments = ("--model-preset", "llama3-8b", "--gpus", "16", "--scaling", "8", "--plot", str(picture))
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert "tokens/s/GPU" in result.stdout
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 20_000


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--gpus", "8", "--model-preset", "llama3-8b", "--no-such-flag"), "unknown flag --no-such-flag"),
        (("--gpus", "8", "--gpu", "h100", "--model-preset", "llama3-8b", "--fp8-recipe", "mxfp8"), "capability 10.0"),
    ],
)
def test_wrong_flags_are_status_64_with_the_reason(arguments, reason) -> None:
    result = run("tools/plan.py", *arguments)
    assert result.returncode == 64
    assert reason in result.stderr


@pytest.mark.parametrize(
    ("flag", "value", "range_of_it"),
    [
        *(("--gpus", value, "between 1 and 1,048,576") for value in ("0", "-8", "1000000000")),
        *(("--scaling", value, "between 1 and 1,048,576") for value in ("0", "-8", "1000000000")),
        *(("--top", value, "at least 1") for value in ("0", "-3")),
        *(
            ("--network-gbit-per-s", value, "between 1 and 100,000")
            for value in ("0", "-5", "1e-300", "1e9")
        ),
    ],
)  # fmt: skip
def test_numbers_that_cannot_be_planned_are_refused(flag, value, range_of_it, capsys) -> None:
    assert plan.main(["--model-preset", "llama3-8b", "--gpus", "8", f"{flag}={value}"]) == 64
    captured = capsys.readouterr()
    shown = value if flag != "--network-gbit-per-s" else f"{float(value):g}"
    assert captured.out == "" and f"{flag} {shown}: must be {range_of_it}" in captured.err


def test_without_a_model_only_the_model_is_requested() -> None:
    result = run("tools/plan.py", "--gpus", "8")
    assert result.returncode == 64
    problem = result.stderr.splitlines()[1:]
    assert len(problem) == 1 and problem[0].endswith("give them, or choose a named shape with --model-preset")


def test_a_model_that_does_not_fit_is_status_64_with_the_needed_memory() -> None:
    result = run("tools/plan.py", "--gpus", "8", "--model-preset", "llama3-70b", "--scaling")
    assert result.returncode == 64
    assert "the smallest needs" in result.stdout
