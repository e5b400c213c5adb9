"""Runs and checkpoints of two versions of megatron-core are the same. Run by `tests/other_engine.sh`.

The tested version comes first on the path, the other one is installed. Each trains the same steps, and resumes its own
checkpoint and that of the other. The code of a step differs in what it calls, not in what it computes: losses, weights
and moments are equal to the bit.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megafp8.analysis.runs import load_run
from megafp8.mcore import cpu_patches

cpu_patches.install()

from megafp8.checkpoint.standalone import fingerprint

ROOT = Path(__file__).resolve().parents[1]
ENGINES = {"installed": str(ROOT), "tested": os.environ.get("PYTHONPATH", "")}
MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32 "
    "--position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear "
    "--untie-embeddings-and-output-weights --tokenizer-type NullTokenizer --vocab-size 63 "
    "--make-vocab-size-divisible-by 16 --micro-batch-size 2 --global-batch-size 4 --lr 1e-3 --mock-data --eval-iters 0 "
    "--log-interval 1 --seed 7 --train-iters 6 --num-threads 1 --bf16 --use-distributed-optimizer"
)
PRECISIONS = {
    "bf16": "--attention-dropout 0.1 --hidden-dropout 0.1",
    "fp8-weights": "--fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather",
}
SAVED_STEP = 3


def run(engine: str, *words: str) -> str:
    """Run a script with one of the two versions; its output."""
    command = [sys.executable, *words]
    environment = os.environ | {"PYTHONPATH": ENGINES[engine]}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def train(engine: str, precision: str, *flags: str) -> None:
    run(engine, "pretrain_gpt.py", *MODEL.split(), *PRECISIONS[precision].split(), *flags)


def numbers(folder: Path) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm by step."""
    return {step.step: (step.loss, step.grad_norm) for step in load_run(folder).steps}


def test_two_versions_are_on_the_path() -> None:
    code = "from megafp8.mcore.patches import core_version; print(core_version())"
    assert [run(engine, "-c", code).strip() for engine in ENGINES] == ["0.16.1", "0.19.2"]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_checkpoints_travel_between_the_versions(precision: str, tmp_path: Path) -> None:
    folders = {engine: tmp_path / engine for engine in ENGINES}
    for engine, folder in folders.items():
        flags = ("--save", str(folder), "--save-interval", str(SAVED_STEP))
        train(engine, precision, *flags)
    installed, tested = folders.values()
    assert numbers(installed) == numbers(tested) and len(numbers(tested)) == 6
    assert fingerprint(installed / "iter_0000003") == fingerprint(tested / "iter_0000003")
    for engine, (_, other) in zip(ENGINES, reversed(folders.items()), strict=True):
        resumed = tmp_path / f"resumed by {engine}"
        train(engine, precision, "--load", str(other), "--ckpt-step", str(SAVED_STEP), "--save", str(resumed))
        assert numbers(resumed) == {step: values for step, values in numbers(other).items() if step > SAVED_STEP}
        assert fingerprint(resumed / "iter_0000006") == fingerprint(other / "iter_0000006")
