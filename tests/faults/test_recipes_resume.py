"""A resumed run equals the unbroken run in every recipe: bitwise, with dropout, in new processes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from forked_runs import Ended, run_forked

from megafp8.analysis.runs import load_run
from megafp8.checkpoint.directory import checkpoint_path
from megafp8.checkpoint.fingerprint import fingerprint

STEPS, SAVED = 3, 2
COMMON = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 2 --seq-length 32 --vocab-size 63 "
    "--swiglu --disable-bias-linear --normalization RMSNorm --make-vocab-size-divisible-by 64 --tokenizer-type "
    "NullTokenizer --position-embedding-type rope --mock-data --num-workers 0 --micro-batch-size 2 "
    "--global-batch-size 8 --lr 1e-3 --lr-warmup-iters 1 --eval-iters 0 --bf16 --use-distributed-optimizer "
    f"--attention-dropout 0.1 --hidden-dropout 0.1 --train-iters {STEPS} --save-interval {SAVED} --no-progress-bar"
)
FP8, GATHER = "--fp8-format hybrid --fp8-recipe", "--fp8-param-gather --overlap-grad-reduce --overlap-param-gather"
RECIPES = {
    "bf16": "",
    "tensorwise": f"{FP8} tensorwise",
    "delayed": f"{FP8} delayed --fp8-amax-history-len 3 --fp8-amax-compute-algo max",
    "blockwise": f"{FP8} blockwise",
    "mxfp8": f"{FP8} mxfp8",
    "rowwise": f"{FP8} rowwise",
    "nvfp4": "--fp4-format e2m1",
    "tensorwise-muon": f"{FP8} tensorwise --optimizer muon --muon-nesterov",
    "tensorwise-fp8-weights": f"{FP8} tensorwise {GATHER}",
    "delayed-fp8-weights": f"{FP8} delayed --fp8-amax-history-len 3 {GATHER}",
    "blockwise-fp8-weights": f"{FP8} blockwise {GATHER}",
    "fp8-gradients-feedback": "--grad-reduce-in-fp8 --grad-reduce-fp8-error-feedback --async-save",
    "fp8-lm-o1": "--fp8-lm-level O1",
    "fp8-lm-o2": "--fp8-lm-level O2",
    "fp8-lm-o3": "--fp8-lm-level O3 --overlap-grad-reduce --overlap-param-gather",
}


def start(folder: Path, cache: Path, flags: str) -> Ended:
    return run_forked(2, f"{COMMON} --data-cache-path {cache} --save {folder} --load {folder} {flags}")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_resume_is_bit_equal(recipe: str, tmp_path: Path, cache: Path) -> None:
    """The last step again, from the checkpoint in the middle: the complete checkpoint and the losses are equal."""
    ended = start(tmp_path, cache, RECIPES[recipe])
    assert set(ended.statuses) == {0}, ended.report()
    unbroken, losses = fingerprint(checkpoint_path(tmp_path, STEPS)), [each.loss for each in load_run(tmp_path).steps]
    shutil.rmtree(checkpoint_path(tmp_path, STEPS))
    again = start(tmp_path, cache, RECIPES[recipe])
    assert set(again.statuses) == {0}, again.report()
    run = load_run(tmp_path)
    assert run.runs[-1].resumed_from_step == SAVED
    assert fingerprint(checkpoint_path(tmp_path, STEPS)) == unbroken
    assert [each.loss for each in run.steps] == losses
    assert len(set(losses)) == STEPS


@pytest.mark.slow
def test_resume_from_bf16_to_fp8_and_back(tmp_path: Path, cache: Path) -> None:
    """A run that ends or starts in BF16. Without the flag it is refused, with the differences."""
    for flags, stop in (("", SAVED), (RECIPES["tensorwise"], 3), ("", 4)):
        if stop > SAVED:
            refused = start(tmp_path, cache, f"{flags} --train-iters 4")
            assert set(refused.statuses) == {74}, refused.report()
            assert "precision.fp8_format: " in refused.output[0] and "--override-precision" in refused.output[0]
        ended = start(tmp_path, cache, f"{flags} --override-precision --train-iters 4 --exit-interval {stop}")
        assert set(ended.statuses) == {0}, ended.report()
    run = load_run(tmp_path)
    assert [each.step for each in run.steps] == [1, 2, 3, 4]
    # The first step of each process and the last step, in runs far shorter than the logging interval.
    assert [each.memory_peak_bytes is not None for each in run.steps] == [True, False, True, True]
    assert [start.resumed_from_step for start in run.runs] == [None, 2, 3]
    assert sum("continues with a different precision" in event.detail for event in run.events) == 2
