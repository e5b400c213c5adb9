"""The training loop: steps, validation, checkpoints, and the reasons to stop."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Collection
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, Optional

import torch
import torch.distributed as dist

from megafp8 import faults
from megafp8.checkpoint.save import sync_parameters
from megafp8.checkpoint.state import Progress
from megafp8.config import derived, serialize
from megafp8.config.fp8_schedule import is_quantized_at
from megafp8.data.atomic import atomic_write
from megafp8.data.loader import loader_deaths_explained
from megafp8.errors import CapabilityError, NumericsError
from megafp8.telemetry.records import EventRecord, StepRecord
from megafp8.telemetry.sinks import Sinks, build_sinks
from megafp8.training.assemble import Run, run_folder
from megafp8.training.bad_steps import after_step
from megafp8.training.diagnose import diagnose
from megafp8.training.evaluation import build_batches, evaluate
from megafp8.training.extensions.calibration import calibrate, needs_calibration
from megafp8.training.extensions.checkpoints import Saver, check_folders, is_multiple, saving
from megafp8.training.extensions.profiler import profiler
from megafp8.training.extensions.replica_check import check_replicas
from megafp8.training.extensions.rollback import may_roll_back, roll_back
from megafp8.training.extensions.step_records import Rates, build_rates
from megafp8.training.extensions.stop import is_asked_to_stop, reason_to_stop, stopped_by_signals
from megafp8.training.extensions.stragglers import Stragglers
from megafp8.training.phases import BETWEEN, STEP
from megafp8.training.precision_at import change_before
from megafp8.training.resume import check_nothing_newer, resume, saves_where_it_loads
from megafp8.training.run_record import describe_update, run_record
from megafp8.training.step import Batches, params_norm, train_step


def train(run: Run, told: Optional[dict[str, str]] = None) -> Progress:
    """Train to the end of the run, or to the first reason to stop; all ranks call it.

    Args:
        told: what was decided before, for the record: details by name.

    Returns:
        How far the run came.
    """
    started = time.monotonic()
    folder = run_folder(run.config)
    faults.point("run.start")
    run.guard.enter("load")
    if not run.config.training.skip_train:
        check_folders(run)
    progress, notes = resume(run)
    if not run.config.training.skip_train:
        check_nothing_newer(run, progress.step)
    run.guard.resumed(progress.step, saves_where_it_loads(run.config))
    total_steps = derived.train_iters(run.config, run.place.world_size)
    with ExitStack() as stack:
        sinks = stack.enter_context(open_sinks(run, folder, total_steps))
        sinks.write(run_record(run, progress.step or None))
        for note in notes:
            sinks.write(EventRecord(step=progress.step, name="checkpoint", detail=note))
        for name, detail in ((told or {}) | describe_update(run)).items():
            sinks.write(EventRecord(step=progress.step, name=name, detail=detail))
        if not run.config.training.skip_train:
            first_step = progress.step + 1
            progress = train_steps(run, sinks, progress, total_steps, folder, started)
            if run.probe is not None and run.place.rank == 0 and progress.step >= first_step:
                sinks.write(run.probe.health.summary(first_step, progress.step))
        evaluate_at_end(run, sinks, progress, total_steps)
    return progress


def open_sinks(run: Run, folder: Optional[Path], total_steps: int) -> Sinks:
    """Where records go: rank 0 writes them, and the resolved configuration beside them."""
    if run.place.rank != 0:
        return Sinks(())
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(folder / "config.json") as stream:
            stream.write(serialize.to_json(run.config).encode())
    return build_sinks(run.config.logging, run_folder=str(folder) if folder else None, total_steps=total_steps)


def train_steps(
    run: Run, sinks: Sinks, progress: Progress, total_steps: int, folder: Optional[Path], started: float
) -> Progress:
    """Steps until the run is done or has to stop."""
    training = run.config.training
    batches = remaining_batches(run, progress)
    rates, stragglers = build_rates(run), Stragglers(run)
    first_step = progress.step + 1
    if progress.step < total_steps:
        calibrate_if_due(run, sinks, progress)
    if progress.step < total_steps and run.guard.is_evaluation_due(progress.step):
        validate(run, sinks, progress)
    reason = stopped_by_signals(run.guard) if run.guard.stop_agreed else None  # or that validation would be left out
    if training.manual_gc:
        gc.disable()
    with profiler(run, folder) as profile_step, loader_deaths_explained(), saving(run, sinks) as saver:
        while progress.step < total_steps and reason is None:
            change = change_before(run, progress.step + 1)
            if change is not None:
                sinks.write(change)
                calibrate_if_due(run, sinks, progress)
            stragglers.start()
            try:
                progress = recorded_step(run, sinks, rates, batches, progress, (first_step, total_steps))
            except NumericsError as error:
                progress = after_bad_numbers(run, sinks, saver, progress, total_steps, error)
                batches = remaining_batches(run, progress)
                continue
            step = progress.step
            for event in stragglers.found(step):
                sinks.write(event)
            run.guard.step_done(step)
            saver.poll()
            if is_multiple(step, training.check_weight_hash_across_dp_replicas_interval):
                compare_replicas(run, sinks, step)
            if step == first_step:
                report_attention(run, sinks, step)
            profile_step()
            if is_multiple(step, training.eval_interval) and step < total_steps:
                validate(run, sinks, progress)
            reason = reason_to_stop(run, step, started) if step < total_steps else None
            is_last = reason is not None or step == total_steps
            if saver.save(progress, is_last) and not is_last and is_asked_to_stop(run):
                reason = stopped_by_signals(run.guard)  # while it saved: what is saved need not be saved again
            collect_garbage(run, step)
    if training.manual_gc:
        gc.enable()
    if summary := progress.history.summary():
        sinks.write(EventRecord(step=progress.step, name="skipped", detail=summary))
    if reason is not None:
        saved = f"saved at step {saver.saved_step}" if saver.saved_step is not None else "nothing new is saved"
        place = f", {saved}" if folder else ", not saved (no --save)"
        sinks.write(EventRecord(step=progress.step, name="stopped", detail=reason + place))
    return progress


def calibrate_if_due(run: Run, sinks: Sinks, progress: Progress) -> None:
    """Find delayed scaling's first scales before the first step that uses them, in this run or after a checkpoint."""
    if is_quantized_at(run.config.precision, progress.step + 1) and needs_calibration(run):
        run.guard.enter("calibration")
        sinks.write(calibrate(run, progress))


def remaining_batches(run: Run, progress: Progress) -> Batches:
    """This rank's microbatches from where the run is to its end."""
    num_samples = derived.train_samples(run.config, run.place.world_size)
    return build_batches(run, run.datasets[0], progress.consumed_samples, num_samples, run.config.data.num_workers)


def after_bad_numbers(
    run: Run, sinks: Sinks, saver: Saver, progress: Progress, total_steps: int, error: NumericsError
) -> Progress:
    """Go back to a checkpoint where that is asked for, and save, so that a run that is stopped now goes on from there.

    Raises:
        NumericsError: the error, where the run may not go back, or cannot.
    """
    sinks.write(EventRecord(step=progress.step + 1, name="bad numbers", detail=str(error)))
    for record in diagnose(run, progress):
        sinks.write(record)
    if not may_roll_back(run, progress):
        raise error
    saver.finish(is_last=False)
    run.guard.enter("rollback", progress.step + 1)
    progress = roll_back(run, sinks, progress, total_steps, error)
    saver.save(progress, is_last=progress.step == total_steps, is_due=True)
    return progress


def compare_replicas(run: Run, sinks: Sinks, step: int) -> None:
    """Stop, before anything is saved, where ranks that hold the same weights differ.

    Raises:
        NumericsError: they do.
    """
    try:
        check_replicas(run, step)
    except NumericsError as error:
        sinks.write(EventRecord(step=step, name="replicas differ", detail=str(error)))
        raise


def recorded_step(
    run: Run, sinks: Sinks, rates: Rates, batches: Batches, progress: Progress, ends: Collection[int] = ()
) -> Progress:
    """Train on one global batch and write the record of it; how far the run is then.

    Args:
        ends: the first step of this process and the last of the run, which are shown whatever the interval.
    """
    run.guard.enter(STEP, progress.step + 1)
    run.timer.start()
    with run.probe.step(progress.step + 1) if run.probe is not None else nullcontext():
        result = train_step(run, batches, progress)
    numbers = None if result.is_skipped else (result.loss, result.grad_norm)
    progress = after_step(run, progress, result.finding, numbers)
    record = rates.record(result, progress.step, progress.consumed_samples, run.timer.stop(), run.timer.spans_ms)
    sinks.write(with_details(run, record, ends))
    if result.finding is not None:
        sinks.write(EventRecord(step=progress.step, name="step skipped", detail=result.finding.text))
    for look in run.probe.take_records(progress.step, run.place.rank) if run.probe is not None else ():
        sinks.write(look)
    run.guard.enter(BETWEEN, progress.step)
    return progress


def with_details(run: Run, record: StepRecord, ends: Collection[int]) -> StepRecord:
    """Add what costs time to find out, at the steps that are shown: memory and the weights' norm. All ranks call it."""
    logging = run.config.logging
    if record.step % logging.log_interval and record.step not in ends:
        return record
    peak = torch.tensor(run.platform.peak_memory_bytes(), dtype=torch.int64, device=run.platform.device)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    details: dict[str, float] = {"memory_peak_bytes": int(peak)}
    if logging.log_params_norm:
        sync_parameters(run.config, run.trainee)
        details["params_norm"] = params_norm(run)
    return dataclasses.replace(record, **details)


def report_attention(run: Run, sinks: Sinks, step: int) -> None:
    """Record the attention kernels that ran, and refuse the slow ones that nobody asked for.

    Raises:
        CapabilityError: Transformer Engine fell back to unfused attention, or from FP8 to BF16.
    """
    if run.implementation != "transformer_engine":
        sinks.write(EventRecord(step=step, name="attention", detail="torch SDPA"))
        return
    from megafp8.model.te_layers import selected_attention_backend  # needs Transformer Engine

    chosen = selected_attention_backend()
    if chosen is None:
        return
    sinks.write(EventRecord(step=step, name="attention", detail=f"Transformer Engine {chosen}"))
    if chosen == "unfused" and run.config.precision.attention_backend == "auto":
        cudnn = Path(torch.__file__).parents[1] / "nvidia/cudnn"
        raise CapabilityError(
            "Transformer Engine fell back to unfused attention, a third slower with far more memory; usually a second "
            f"cuDNN on the system: export CUDNN_HOME={cudnn}, or set NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 to see why; "
            "--attention-backend unfused accepts it"
        )
    precision = run.config.precision
    if precision.fp8_dot_product_attention and is_quantized_at(precision, step) and not chosen.endswith(", FP8)"):
        raise CapabilityError(
            f"--fp8-dot-product-attention: Transformer Engine took {chosen}; unset NVTE_DPA_FP8_RECIPE, or set "
            "NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 to see why"
        )


def validate(run: Run, sinks: Sinks, progress: Progress) -> bool:
    """Loss on the validation data, if there is any; False when a signal broke it off."""
    is_whole = record_evaluation(run, sinks, progress, "valid", run.datasets[1])
    run.guard.evaluation_left(None if is_whole else progress.step)
    if run.config.training.empty_unused_memory_level >= 1:
        run.platform.free_cache()
    return is_whole


def evaluate_at_end(run: Run, sinks: Sinks, progress: Progress, total_steps: int) -> None:
    """After the last step: validation and, if there is such data, the test."""
    if progress.step < total_steps and not run.config.training.skip_train:
        return
    if not (
        validate(run, sinks, progress) and record_evaluation(run, sinks, progress, "test", run.datasets[2])
    ):
        stopped_by_signals(run.guard)


def record_evaluation(run: Run, sinks: Sinks, progress: Progress, split: str, dataset: Any) -> bool:
    """Evaluate on a dataset, if there is one; False when a signal broke it off."""
    if dataset is None or run.config.training.eval_iters == 0:
        return True
    tokens = progress.consumed_samples * (run.config.data.seq_length or 0)
    record = evaluate(run, split, dataset, progress.step, tokens)
    run.guard.enter(BETWEEN, progress.step)
    if record is not None:
        sinks.write(record)
    return record is not None


def collect_garbage(run: Run, step: int) -> None:
    """With `--manual-gc`, on all ranks at the same step, so that no rank waits for another's collection."""
    training = run.config.training
    if training.manual_gc and training.manual_gc_interval and step % training.manual_gc_interval == 0:
        gc.collect()
    if training.empty_unused_memory_level >= 2:
        run.platform.free_cache()
