"""Loss spikes: an update is skipped, or the run rolls back to a checkpoint. A resumed run decides the same."""

from __future__ import annotations

from pathlib import Path

from nonfinite_runs import LENGTH, run_loop
from ranks import run_ranks
from small_run import FP8, PLAIN, build_run, fingerprint, small_config, weights

from megafp8.analysis.runs import load_run
from megafp8.checkpoint.directory import complete_steps
from megafp8.checkpoint.progress import ROLLBACK, SPIKE, Progress, SkippedSamples
from megafp8.training.evaluation import build_batches
from megafp8.training.resume import resume
from megafp8.training.step import progress_after_step, train_step

OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel"
DELAYED = "--bf16 --fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 8 --fp8-amax-compute-algo max"
WINDOW = "--spike-window 8 --spike-min-steps 4 --train-iters 12"
SKIP = f"--spike-policy skip --max-skipped-steps 2 {WINDOW}"
BACK = f"--spike-policy rollback --spike-rollback-steps 2 --spike-skip-batches 4 --save-interval 2 {WINDOW}"
SPIKE_AT_7 = "scale:rank=1,step=7,factor=10000,times=9,at=step.gradients"


def test_a_spike_is_skipped_also_after_a_resume(tmp_path: Path) -> None:
    plan = "scale:rank=0,step=7,factor=9,at=step.loss"
    unbroken = run_loop(tmp_path / "unbroken", plan, f"{PLAIN} {SKIP}")
    history = unbroken.progress.history
    assert history.skipped == (SkippedSamples(48, 56, 7, SPIKE),)
    assert len(history.window) == 8 and history.num_in_row == 0
    run = load_run(tmp_path / "unbroken")
    assert [record.step for record in run.steps if record.is_skipped] == [7]
    assert run.steps[6].grad_norm is not None
    (detail,) = (event.detail for event in run.events if event.name == "step skipped")
    assert detail.startswith("loss ") and "the last 6 updates lead to (samples 48-55)" in detail

    run_loop(tmp_path / "parts", plan, f"{PLAIN} {SKIP} --exit-interval 5")
    assert run_loop(tmp_path / "parts", plan, f"{PLAIN} {SKIP}") == unbroken, "in the middle of a window"


def test_gradient_norm_spikes_are_checked_before_the_update(tmp_path: Path) -> None:
    """Four ranks, each with a shard of the optimizer state. The weights after the step equal those before it."""
    flags = f"--bf16 {FP8} {TENSOR} {OVERLAP} {SKIP}"
    before = run_loop(tmp_path, SPIKE_AT_7, f"{flags} --exit-interval 6", 4)
    after = run_loop(tmp_path, SPIKE_AT_7, f"{flags} --exit-interval 7", 4)
    assert after.progress.history.skipped == (SkippedSamples(48, 56, 7, SPIKE),)
    assert after.weights == before.weights


def test_a_lasting_change_of_level_stops_the_run(tmp_path: Path) -> None:
    """Every step is a spike, and after two the run stops."""
    plan = ";".join(f"scale:rank=0,step={step},factor=9,at=step.loss" for step in (7, 8, 9))
    text = run_loop(tmp_path, plan, f"{PLAIN} {SKIP}").error
    assert text.startswith("step 9: loss ") and "(samples 64-71)" in text
    assert "after 2 consecutive skipped updates" in text


def weights_after_reload(folder: Path, flags: str, first: Progress, last_step: int) -> list[str]:
    """Hash of each rank's weights after other steps, a load of a checkpoint and more steps."""
    config = small_config("llama", f"{LENGTH} --train-iters 12 --load {folder} {flags}", 2)

    def continue_training() -> str:
        run = build_run(config)
        assert resume(run)[0].step == 4
        progress, end = first, last_step * run.global_batch_size
        batches = build_batches(run, run.datasets[0], progress.consumed_samples, end, num_workers=0)
        while progress.step < last_step:
            result = train_step(run, batches, progress)
            progress = progress_after_step(run, progress, result.bad_step, None)
        return fingerprint(weights(run))

    return run_ranks(2, continue_training)


def test_rollback_skips_the_batches(tmp_path: Path) -> None:
    """From step 7 to the checkpoint of step 4, since step 6 is too recent. It continues with step 9's batch."""
    flags = f"{DELAYED} {OVERLAP}"
    back = f"{flags} {BACK} --async-save"
    unbroken = run_loop(tmp_path / "unbroken", SPIKE_AT_7, back)
    progress = unbroken.progress
    assert (progress.step, progress.consumed_samples) == (12, 96)
    assert progress.history.skipped == (SkippedSamples(32, 64, 7, ROLLBACK),)
    assert progress.history.num_rollbacks == 1
    assert complete_steps(tmp_path / "unbroken") == [2, 4, 8, 10, 12], "8 is saved immediately, and 6 is retired"
    run = load_run(tmp_path / "unbroken")
    assert [record.step for record in run.steps] == [1, 2, 3, 4, 9, 10, 11, 12]
    assert [start.resumed_from_step for start in run.runs] == [None, 4]
    (detail,) = (event.detail for event in run.events if event.name == "rolled back")
    assert "iter_0000004, skipping 4 batches (samples 32-63), because of step 7: gradient norm " in detail

    run_loop(tmp_path / "parts", SPIKE_AT_7, f"{back} --exit-interval 4")
    assert weights_after_reload(tmp_path / "parts", flags, Progress(8, 64), 12) == unbroken.weights
    run_loop(tmp_path / "parts", SPIKE_AT_7, f"{back} --exit-interval 9")
    assert run_loop(tmp_path / "parts", SPIKE_AT_7, back) == unbroken, "stopped after it went back"


def test_abandoned_checkpoints_stay_until_a_later_one_is_complete(tmp_path: Path) -> None:
    """The disk is full when the rollback is saved at step 8. The next save is at step 10."""
    plan = "nan:rank=1,step=7,at=step.loss;full:rank=0,step=8,at=save.before_rename"
    run_loop(tmp_path, plan, f"{PLAIN} {BACK}")
    assert complete_steps(tmp_path) == [2, 4, 10, 12] and (tmp_path / "iter_0000006.retired").is_dir()
    events = [event.name for event in load_run(tmp_path).events if event.name.startswith(("checkpoint", "rolled"))]
    saves = ["checkpoint", *["checkpoint saved"] * 3, "rolled back", "checkpoint failed", "checkpoint saved"]
    assert events == [*saves, "checkpoint", "checkpoint saved"]


def test_rollbacks_are_limited(tmp_path: Path) -> None:
    """Non-finite values are also a spike. The second rollback exceeds the limit."""
    plan = "nan:rank=1,step=7,at=step.loss;nan:rank=0,step=11,at=step.loss"
    ended = run_loop(tmp_path, plan, f"{PLAIN} {BACK} --max-rollbacks 1")
    assert ended.error.startswith("step 11: loss or gradients are not finite")
    assert len([event for event in load_run(tmp_path).events if event.name == "rolled back"]) == 1


def test_rollback_without_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    ended = run_loop(tmp_path, "nan:rank=1,step=2,at=step.loss", f"{PLAIN} {BACK} --train-iters 12")
    assert "has no complete checkpoint yet; lower --save-interval" in ended.error


def test_rollback_does_not_pass_the_end_of_the_run(tmp_path: Path) -> None:
    """At step 11 only eight of the 200 batches are left after the checkpoint of step 4."""
    flags = f"{PLAIN} {BACK} --spike-skip-batches 200 --spike-rollback-steps 6"
    progress = run_loop(tmp_path, "inf:rank=1,step=11,at=step.gradients", flags).progress
    assert (progress.step, progress.consumed_samples) == (12, 96)
    assert progress.history.skipped == (SkippedSamples(32, 96, 11, ROLLBACK),)
