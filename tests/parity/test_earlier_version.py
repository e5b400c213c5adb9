"""A run folder and checkpoint that an earlier version wrote: this version reads them and resumes the run.

The fixture was written by the last version with the old module layout (delayed scaling, so that it has the amax
history), with the flags below and `--save run --save-interval 3 --exit-interval 3`. The same version then trained the
steps whose numbers are listed here.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from forked_script import run_script

from megafp8.analysis.runs import load_run

ROOT = Path(__file__).resolve().parents[2]
FIXTURE = ROOT / "tests" / "fixtures" / "run_of_an_earlier_version.tar.gz"
FLAGS = (
    "--num-layers 1 --hidden-size 16 --ffn-hidden-size 32 --num-attention-heads 1 --seq-length 16 "
    "--max-position-embeddings 16 --position-embedding-type rope --swiglu --normalization RMSNorm "
    "--disable-bias-linear --untie-embeddings-and-output-weights --tokenizer-type NullTokenizer --vocab-size 31 "
    "--make-vocab-size-divisible-by 16 --micro-batch-size 2 --global-batch-size 4 --lr 1e-3 "
    "--lr-decay-style constant --bf16 --fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 4 "
    "--fp8-amax-compute-algo max --mock-data --eval-iters 0 --log-interval 1 --seed 7 --train-iters 6 --num-threads 1"
)
HASH = "c795c4fd58c4ea59e809531e4e9558df8cd34f3bd7b8739d3ede1aef5c1d41c7"
SAVED_LOSSES = {1: 3.451939582824707, 2: 3.4272255897521973, 3: 3.404086112976074}
NEXT_LOSSES = {4: 3.3803112506866455, 5: 3.3497743606567383, 6: 3.3338444232940674}
NEXT_GRAD_NORMS = {4: 1.0146681070327759, 5: 1.0141505002975464, 6: 0.9951842427253723}
# BF16 has 8 bits: processors with another summation order differ by less. Steps without the checkpoint's weights are
# 0.05 off, and a lost amax history or optimizer state changes the gradient norm.
LOSS_TOLERANCE, GRAD_NORM_TOLERANCE = 2e-3, 2e-2


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with tarfile.open(FIXTURE) as archive:
        archive.extractall(tmp_path)  # the project's own file
    return tmp_path / "run"


def command(*words: str) -> str:
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_tensor_of_the_earlier_version_is_read(run: Path) -> None:
    verified = run_script("tools/checkpoint.py", "verify", run)
    assert verified.returncode == 0, verified.stderr
    assert f"all        {HASH}" in run_script("tools/checkpoint.py", "hash", run / "iter_0000003").stdout


def test_a_run_of_the_earlier_version_resumes(run: Path) -> None:
    output = command("pretrain_gpt.py", *FLAGS.split(), "--save", str(run), "--load", str(run))
    assert "step 6/6" in output
    steps = {step.step: step for step in load_run(run).steps}
    assert {step: steps[step].loss for step in SAVED_LOSSES} == SAVED_LOSSES
    for step, loss in NEXT_LOSSES.items():
        assert steps[step].loss == pytest.approx(loss, abs=LOSS_TOLERANCE)
        assert steps[step].grad_norm == pytest.approx(NEXT_GRAD_NORMS[step], abs=GRAD_NORM_TOLERANCE)
