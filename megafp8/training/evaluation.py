"""Loss on held-out data."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Optional

import torch

from megafp8.checkpoint.progress import Progress
from megafp8.checkpoint.save import sync_parameters
from megafp8.data.loader import build_loader
from megafp8.metrics.records import EvalRecord
from megafp8.metrics.sinks import Sinks
from megafp8.optimizer.gradient_checks import agree
from megafp8.resilience import fault_injection
from megafp8.resilience.watchdog import BETWEEN, EVALUATION
from megafp8.training.run import Run, to_device_sum
from megafp8.training.signals import is_asked_to_stop
from megafp8.training.step import forward_backward


def evaluate(run: Run, split: str, dataset: Any, step: int, consumed_tokens: int) -> Optional[EvalRecord]:
    """Mean loss per token over the first `--eval-iters` global batches of a dataset; all ranks call it.

    Every validation of a run, and of every other run on the same data, sees the same samples, so their losses compare.
    Under --fp8-schedule it computes as the last step did.

    Returns:
        None when a signal asked to stop before it was done.
    """
    started = time.monotonic()
    device, num_batches = run.platform.device, run.config.training.eval_iters
    # In this process: starting loader processes for so few batches would take longer than reading them.
    batches = build_batches(run, dataset, 0, num_batches * run.global_batch_size, num_workers=0)
    total = torch.zeros(2, dtype=torch.float64, device=device)
    with inference_mode(run), run.precision_at(step):
        fault_injection.point("evaluation.begin")
        for _ in range(num_batches):
            if is_asked_to_stop(run):
                return None
            run.guard.enter(EVALUATION, step)
            loss = to_device_sum(forward_backward(run, batches, run.num_microbatches, forward_only=True))
            if loss is not None:
                total += loss
            fault_injection.point("evaluation.batch")
    totals = agree(total if run.place.reports_loss else None, torch.zeros((), device=device), device)
    return EvalRecord(
        step=step,
        split=split,
        loss=totals.loss,
        perplexity=math.exp(min(totals.loss, 700.0)),
        num_tokens=round(totals.num_tokens),
        eval_ms=1000 * (time.monotonic() - started),
        consumed_tokens=consumed_tokens,
    )


def validate(run: Run, sinks: Sinks, progress: Progress) -> bool:
    """Loss on the validation data, if there is any; False when a signal interrupted it."""
    is_whole = record_evaluation(run, sinks, progress, "valid", run.datasets[1])
    run.guard.evaluation_left(None if is_whole else progress.step)
    if run.config.training.empty_unused_memory_level >= 1:
        run.platform.free_cache()
    return is_whole


def record_evaluation(run: Run, sinks: Sinks, progress: Progress, split: str, dataset: Any) -> bool:
    """Evaluate on a dataset, if there is one; False when a signal interrupted it."""
    if dataset is None or run.config.training.eval_iters == 0:
        return True
    tokens = progress.consumed_samples * (run.config.data.seq_length or 0)
    record = evaluate(run, split, dataset, progress.step, tokens)
    run.guard.enter(BETWEEN, progress.step)
    if record is not None:
        sinks.write(record)
    return record is not None


@contextmanager
def inference_mode(run: Run) -> Iterator[None]:
    """No dropout and no gradients; with overlapped gathers, parameters complete before and gathers on again after.

    The amax histories and scales of delayed scaling are restored: Transformer Engine enters amaxes in forward passes
    without gradients, too, and scales of the next steps would depend on held-out data and on how often it is
    evaluated. Layers that have not run yet have nothing to restore.
    """
    chunks = run.trainee.chunks
    hooked = run.config.parallel.overlap_param_gather
    sync_parameters(run.config, run.trainee)  # megatron-core's leaves old transposes of FP8 weights
    for chunk in chunks:
        chunk.eval()
        if hooked:
            chunk.disable_forward_pre_hook(param_sync=False)
    # The interleaved schedule would start gathers of its own.
    gather, run.transformer_config.param_sync_func = run.transformer_config.param_sync_func, None
    try:
        if run.delayed is not None:
            run.delayed.remember()
        with torch.no_grad():
            yield
    finally:
        run.transformer_config.param_sync_func = gather
        for chunk in chunks:
            if hooked:
                chunk.enable_forward_pre_hook()
            chunk.train()
        if run.delayed is not None:
            run.delayed.restore()


def build_batches(run: Run, dataset: Any, consumed_samples: int, num_samples: int, num_workers: int) -> Any:
    """This rank's microbatches of a dataset, from a sample on; None on a stage that needs none."""
    if not run.place.needs_batches:
        return None
    assert run.config.training.micro_batch_size is not None
    return build_loader(
        dataset,
        consumed_samples=consumed_samples,
        micro_batch_size=run.config.training.micro_batch_size,
        data_parallel_rank=run.place.data_rank,
        data_parallel_size=run.place.data_size,
        global_batch_size=run.global_batch_size,
        num_workers=num_workers,
        total_samples=num_samples,
        pin_memory=run.platform.kind == "cuda",
    )
