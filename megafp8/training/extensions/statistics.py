"""Quantization statistics, collected every `--fp8-log-interval` steps. Other steps have no hooks and no cost.

In a statistics step observers see the operands of the linears (`metrics/collector.py`), the weights are compared before
and after the update, and the gradient norm of the first microbatch is compared with that of the global batch. Each rank
fills its rows of one small table. Two reductions bring it to rank 0, which makes a record and health warnings of it
while the device computes the next step.

Where steps are CUDA graphs, forward-backward with the observers is one as well: launched from the host, it would take
several times as long as on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Optional

import torch
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model
from torch import Tensor

from megafp8.checkpoint.save import finish_param_gather
from megafp8.config.health_case import health_case
from megafp8.config.precision_schedule import is_quantized_at, precision_at
from megafp8.config.schema import PrecisionConfig
from megafp8.errors import NumericsError
from megafp8.metrics.collector import TensorObserver, build_statistics_plan, collect
from megafp8.metrics.health import HealthMonitor
from megafp8.metrics.records import QuantizationRecord, Record
from megafp8.metrics.step_totals import StepTotals
from megafp8.metrics.tensor_table import StatisticsTable
from megafp8.metrics.timers import RECORDS
from megafp8.optimizer.fused_adam import FusedAdamOptimizer
from megafp8.optimizer.schedules import current_loss_scale
from megafp8.quantization.linear_plan import Observer
from megafp8.recipes.base import Operand
from megafp8.training.cuda_graph import StepHooks
from megafp8.training.evaluation import build_batches
from megafp8.training.extension import Extension, LoopState
from megafp8.training.extensions.statistics_hooks import (
    TrackedLinear,
    find_linears,
    master_values,
    observe_reductions,
    reduced_gradient_shard,
    signal_and_noise,
    squared_norms,
    squares,
)
from megafp8.training.run import Run
from megafp8.training.step import StepResult, clear_gradients, forward_backward


class QuantizationStatistics(Extension):
    """Records quantization statistics and health warnings, of statistics steps and of a step that failed."""

    span = RECORDS
    collector: Optional[StatisticsCollector] = None

    def open(self, state: LoopState) -> None:
        if state.run.config.logging.fp8_log_interval is not None:
            self.collector = StatisticsCollector(state.run)

    def before_step(self, state: LoopState) -> None:
        if self.collector is not None and self.collector.is_due(state.step + 1):
            state.step_hooks.append(self.collector.start(state.step + 1, state.progress.consumed_samples))

    def before_update(self, state: LoopState, totals: StepTotals) -> None:
        if self.collector is not None:
            self.collector.before_update(totals)

    def after_step(self, state: LoopState, result: StepResult) -> None:
        if self.collector is not None and self.collector.is_collecting:
            state.sinks.defer(self.collector.end_step(state.step))

    def recover(self, state: LoopState, error: NumericsError) -> bool:
        """Record the statistics of the failed step.

        If it was no statistics step, its forward-backward runs again, with the same weights, since the update was not
        made, and other random numbers for dropout.
        """
        if self.collector is None:
            return False
        if not self.collector.is_collecting:
            run, samples = state.run, state.progress.consumed_samples
            hooks = self.collector.start(state.step + 1, samples)
            batches = build_batches(run, run.datasets[0], samples, samples + run.batch_size_at(samples), num_workers=0)
            run.set_precision(state.step + 1)
            with hooks.attached():
                clear_gradients(run)
                forward_backward(run, batches, run.num_microbatches_at(samples), forward_only=False)
        state.sinks.defer(self.collector.end_step(state.step + 1))
        state.sinks.flush()  # before anything else may fail
        return False

    def close(self, state: LoopState, error: Optional[BaseException]) -> None:
        """Record the health summary of the run."""
        if self.collector is None or error is not None:
            return
        state.sinks.flush()  # the summary includes the last step
        if state.run.rank_position.rank == 0 and state.step >= state.first_step:
            state.sinks.write(self.collector.health.summary(state.first_step, state.step))


class StatisticsCollector:
    """Collects the quantization statistics of a run; all ranks call its methods together.

    Attributes:
        is_collecting: whether a statistics step was started that did not end yet.
    """

    def __init__(self, run: Run):
        config = run.config
        assert config.logging.fp8_log_interval is not None
        self.run, self.interval = run, config.logging.fp8_log_interval
        self.health = HealthMonitor(health_case(config), run.warmup_steps)
        self.set_precision(precision_at(config.precision, 1))
        self.is_collecting = False

    def is_due(self, step: int) -> bool:
        """Whether a step is a statistics step: on the interval, and quantized under `--fp8-schedule`."""
        return step % self.interval == 0 and is_quantized_at(self.run.config.precision, step)

    def set_precision(self, precision: PrecisionConfig) -> None:
        """Observe the linears that quantize in a phase of `--fp8-schedule`."""
        self.precision = precision
        config = self.run.config
        self.plan = build_statistics_plan(config.model, precision, config.logging)
        self.linears = find_linears(unwrap_model(self.run.training_state.chunks), self.plan.recipes)
        self.statistics = StepStatistics(self)

    def start(self, step: int, consumed_samples: int) -> StepHooks:
        """Start a statistics step, the one after so many samples, whose forward-backward is to be observed."""
        precision = precision_at(self.run.config.precision, step)
        if precision != self.precision:
            self.set_precision(precision)
        self.is_collecting = True
        self.statistics.begin(self.run.batch_size_at(consumed_samples))
        return StepHooks(self.statistics.attached, self.statistics.generator, self.statistics.restart)

    def start_if_due(self, number: int) -> list[StepHooks]:
        """Start a step, without the training loop; empty if it is no statistics step."""
        self.is_collecting = False
        return [self.start(number, self.run.batch_schedule.advance(number - 1))] if self.is_due(number) else []

    def before_update(self, totals: StepTotals) -> None:
        """Collect gradient norms and weights, after the reduction and before the update."""
        if self.is_collecting:
            loss_scale = current_loss_scale(self.run.training_state.optimizer) or 1.0
            self.statistics.before_update(totals.num_tokens, loss_scale)

    def end_step(self, step: int) -> Callable[[], list[Record]]:
        """End a statistics step: reduce the statistics and copy them to the host.

        Returns:
            What makes the records, then or later: on rank 0 those of the step and its health warnings, else none.
        """
        self.is_collecting = False
        statistics = self.statistics  # the next phase has others, perhaps before the records are made
        statistics.after_update()
        statistics.table.reduce()
        if self.run.rank_position.rank != 0:
            return list
        table, batch_size = statistics.table.to_host(), statistics.batch_size

        def records() -> list[Record]:
            record = statistics.record(step, table, batch_size)
            return [record, *self.health.update(record)]

        return records


class StepStatistics:
    """The statistics of one step after the other, in the same tensors of the device."""

    def __init__(self, collector: StatisticsCollector):
        self.run, self.linears, self.plan = collector.run, collector.linears, collector.plan
        device = self.run.platform.device
        self.table = StatisticsTable(self.plan.rows(), device)
        self.generator = torch.Generator(device)
        self.has_masters = not self.run.config.optimizer.use_precision_aware_optimizer
        norms = torch.zeros(len(self.linears), dtype=torch.float32, device=device)
        self.norms = {linear.name: norm for linear, norm in zip(self.linears, norms.unbind(), strict=True)}
        self.microbatch_norms: dict[str, Tensor] = {}  # those that were recorded
        self.weights_before: dict[str, Tensor] = {}
        self.codes_before: dict[str, Tensor] = {}

    def begin(self, batch_size: int) -> None:
        """Begin a step of `batch_size` sequences."""
        self.batch_size = batch_size
        self.names = {id(linear.weight): linear.name for linear in self.linears}
        self.restart()

    def restart(self) -> None:
        """Drop what was seen in the step so far."""
        self.table.clear()
        self.generator.manual_seed(0)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Observe the linears and the gradient reductions, and bring what was seen into the table."""
        self.microbatch_norms = {}
        with ExitStack() as stack:
            for linear in self.linears:
                linear.attach(self.observer(linear))
                stack.callback(linear.detach)
            if self.batch_size == self.run.micro_batch_size * self.run.rank_position.data_size:
                stack.enter_context(observe_reductions(self.run.training_state.chunks, self.record_microbatch_norm))
            yield
        self.table.flush()

    def observer(self, linear: TrackedLinear) -> Observer:
        """The observer of a linear.

        When the gradient of the second microbatch arrives, the wgrad of the first one is in the buffer.
        """
        enter = TensorObserver(self.plan, self.table, linear.name, self.generator, linear.first_channel)
        num_gradients = 0

        def observe(operand: Operand, tensor: Tensor, quantized: Any) -> None:
            nonlocal num_gradients
            enter(operand, tensor, quantized)
            if operand is Operand.GRAD_OUTPUT:
                num_gradients += 1
                if num_gradients == 2:
                    self.record_microbatch_norm(linear.weight)

        return observe

    def record_microbatch_norm(self, weight: Tensor) -> None:
        """Record the norm of the gradient so far: a sum over the tokens of the first microbatch."""
        name = self.names.get(id(weight))
        if name is not None and parallel_state.get_context_parallel_world_size() == 1:
            norm = self.microbatch_norms[name] = self.norms[name]
            torch.linalg.vector_norm(weight.main_grad, dtype=torch.float32, out=norm)

    # --- the update ---------------------------------------------------------------------------------------------------

    def before_update(self, num_tokens: float, loss_scale: float) -> None:
        """Add the gradient norms to the table, and copy the weights and their codes."""
        optimizer, data_size = self.run.training_state.optimizer, parallel_state.get_data_parallel_world_size()
        microbatch_tokens = num_tokens * self.run.micro_batch_size / self.batch_size
        few = squares(list(self.microbatch_norms.values())) / ((microbatch_tokens * loss_scale) ** 2 * data_size)
        self.table.add_weight_sums("few_gradient", list(self.microbatch_norms), few)
        shards: dict[str, Tensor] = {}
        for linear in self.linears:
            if linear.name in self.microbatch_norms:
                shard = reduced_gradient_shard(optimizer, linear.weight)
                if shard is not None:
                    shards[linear.name] = shard
        all = squared_norms(list(shards.values())) / loss_scale**2
        if shards and isinstance(optimizer, FusedAdamOptimizer):  # an empty result is on the CPU
            all = all * optimizer.grad_factor.double().square()
        self.table.add_weight_sums("all_gradient", list(shards), all)
        for linear in self.linears:
            values = master_values(linear.weight, self.has_masters)
            if values is not None:
                self.weights_before[linear.name] = values.to(torch.float32, copy=True)
            codes = linear.weight_codes()
            if codes is not None:
                self.codes_before[linear.name] = codes

    @torch.no_grad()
    def after_update(self) -> None:
        """Add the changes of weights and codes by the update to the table."""
        finish_param_gather(self.run.config.parallel, self.run.training_state)
        before, codes_before = self.weights_before, self.codes_before
        linears = {linear.name: linear for linear in self.linears}
        values = list(before.values())
        self.table.add_weight_sums("weight", list(before), squared_norms(values))
        if values:
            torch._foreach_sub_(values, [master_values(linears[name].weight, self.has_masters) for name in before])
        self.table.add_weight_sums("update", list(before), squared_norms(values))
        changed = [torch.count_nonzero(codes != linears[name].weight_codes()) for name, codes in codes_before.items()]
        if changed:
            self.table.add_weight_sums("changed", list(codes_before), torch.stack(changed).double())
        self.table.add_weight_sums("codes", list(codes_before), [codes.numel() for codes in codes_before.values()])
        self.weights_before, self.codes_before = {}, {}

    # --- rank 0 -------------------------------------------------------------------------------------------------------

    def record(self, step: int, table: StatisticsTable, batch_size: int) -> QuantizationRecord:
        """The record of a step of `batch_size` sequences, from the reduced table."""
        tensors, what_if = collect(self.plan, table)
        return QuantizationRecord(
            step=step,
            recipe="" if self.plan.recipe is None else self.plan.recipe.name,
            recipes=self.plan.other_recipes(),
            tensors=tensors,
            what_if=what_if,
            **self.gradient_noise(table, batch_size),
            **table.update_stats(self.plan.linears),
        )

    def gradient_noise(self, table: StatisticsTable, batch_size: int) -> dict[str, Optional[float]]:
        """The gradient noise scale and its parts; empty if a microbatch is the global batch."""
        num_few, num_all = self.run.micro_batch_size, batch_size
        few, all = (table.total(self.plan.linears, field) for field in ("few_gradient", "all_gradient"))
        if not few or num_few == num_all:
            return {}
        signal, noise = signal_and_noise(few, all, num_few, num_all)
        is_sound = signal > 0 and noise > 0  # not so if the variance of the estimates is too high
        return {
            "gradient_signal": signal,
            "gradient_noise": noise,
            "gradient_noise_scale": noise / signal if is_sound else None,
            "gradient_snr": num_all * signal / noise if is_sound else None,
        }
