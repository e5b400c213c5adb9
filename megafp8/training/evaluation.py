"""Evaluation: loss on validation and test data. Also `build_batches`, by which training gets its microbatches, too."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Optional

import torch

from megafp8.checkpoint.progress import Progress
from megafp8.checkpoint.save import finish_param_gather
from megafp8.checkpoint.state_dict import restore_rng_state, rng_state
from megafp8.config import iterations
from megafp8.config.batch_schedule import BatchSchedule, constant
from megafp8.data.loader import build_loader
from megafp8.metrics.records import TEST, VALID, VALID_EMA, VALID_HIGH_PRECISION, EvalRecord
from megafp8.metrics.sinks import Sinks
from megafp8.metrics.step_totals import LOSS, sum_over_ranks
from megafp8.resilience import fault_injection
from megafp8.resilience.watchdog import AFTER_STEP, EVALUATION
from megafp8.training.precision import high_precision
from megafp8.training.run import Run
from megafp8.training.signals import is_stop_requested
from megafp8.training.step import forward_backward, forward_or_replay, sum_losses
from megafp8.training.task_scores import score_tasks


def evaluate(
    run: Run,
    split: str,
    dataset: Any,
    step: int,
    consumed_tokens: int,
    show_progress: Callable[[int], None] = lambda num_done: None,
) -> Optional[EvalRecord]:
    """Mean loss per token over the first `--eval-iters` global batches of a dataset; all ranks call it.

    A global batch has `--eval-global-batch-size` sequences.

    All validations read the same samples, so that their losses can be compared, also between runs on the same data.
    Under `--fp8-schedule` the precision is that of the last step. Validations also score the run's tasks.

    Args:
        split: `VALID_HIGH_PRECISION` quantizes no GEMM; `VALID_EMA` takes the moving average of the weights.
        show_progress: gets the number of finished batches before each one.

    Returns:
        None if a stop signal interrupted it.
    """
    started = time.monotonic()
    device, num_batches = run.platform.device, run.config.training.eval_iters
    # No loader processes: starting them would take longer than reading these few batches.
    num_samples, schedule = num_batches * run.eval_batch_size, constant(run.eval_batch_size)
    batches = build_batches(run, dataset, 0, num_samples, num_workers=0, batch_schedule=schedule)
    num_microbatches = iterations.num_microbatches(run.config, run.rank_position.world_size, run.eval_batch_size)
    total = torch.zeros(2, dtype=torch.float64, device=device)
    is_high = split == VALID_HIGH_PRECISION
    passes = partial(forward_backward, forward_only=True) if is_high else forward_or_replay
    run.set_precision(step)
    precision = high_precision(run.transformer_config, run.training_state.chunks) if is_high else nullcontext()
    with evaluation_mode(run, has_ema=split == VALID_EMA), precision:
        fault_injection.point("evaluation.begin")
        for index in range(num_batches):
            show_progress(index)
            if is_stop_requested(run):
                return None
            run.watchdog.enter(EVALUATION, step)
            loss = sum_losses(passes(run, batches, num_microbatches))
            if loss is not None:
                total += loss
            fault_injection.point("evaluation.batch")
        scores = score_tasks(run, step) if run.tasks and split != TEST else {}
    if scores is None:
        return None
    counted = total if run.rank_position.reports_loss else torch.zeros_like(total)
    totals = sum_over_ranks({LOSS: counted}, device)
    return EvalRecord(
        step=step,
        split=split,
        loss=totals.loss,
        perplexity=math.exp(min(totals.loss, 700.0)),
        num_tokens=round(totals.num_tokens),
        eval_ms=1000 * (time.monotonic() - started),
        consumed_tokens=consumed_tokens,
        tasks=scores or None,
    )


def validate(run: Run, sinks: Sinks, progress: Progress) -> bool:
    """Evaluate on the validation data, if there is any; False if a signal interrupted it."""
    is_complete = record_evaluation(run, sinks, progress, VALID, run.datasets[1])
    if is_complete and run.config.training.eval_high_precision:
        is_complete = record_evaluation(run, sinks, progress, VALID_HIGH_PRECISION, run.datasets[1])
    ema = run.training_state.weight_ema
    # Before the first update of the average there is none.
    if is_complete and run.config.training.eval_ema and ema is not None and ema.num_updates:
        is_complete = record_evaluation(run, sinks, progress, VALID_EMA, run.datasets[1])
    run.watchdog.evaluation_interrupted(None if is_complete else progress.step)
    if run.config.training.empty_unused_memory_level >= 1:
        run.platform.free_cache()
    return is_complete


def record_evaluation(run: Run, sinks: Sinks, progress: Progress, split: str, dataset: Any) -> bool:
    """Evaluate on a dataset, if there is one, and write the record; False if a signal interrupted it."""
    if dataset is None or run.config.training.eval_iters == 0:
        return True
    num_batches, batch_size = run.config.training.eval_iters, run.eval_batch_size
    sinks.flush()  # the lines of the steps before it come first

    def show_progress(num_done: int) -> None:
        sinks.show_evaluation(progress.step, split, num_done, num_batches, batch_size)

    consumed_tokens = progress.consumed_samples * run.seq_length
    record = evaluate(run, split, dataset, progress.step, consumed_tokens, show_progress)
    run.watchdog.enter(AFTER_STEP, progress.step)
    if record is not None:
        sinks.write(record)
    return record is not None


@contextmanager
def evaluation_mode(run: Run, has_ema: bool = False) -> Iterator[None]:
    """A context without dropout and gradients, in which parameters are gathered completely.

    Overlapped parameter gathers are off within it. Random states are restored afterwards, since the router of a mixture
    draws its noise without gradients, too. So is the state of delayed scaling: Transformer Engine records amaxes here,
    and the scales of later steps must not depend on validation data.

    Args:
        has_ema: the weights are their moving average.
    """
    chunks = run.training_state.chunks
    ema = run.training_state.weight_ema if has_ema else None
    counters = [] if ema is None else [counter for part in run.parts for counter in part.byte_counters()]
    received = [counter.received_bytes for counter in counters]
    has_hooks = run.config.parallel.overlap_param_gather
    # megatron-core's own leaves stale transposes of FP8 weights.
    finish_param_gather(run.config.parallel, run.training_state)
    for chunk in chunks:
        chunk.eval()
        if has_hooks:
            chunk.disable_forward_pre_hook(param_sync=False)
    # With this function the interleaved schedule would start parameter gathers.
    param_sync, run.transformer_config.param_sync_func = run.transformer_config.param_sync_func, None
    random = rng_state()
    try:
        for part in run.parts:
            part.begin_evaluation()
        if ema is not None:
            run.training_state.wait_for_copies()  # a background save may still read the weights
            saved = ema.write_to_model()
        with torch.no_grad():
            yield
    finally:
        run.transformer_config.param_sync_func = param_sync
        restore_rng_state(random)
        for chunk in chunks:
            if has_hooks:
                chunk.enable_forward_pre_hook()
            chunk.train()
        for part in run.parts:
            part.end_evaluation()
    # After the scales, with which FP8 weights are cast. Not after an error, which may be of this rank alone: all ranks
    # take part.
    if ema is not None:
        ema.restore_model(saved)
        for counter, num_bytes in zip(counters, received, strict=True):
            counter.received_bytes = num_bytes  # gathers of the average are those of no step


def build_batches(
    run: Run,
    dataset: Any,
    consumed_samples: int,
    num_samples: int,
    num_workers: int,
    batch_schedule: Optional[BatchSchedule] = None,
) -> Any:
    """This rank's microbatches of a dataset; None on a pipeline stage that reads none.

    Args:
        consumed_samples: index of the first sample.
        num_samples: end of the samples.
        batch_schedule: sizes of the global batches; default those of training.
    """
    if not run.rank_position.needs_batches:
        return None
    return build_loader(
        dataset,
        consumed_samples=consumed_samples,
        micro_batch_size=run.micro_batch_size,
        data_parallel_rank=run.rank_position.data_rank,
        data_parallel_size=run.rank_position.data_size,
        batch_schedule=run.batch_schedule if batch_schedule is None else batch_schedule,
        num_workers=num_workers,
        total_samples=num_samples,
        pin_memory=run.platform.kind == "cuda",
    )
