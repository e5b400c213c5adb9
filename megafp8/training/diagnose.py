"""Where numbers that are not finite come from: the batch that stopped a step, looked at."""

from __future__ import annotations

from megafp8.checkpoint.state import Progress
from megafp8.telemetry.records import Record
from megafp8.training.assemble import Run
from megafp8.training.evaluation import build_batches
from megafp8.training.precision_at import precision_at
from megafp8.training.step import clear_gradients, forward_backward


def diagnose(run: Run, progress: Progress) -> list[Record]:
    """What a look at the stopped step shows, on rank 0; nothing in a run that does not look. All ranks call it.

    A step that was not looked at runs forward and backward once more, with the weights that it had (the update was not
    made) and other random numbers for dropout.

    Args:
        progress: before the step.
    """
    if run.probe is None:
        return []
    if not run.probe.is_looking:
        samples = progress.consumed_samples
        batches = build_batches(run, run.datasets[0], samples, samples + run.global_batch_size, num_workers=0)
        with run.probe.looking(), precision_at(run, progress.step + 1):
            clear_gradients(run)
            forward_backward(run, batches, run.num_microbatches, forward_only=False)
    return run.probe.take_records(progress.step + 1, run.place.rank)
