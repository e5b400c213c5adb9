"""Steps and samples of a run under a batch schedule: end, skipped updates and rollbacks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from megafp8.checkpoint.progress import Progress
from megafp8.config import flags
from megafp8.training.run import Run
from megafp8.training.step import progress_after_rollback, progress_after_step

WORDS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 "
    "--global-batch-size 12 --rampup-batch-size 4 4 20 --train-samples 60"
)
CONSUMED = [0, 4, 8, 12, 20, 32, 44, 56]


def build_run() -> Any:
    """A run without model and data."""
    fields: dict[str, Any] = dict.fromkeys(Run.__dataclass_fields__)
    rank_position: Any = SimpleNamespace(world_size=2)
    fields |= {"config": flags.parse(WORDS.split()).config, "rank_position": rank_position}
    return Run(**fields | {"bad_steps": SimpleNamespace(policy=SimpleNamespace(spikes=None))})


def test_the_end_is_the_same_from_every_step() -> None:
    run = build_run()
    for step, samples in enumerate(CONSUMED):
        assert run.last_step(Progress(step, samples)) == 7
        assert run.end_sample(Progress(step, samples)) == 56


def test_steps_already_made_count_as_they_were() -> None:
    """After 2 steps of 10 samples, three of 12 are left."""
    progress = Progress(2, 20)
    assert build_run().last_step(progress) == 2 + 3
    assert build_run().end_sample(progress) == 56


def test_a_step_consumes_its_batch() -> None:
    run, progress = build_run(), Progress()
    for step in range(7):
        progress = progress_after_step(run, progress, None, (1.0, 1.0))
        assert (progress.step, progress.consumed_samples) == (step + 1, CONSUMED[step + 1])


def test_a_rollback_skips_batches_of_the_schedule() -> None:
    run = build_run()
    progress = progress_after_rollback(run, Progress(5, 32), Progress(2, 8), 4)
    assert (progress.step, progress.consumed_samples) == (6, 44)
    (skipped,) = progress.history.skipped
    assert (skipped.first, skipped.end) == (8, 44)


def test_the_origin_of_the_model_stays() -> None:
    run, start = build_run(), Progress(2, 8, origin="{}")
    assert progress_after_step(run, start, None, (1.0, 1.0)).origin == "{}"
    assert progress_after_rollback(run, Progress(5, 32, origin="{}"), start, 4).origin == "{}"
