"""Quantization statistics, every `--fp8-log-interval` steps; the steps between know nothing of them.

In a statistics step the linears show their operands (`metrics/collector.py`), the weights are compared before and after
the update, and the gradient of the first microbatch with that of the whole batch. Every rank fills its part of one
small table, which two reductions bring to rank 0, where it becomes a record, and findings about the run's health.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Optional

import torch
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model
from torch import Tensor

from megafp8.checkpoint.save import sync_parameters
from megafp8.config import derived
from megafp8.config.precision_options import is_quantized_at
from megafp8.errors import NumericsError
from megafp8.metrics.collector import TensorObserver, collect, plan_observation
from megafp8.metrics.health import HealthMonitor
from megafp8.metrics.records import QuantizationRecord, Record
from megafp8.metrics.tensor_table import StatisticsTable
from megafp8.optimizer.fused_adam import FusedAdamOptimizer
from megafp8.optimizer.gradient_checks import StepTotals
from megafp8.optimizer.schedules import current_loss_scale
from megafp8.quantization.linear import Observer
from megafp8.recipes.base import Operand
from megafp8.training.checks import machine_problems
from megafp8.training.evaluation import build_batches
from megafp8.training.extension import Extension, LoopState
from megafp8.training.extensions.statistics_hooks import (
    TrackedLinear,
    before_reduction,
    find_linears,
    norms,
    reduced_gradient,
    signal_and_noise,
    squared,
    trained_values,
)
from megafp8.training.run import Run
from megafp8.training.step import StepResult, clear_gradients, forward_backward


class QuantizationStatistics(Extension):
    """Records quantization statistics and what they say about the run's health; also of a step that failed."""

    collector: Optional[StatisticsCollector] = None

    def open(self, state: LoopState) -> None:
        if state.run.config.logging.fp8_log_interval is not None:
            self.collector = StatisticsCollector(state.run)

    def before_step(self, state: LoopState) -> None:
        if self.collector is not None and self.collector.is_due(state.step + 1):
            self.collector.start()
            state.needs_eager_step = True

    def before_update(self, state: LoopState, totals: StepTotals) -> None:
        if self.collector is not None:
            self.collector.before_update(totals)

    def after_step(self, state: LoopState, result: StepResult) -> None:
        self.write_records(state, state.step)

    def recover(self, state: LoopState, error: NumericsError) -> bool:
        """Find where the bad numbers come from.

        If the step was no statistics step, it runs forward and backward once more, with the weights that it had (the
        update was not made) and other random numbers for dropout.
        """
        if self.collector is None:
            return False
        if not self.collector.is_collecting:
            self.collector.start()
            run, samples = state.run, state.progress.consumed_samples
            batches = build_batches(run, run.datasets[0], samples, samples + run.global_batch_size, num_workers=0)
            with run.precision_at(state.step + 1):
                clear_gradients(run)
                forward_backward(run, batches, run.num_microbatches, forward_only=False)
        self.write_records(state, state.step + 1)
        return False

    def close(self, state: LoopState, error: Optional[BaseException]) -> None:
        """Record a summary of the run's health."""
        if self.collector is None:
            return
        self.collector.stop()
        if error is None and state.run.place.rank == 0 and state.step >= state.first_step:
            state.sinks.write(self.collector.health.summary(state.first_step, state.step))

    def write_records(self, state: LoopState, step: int) -> None:
        """Write the statistics of a step, if they were collected."""
        for record in self.collector.take_records(step) if self.collector is not None else ():
            state.sinks.write(record)


class StatisticsCollector:
    """Collects the quantization statistics of a run, step by step; all ranks call it alike."""

    def __init__(self, run: Run):
        config = run.config
        assert config.logging.fp8_log_interval is not None
        self.config, self.trainee, self.device = config, run.trainee, run.platform.device
        self.rank, self.interval = run.place.rank, config.logging.fp8_log_interval
        self.num_microbatches, self.global_batch_size = run.num_microbatches, run.global_batch_size
        self.plan = plan_observation(config)
        self.linears = find_linears(unwrap_model(self.trainee.chunks), self.plan.recipes)
        world_size = run.place.world_size
        warmup_steps = derived.lr_warmup_samples(config, world_size) / self.global_batch_size
        self.health = HealthMonitor(config, world_size, warmup_steps, machine_problems)
        self.current: Optional[StatisticsStep] = None

    def is_due(self, step: int) -> bool:
        """Whether a step is a statistics step: at the interval, and not in high precision by the schedule."""
        return step % self.interval == 0 and is_quantized_at(self.config.precision, step)

    @property
    def is_collecting(self) -> bool:
        """Whether a step was started whose records were not taken."""
        return self.current is not None

    def start(self) -> None:
        """Collect from now on."""
        self.current = StatisticsStep(self)
        self.current.attach()

    def stop(self) -> None:
        """Collect no more from the linears; `take_records` has what they showed."""
        if self.current is not None:
            self.current.detach()

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Within, collect if the step is a statistics step. To be used where there are no extensions."""
        self.current = None
        if self.is_due(number):
            self.start()
        try:
            yield
        finally:
            self.stop()

    def before_update(self, totals: StepTotals) -> None:
        """Between the backward pass and the update."""
        if self.current is not None:
            loss_scale = current_loss_scale(self.trainee.optimizer) or 1.0
            self.current.before_update(totals.num_tokens, loss_scale)

    def take_records(self, step: int) -> list[Record]:
        """The statistics of the step that just ended, and findings, on rank 0; nothing on other ranks, nor after other
        steps."""
        self.stop()
        current, self.current = self.current, None
        if current is None:
            return []
        current.after_update()
        current.table.reduce()
        if self.rank != 0:
            return []
        current.table.to_host()
        record = current.record(step)
        return [record, *self.health.look(record)]


class StatisticsStep:
    """The statistics of one step."""

    def __init__(self, collector: StatisticsCollector):
        self.collector, self.plan = collector, collector.plan
        self.table = StatisticsTable(collector.plan.rows(), collector.device)
        self.has_masters = not collector.config.optimizer.use_precision_aware_optimizer
        self.names = {id(linear.weight): linear.name for linear in collector.linears}
        self.few: dict[str, Tensor] = {}
        self.before: dict[str, Tensor] = {}
        self.codes_before: dict[str, Tensor] = {}
        self._reduction_hooks = ExitStack()

    def attach(self) -> None:
        """Have the linears show their operands and gradients."""
        for linear in self.collector.linears:
            linear.attach(self.observer(linear))
        if self.collector.num_microbatches == 1:
            hooks = before_reduction(self.collector.trainee.chunks, self.note_gradient)
            self._reduction_hooks.enter_context(hooks)

    def detach(self) -> None:
        """Remove the hooks; again does nothing."""
        self._reduction_hooks.close()
        for linear in self.collector.linears:
            linear.detach()

    def observer(self, linear: TrackedLinear) -> Observer:
        """What a linear shows its operands to. When the second microbatch's gradient comes, the first one's is in."""
        enter = TensorObserver(self.plan, self.table, linear.name, linear.first_channel)
        num_gradients = 0

        def observe(operand: Operand, tensor: Tensor, quantized: Any) -> None:
            nonlocal num_gradients
            enter(operand, tensor, quantized)
            if operand is Operand.GRAD_OUTPUT:
                num_gradients += 1
                if num_gradients == 2:
                    self.note_gradient(linear.weight)

        return observe

    def note_gradient(self, weight: Tensor) -> None:
        """Remember the norm of the gradient so far, a sum over the tokens of one microbatch."""
        name = self.names.get(id(weight))
        if name is not None and parallel_state.get_context_parallel_world_size() == 1:
            self.few[name] = torch.linalg.vector_norm(weight.main_grad, dtype=torch.float32)

    # --- the update ---------------------------------------------------------------------------------------------------

    def before_update(self, num_tokens: float, loss_scale: float) -> None:
        """Enter the gradients' norms, and keep the weights and their codes."""
        collector = self.collector
        optimizer, data_size = collector.trainee.optimizer, parallel_state.get_data_parallel_world_size()
        tokens_of_few = num_tokens * collector.config.training.micro_batch_size / collector.global_batch_size
        few = squared(list(self.few.values())) / ((tokens_of_few * loss_scale) ** 2 * data_size)
        self.table.add_of_weights("few_gradient", list(self.few), few)
        noted = [linear for linear in collector.linears if linear.name in self.few]
        of_rank = ((linear.name, reduced_gradient(optimizer, linear.weight)) for linear in noted)
        reduced = {name: gradient for name, gradient in of_rank if gradient is not None}
        all = squared(norms(list(reduced.values()))) / loss_scale**2
        if reduced and isinstance(optimizer, FusedAdamOptimizer):  # where nothing is, it is not on the factor's device
            all = all * optimizer.grad_factor.double().square()
        self.table.add_of_weights("all_gradient", list(reduced), all)
        for linear in collector.linears:
            values = trained_values(linear.weight, self.has_masters)
            if values is not None:
                self.before[linear.name] = values.to(torch.float32, copy=True)
            codes = linear.weight_codes()
            if codes is not None:
                self.codes_before[linear.name] = codes

    @torch.no_grad()
    def after_update(self) -> None:
        """Enter what the update changed."""
        sync_parameters(self.collector.config, self.collector.trainee)
        before, codes_before = self.before, self.codes_before
        linears = {linear.name: linear for linear in self.collector.linears}
        values = list(before.values())
        self.table.add_of_weights("weight", list(before), squared(norms(values)))
        if values:
            torch._foreach_sub_(values, [trained_values(linears[name].weight, self.has_masters) for name in before])
        self.table.add_of_weights("update", list(before), squared(norms(values)))
        changed = [torch.count_nonzero(codes != linears[name].weight_codes()) for name, codes in codes_before.items()]
        if changed:
            self.table.add_of_weights("changed", list(codes_before), torch.stack(changed).double())
        self.table.add_of_weights("codes", list(codes_before), [codes.numel() for codes in codes_before.values()])

    # --- rank 0 -------------------------------------------------------------------------------------------------------

    def record(self, step: int) -> QuantizationRecord:
        """The record, from the reduced table."""
        tensors, what_if = collect(self.plan, self.table)
        return QuantizationRecord(
            step=step,
            recipe="" if self.plan.recipe is None else self.plan.recipe.name,
            recipes=self.plan.other_recipes(),
            tensors=tensors,
            what_if=what_if,
            **self.gradient_noise(),
            **self.table.update_stats(self.plan.linears),
        )

    def gradient_noise(self) -> dict[str, Optional[float]]:
        """Signal and noise of the gradient; nothing where no smaller batch than the whole was seen."""
        num_few, num_all = self.collector.config.training.micro_batch_size, self.collector.global_batch_size
        few, all = (self.table.total(self.plan.linears, field) for field in ("few_gradient", "all_gradient"))
        if not few or num_few == num_all:
            return {}
        signal, noise = signal_and_noise(few, all, num_few, num_all)
        is_sound = signal > 0 and noise > 0  # else the variance of the estimates has its way
        return {
            "gradient_signal": signal,
            "gradient_noise": noise,
            "gradient_noise_scale": noise / signal if is_sound else None,
            "gradient_snr": num_all * signal / noise if is_sound else None,
        }
