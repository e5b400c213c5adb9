"""Looks at what quantization does, every so many steps; the steps between know nothing of it.

In a step that is looked at, the linears show their operands (`model/observation.py`), the weights are compared before
and after the update, and the gradient of the first microbatch with that of the whole batch. Every rank fills its part
of one small table, which two reductions bring to rank 0, where it becomes a record, and findings about the run's
health.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Optional

import torch
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model
from torch import Tensor

from megafp8.checkpoint.save import sync_parameters
from megafp8.checkpoint.state import Trainee
from megafp8.config import derived
from megafp8.config.fp8_schedule import is_quantized_at
from megafp8.config.schema import RunConfig
from megafp8.fp8.linear import Observer
from megafp8.fp8.recipes import Operand
from megafp8.model.observation import TensorObserver, collect, plan_observation
from megafp8.model.watched_linears import WatchedLinear, find_linears
from megafp8.optim.one_pass import OnePassOptimizer
from megafp8.optim.updates import before_reduction, norms, reduced_gradient, signal_and_noise, squared, trained_values
from megafp8.telemetry.health import HealthWatch
from megafp8.telemetry.records import QuantizationRecord, Record
from megafp8.telemetry.tensor_sums import TensorTable
from megafp8.training.checks import machine_problems


class Probe:
    """The looks of one run; all ranks have one and call it alike.

    Args:
        trainee: model and optimizer, as they will be trained.
        world_size: of the run.
    """

    def __init__(self, config: RunConfig, trainee: Trainee, world_size: int, device: torch.device):
        assert config.logging.fp8_log_interval is not None
        self.config, self.trainee, self.device = config, trainee, device
        self.interval = config.logging.fp8_log_interval
        self.num_microbatches = derived.num_microbatches(config, world_size)
        self.global_batch_size = derived.global_batch_size(config, world_size)
        self.plan = plan_observation(config)
        self.linears = find_linears(unwrap_model(trainee.chunks), self.plan.recipes)
        warmup_steps = derived.lr_warmup_samples(config, world_size) / self.global_batch_size
        self.health = HealthWatch(config, world_size, warmup_steps, machine_problems)
        self.look: Optional[Look] = None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around one step: look at it if its turn has come, and it is not in high precision by the schedule."""
        self.look = None
        is_due = number % self.interval == 0 and is_quantized_at(self.config.precision, number)
        with self.looking() if is_due else nullcontext():
            yield

    @property
    def is_looking(self) -> bool:
        """Has a step been looked at whose records were not taken?"""
        return self.look is not None

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Look at what runs inside, to the end or to an error."""
        self.look = Look(self)
        try:
            with self.look.watching():
                yield
        finally:
            self.look.detach()

    def before_update(self, num_tokens: float, loss_scale: float = 1.0) -> None:
        """Between the backward pass and the update.

        Args:
            num_tokens: in the global batch.
            loss_scale: which the gradients are multiplied by.
        """
        if self.look is not None:
            self.look.before_update(num_tokens, loss_scale)

    def take_records(self, step: int, rank: int) -> list[Record]:
        """What the step that just ended showed, and what that says, on rank 0; nothing on others, and after steps that
        were not looked at."""
        look, self.look = self.look, None
        if look is None:
            return []
        look.after_update()
        look.table.reduce()
        if rank != 0:
            return []
        look.table.to_host()
        record = look.record(step)
        return [record, *self.health.look(record)]


class Look:
    """One step that is looked at."""

    def __init__(self, probe: Probe):
        self.probe, self.plan = probe, probe.plan
        self.table = TensorTable(probe.plan.rows(), probe.device)
        self.has_masters = not probe.config.optimizer.use_precision_aware_optimizer
        self.names = {id(linear.weight): linear.name for linear in probe.linears}
        self.few: dict[str, Tensor] = {}
        self.before: dict[str, Tensor] = {}
        self.codes_before: dict[str, Tensor] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within, linears show their operands and gradients."""
        with ExitStack() as stack:
            for linear in self.probe.linears:
                linear.attach(self.observer(linear))
            if self.probe.num_microbatches == 1:
                stack.enter_context(before_reduction(self.probe.trainee.chunks, self.note_gradient))
            yield

    def detach(self) -> None:
        """Let go of the linears."""
        for linear in self.probe.linears:
            linear.detach()

    def observer(self, linear: WatchedLinear) -> Observer:
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
        probe = self.probe
        optimizer, data_size = probe.trainee.optimizer, parallel_state.get_data_parallel_world_size()
        tokens_of_few = num_tokens * probe.config.training.micro_batch_size / probe.global_batch_size
        few = squared(list(self.few.values())) / ((tokens_of_few * loss_scale) ** 2 * data_size)
        self.table.add_of_weights("few_gradient", list(self.few), few)
        noted = [linear for linear in probe.linears if linear.name in self.few]
        of_rank = ((linear.name, reduced_gradient(optimizer, linear.weight)) for linear in noted)
        reduced = {name: gradient for name, gradient in of_rank if gradient is not None}
        all = squared(norms(list(reduced.values()))) / loss_scale**2
        if reduced and isinstance(optimizer, OnePassOptimizer):  # where nothing is, it is not on the factor's device
            all = all * optimizer.grad_factor.double().square()
        self.table.add_of_weights("all_gradient", list(reduced), all)
        for linear in probe.linears:
            values = trained_values(linear.weight, self.has_masters)
            if values is not None:
                self.before[linear.name] = values.to(torch.float32, copy=True)
            codes = linear.weight_codes()
            if codes is not None:
                self.codes_before[linear.name] = codes

    @torch.no_grad()
    def after_update(self) -> None:
        """Enter what the update changed."""
        sync_parameters(self.probe.config, self.probe.trainee)
        before, codes_before = self.before, self.codes_before
        linears = {linear.name: linear for linear in self.probe.linears}
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
        num_few, num_all = self.probe.config.training.micro_batch_size, self.probe.global_batch_size
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


def build_probe(config: RunConfig, trainee: Trainee, world_size: int, device: torch.device) -> Optional[Probe]:
    """The probe of a run; None without `--fp8-log-interval`."""
    return None if config.logging.fp8_log_interval is None else Probe(config, trainee, world_size, device)
