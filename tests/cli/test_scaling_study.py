"""A study as a user runs it: refused completely, shown, run, and run again after the grid has grown."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from forked_python import forked_python
from forked_script import run_script

from megafp8.resilience.run_state import current_state

ROOT = Path(__file__).resolve().parents[2]
STUDY = """
flags: >
  --num-layers 1 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16 --micro-batch-size 2 --bf16
  --mock-data --tokenizer-type NullTokenizer --vocab-size 63 --make-vocab-size-divisible-by 16 --attention-dropout 0
  --hidden-dropout 0 --eval-iters 1 --num-workers 0 --num-threads 1 --no-save-optim --lr 1e-3
tokens: 96
grid:
  size: {small: --hidden-size 16, large: --hidden-size 32}
  recipe: {bf16: "", fp8: --fp8-format hybrid --fp8-recipe tensorwise}
"""


def run(script: str, *arguments: object) -> subprocess.CompletedProcess:
    """The command in a new interpreter, as a user starts it."""
    return subprocess.run(
        [sys.executable, str(ROOT / script), *map(str, arguments)], capture_output=True, text=True, cwd=ROOT,
        timeout=200, env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, Path, str]:
    """The file of a study, its folder after one call, and the output of the call. It and its runs are forked."""
    folder = tmp_path_factory.mktemp("study")
    path = folder / "tiny.yaml"
    path.write_text(STUDY, encoding="utf-8")
    words = ["launcher/scaling_study.py", path, "--folder", folder / "runs", "--local", "--parallel", 2]
    with tempfile.TemporaryDirectory(prefix="python_") as name, forked_python(Path(name)) as environment:
        result = subprocess.run(
            [environment["PYTHON"], *map(str, words)], capture_output=True, text=True, cwd=ROOT, timeout=200,
            env=environment,
        )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    return path, folder / "runs", result.stdout


@pytest.mark.slow
def test_all_runs_are_trained(finished) -> None:
    _, folder, printed = finished
    runs = json.loads((folder / "study.json").read_text())["runs"]
    assert [run["label"] for run in runs] == ["small-bf16", "small-fp8", "large-bf16", "large-fp8"]
    for run in runs:
        state = current_state(folder / run["folder"])
        assert (state.state, state.step, state.last_step) == ("done", 3, 3), run["label"]
        assert f"done       {run['label']} in " in printed


@pytest.mark.slow
def test_a_second_start_runs_only_new_grid_points(finished) -> None:
    path, folder, _ = finished
    again = run_script("launcher/scaling_study.py", path, "--folder", folder, "--local")
    assert again.returncode == 0 and "4 runs, 0 to start" in again.stdout
    grown = path.with_name("grown.yaml")
    grown.write_text(STUDY + "  seed: [1234, 5]\n", encoding="utf-8")  # 1234 is the default
    status = run_script("launcher/scaling_study.py", grown, "--folder", folder, "--status")
    assert status.stdout.splitlines()[-1] == "4 done, 4 waiting"
    planned = run_script("launcher/scaling_study.py", grown, "--folder", folder, "--dry-run").stdout.splitlines()
    assert planned[-1].startswith("8 runs, 4 to start: 384 tokens, ") and "unknown" not in planned[-1]


@pytest.mark.slow
def test_the_report_can_be_written_twice(finished, tmp_path: Path) -> None:
    _, folder, _ = finished
    first = run("tools/scaling_report.py", folder, "--output-dir", tmp_path)
    assert first.returncode == 0, first.stderr
    assert "tiny: The gap of fp8 is from " in first.stdout and "is not pooled: a test of whether" in first.stdout
    assert "Not fitted: the law over compute. It needs 4 cells" in first.stdout
    assert "4 runs. bf16; fp8: fp8 hybrid tensorwise, emulated, on bf16" in first.stdout
    written = {"report.html", "report.md", "laws.svg", "report.json", "points.json"}
    assert {path.name for path in tmp_path.iterdir()} == written
    assert ElementTree.parse(tmp_path / "laws.svg").getroot().tag.endswith("svg")
    again = run_script("tools/scaling_report.py", tmp_path / "points.json", "--json")
    assert json.loads(again.stdout) == json.loads((tmp_path / "report.json").read_text())
    wrong = run_script("tools/scaling_report.py", folder, "--baseline", "mxfp8")
    assert wrong.returncode == 66 and "none of the study's recipes bf16, fp8" in wrong.stderr


def test_a_dry_run_prints_commands_that_pretrain_takes(tmp_path: Path) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text(STUDY, encoding="utf-8")
    result = run("launcher/scaling_study.py", path, "--folder", tmp_path / "runs", "--dry-run", "--gpu", "h200")
    *lines, total = result.stdout.splitlines()
    assert result.returncode == 0 and len(lines) == 8
    assert lines[0].startswith("small-bf16  ") and " parameters, 96 tokens, " in lines[0]
    assert lines[1].split()[-6:-4] == ["--train-iters", "3"]
    assert total.startswith("4 runs, 4 to start: 384 tokens, ")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("--hidden-size 32", "--hidden-size 33", "large-bf16 and 1 more: --hidden-size 33"),
        ("--fp8-format hybrid", "--fp8-format hybrid --no-emulation", "small-fp8 and 1 more: --no-emulation: "),
    ],
)
def test_one_wrong_run_refuses_the_study(tmp_path: Path, before: str, after: str, told: str) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(STUDY.replace(before, after), encoding="utf-8")
    result = run_script("launcher/scaling_study.py", path, "--folder", tmp_path / "runs", "--local")
    assert result.returncode == 64 and told in result.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--only", "nothing*"), "matches none of the 4 runs"),
        (("--local", "--parallel", "0"), "--parallel 0: must be at least 1"),
        (("--gpu", "h200", "--status"), "--gpu h200: is for the times of a --dry-run"),
        (("--parallel", "2", "--status"), "--parallel 2: --status runs nothing"),
        (("--parallel", "2", "--slurm"), "--parallel 2: is for runs on this machine"),
        (("--parallel", "2", "--kubernetes"), "these are jobs of Kubernetes; give --local, or `array_limit`"),
    ],
)
def test_wrong_flags_of_the_study(tmp_path: Path, arguments: tuple[str, ...], told: str) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text(STUDY, encoding="utf-8")
    result = run_script("launcher/scaling_study.py", path, *arguments)
    assert result.returncode == 64 and told in result.stderr


def test_a_study_for_kubernetes_is_printed(tmp_path: Path) -> None:
    """Runs of one node are an indexed job of a JobSet."""
    path = tmp_path / "tiny.yaml"
    fields = "{image: megafp8, claim: shared, gpus_per_node: 0, partition: cpu}"
    path.write_text(f"{STUDY}\nkubernetes: {fields}\n", encoding="utf-8")
    result = run_script("launcher/scaling_study.py", path, "--folder", "runs/tiny", "--kubernetes")
    assert result.returncode == 0 and result.stderr == "notice: not used by Kubernetes: partition\n"
    (jobset,) = yaml.safe_load_all(result.stdout)
    (replicated,) = jobset["spec"]["replicatedJobs"]
    assert (jobset["kind"], replicated["template"]["spec"]["completions"]) == ("JobSet", 4)
    path.write_text(STUDY, encoding="utf-8")
    result = run_script("launcher/scaling_study.py", path, "--kubernetes")
    assert result.returncode == 64 and "image: missing" in result.stderr


@pytest.mark.parametrize("path", sorted((ROOT / "examples/studies").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_example_is_valid(path: Path) -> None:
    result = run_script("launcher/scaling_study.py", path, "--dry-run", "--slurm")
    assert result.returncode == 0 and "case $SLURM_ARRAY_TASK_ID in" in result.stdout, result.stderr
