"""Early warning by statistics of the layers (`--fp8-guard`), and what a run changes in a layer.

Every `--fp8-guard-interval` steps hooks take the statistics of `metrics/layer_statistics.py` from the first microbatch
of each rank. One MAX all-reduce over all ranks follows, so that they take the same decision. Other steps have no hooks.
A decision depends on the statistics of the step, and on the last values of those whose growth is limited, which are
kept from some steps after the learning rate's warm-up on (`first_steps_not_stored`). They are in the checkpoint, as are
the warnings that were given and the linears that were changed (`SkipHistory`), so that a resumed run decides as the
uninterrupted one. All statistics are recorded (`GuardRecord`).
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Optional

import torch
import torch.distributed as dist
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import unwrap_model
from torch import Tensor
from torch.distributed.tensor import DTensor

from megafp8.checkpoint.progress import HIGH_PRECISION, SMOOTHED, HighPrecisionFallback
from megafp8.config import precision_map
from megafp8.config.guarded_linears import SWIGLU_OUTPUT, watched_linears
from megafp8.mcore.modules import fused_mlps, named_linears
from megafp8.metrics.layer_statistics import (
    ALIGNMENT,
    GRADIENT_SNR,
    GROWTH,
    INPUT_STATISTICS,
    LAYER_STATISTICS,
    LIMITS,
    MEAN_GROWTH,
    MEAN_STEPS,
    NUM_REMEMBERED,
    attention_logit_bound,
    first_steps_not_stored,
    input_statistics,
    root_mean_square,
    smoothing_helps,
    suggestion_text,
    swiglu_alignment,
)
from megafp8.metrics.records import EventRecord, GuardRecord
from megafp8.metrics.timers import RECORDS
from megafp8.optimizer.gradient_snr import gradient_snr
from megafp8.quantization.fp8_parameter import QuantizedParameter
from megafp8.quantization.smoothing import channel_scales
from megafp8.training.cuda_graph import StepHooks
from megafp8.training.extension import Extension, LoopState, is_multiple
from megafp8.training.extensions.statistics_hooks import linear_input
from megafp8.training.run import Run
from megafp8.training.step import StepResult

EVENT, ALL_LAYERS = "guard", "all layers"
LARGEST_REMEMBERED = 3e38  # files hold no infinity
SETTLED_UPDATES = (
    2.0  # in lengths 1 / (1 - beta1) of Adam's first moment: the ratio of noise is then 1.3 times its last
)
Key = tuple[str, str]
"""A statistic and the layer or linear that it is of."""
Trends = Mapping[Key, tuple[float, ...]]
"""The last values that were kept, newest last, of the statistics in `GROWTH`."""


class LayerGuard(Extension):
    """Warns of statistics above their limits, once for each layer or linear, and moves layers if the run wants it."""

    span = RECORDS
    name = "LayerGuard"

    def __init__(self) -> None:
        self.statistics: Optional[LayerStatistics] = None
        self.is_collecting = False
        self.trends: Trends = {}
        self.warnings: list[Key] = []  # those that were given

    def state(self) -> Mapping[str, Any]:
        if not (self.trends or self.warnings):
            return {}
        trends = tuple((statistic, name, trend) for (statistic, name), trend in self.trends.items())
        return {"layer_trends": trends, "warnings": tuple(self.warnings)}

    def load_state(self, values: Mapping[str, Any]) -> None:
        """Trends are those of the checkpoint. After a rollback, warnings of the failed run stay."""
        rows = values.get("layer_trends", ())
        trends = {(statistic, name): tuple(float(value) for value in trend) for statistic, name, trend in rows}
        given = [(statistic, name) for statistic, name in values.get("warnings", ())]
        if not all(isinstance(text, str) for key in (*trends, *given) for text in key):
            raise ValueError("a name of a statistic or layer is no text")
        self.trends, self.warnings = trends, list(dict.fromkeys([*self.warnings, *given]))

    def before_step(self, state: LoopState) -> None:
        training, changed = state.run.config.training, state.progress.history.moved_linears
        self.is_collecting = training.fp8_guard != "off" and is_multiple(state.step + 1, training.fp8_guard_interval)
        if not self.is_collecting:
            return
        if self.statistics is None or self.statistics.changed != changed:
            self.statistics = LayerStatistics(state.run, changed)
        state.step_hooks.append(self.statistics.start())

    def after_step(self, state: LoopState, result: StepResult) -> None:
        if self.statistics is None or not self.is_collecting:
            return
        values = self.statistics.take() | layer_snr(state.run)
        state.sinks.write(GuardRecord(step=state.step, statistics=recorded(values)))
        if result.bad_step is not None:  # a step that is skipped moves nothing
            return
        interval = state.run.config.training.fp8_guard_interval
        is_stored = state.step > first_steps_not_stored(state.run.warmup_steps, interval)
        # Before that there are none, unless an earlier version wrote the checkpoint.
        trends = self.trends if is_stored else {}
        for key, detail in (*mean_warnings(values, trends, interval), *layer_warnings(values, trends)):
            self.handle(state, key, detail)
        self.trends = updated_trends(values, trends) if is_stored else {}

    def handle(self, state: LoopState, key: Key, detail: str) -> None:
        """Report a warning once, and change the layer if `--fp8-guard` says so and it helps."""
        statistic, name = key
        config, guard, limit = state.run.config, state.run.config.training.fp8_guard, LIMITS[statistic]
        layer = ".".join(name.split(".")[:2])
        moves = guard == "bf16-layer" and limit.moves_layer
        smooths = guard == "smooth-swiglu" and smoothing_helps(statistic, name)
        if key not in self.warnings:
            self.warnings.append(key)
            suggestions = suggestion_text(statistic, name, config.model, config.precision, guard)
            if suggestions and not (moves or smooths):
                detail += f"; try: {suggestions}"
            state.sinks.write(EventRecord(step=state.step, name=EVENT, detail=detail))
        if moves:
            move_layer(state, layer, f"{statistic} of {name}")
        if smooths:
            smooth_layer(state, layer, f"{statistic} of {name}")


def recorded(values: Mapping[Key, float]) -> dict[str, dict[str, float]]:
    """What a record has of the statistics of a step; a value below 0 was not taken."""
    found: dict[str, dict[str, float]] = {}
    for (statistic, name), value in values.items():
        if value >= 0:
            found.setdefault(statistic, {})[name] = float(f"{value:.6g}")
    return found


def mean_warnings(values: Mapping[Key, float], trends: Trends, interval: int) -> Iterator[tuple[Key, str]]:
    """The statistics whose geometric mean over the layers grew more than it may, with a description."""
    for statistic, (factor, floor) in MEAN_GROWTH.items():
        kept = {key: trends[key][-max(1, MEAN_STEPS // interval) :] for key in trends if key[0] == statistic}
        pairs = [(min(trend), values[key]) for key, trend in kept.items() if values.get(key, 0.0) > 0 < min(trend)]
        if len(pairs) < 2:
            continue
        before, now = (statistics.geometric_mean(each) for each in zip(*pairs, strict=True))
        if now > max(floor, factor * before):
            span = f"{interval * max(map(len, kept.values()))} steps"
            yield (statistic, ALL_LAYERS), f"{statistic} of {ALL_LAYERS} grew from {before:.3g} to {now:.3g} in {span}"


def layer_warnings(values: Mapping[Key, float], trends: Trends) -> Iterator[tuple[Key, str]]:
    """The statistics above their limits, or that grew more than they may, with a description."""
    for key, value in values.items():
        statistic, name = key
        if value > LIMITS[statistic].value:
            yield key, f"{statistic} of {name} is {value:.3g}, above {LIMITS[statistic].value:g}"
            continue
        for limit in GROWTH.get(statistic, ()):
            trend = trends.get(key, ())[-limit.num_intervals :]
            if trend and value > max(limit.floor, limit.factor * min(trend)):
                span = f"{len(trend)} interval{'s' if len(trend) > 1 else ''}"
                yield key, f"{statistic} of {name} grew from {min(trend):.3g} to {value:.3g} in {span}"
                break


def updated_trends(values: Mapping[Key, float], trends: Trends) -> Trends:
    """The trends with the values of this step; a value below 0 was not taken."""
    found = {
        key: (*trends.get(key, ()), min(value, LARGEST_REMEMBERED))[-NUM_REMEMBERED:]
        for key, value in values.items()
        if key[0] in GROWTH and value >= 0
    }
    return {**trends, **found}


def layer_snr(run: Run) -> dict[Key, float]:
    """The signal-to-noise ratio of the gradients of each layer, after an update; all ranks call it.

    Empty before the moments have `SETTLED_UPDATES` updates: of few gradients the ratio is near 1, and a run that starts
    with new moments (`--no-load-optim`) would seem to have a rising one.
    """
    optimizer, num_layers = run.config.optimizer, run.config.model.num_layers
    assert num_layers is not None
    betas = optimizer.adam_beta1, optimizer.adam_beta2
    found, num_updates = gradient_snr(run.training_state.optimizer, run.training_state.chunks, num_layers, betas)
    if num_updates < round(SETTLED_UPDATES / (1 - betas[0])):
        return {}
    return {(GRADIENT_SNR, f"layers.{layer}"): value for layer, value in enumerate(found) if value is not None}


def move_layer(state: LoopState, layer: str, reason: str) -> None:
    """Compute all linears of a layer in high precision from the next step on; all ranks call it."""
    config = state.run.config
    names = precision_map.linears_with_statistics(config.model, config.precision)
    linears = [HighPrecisionFallback(name, state.step, reason) for name in names if name.startswith(f"{layer}.")]
    detail = f"{layer} is in high precision from step {state.step + 1} on: {reason}"
    change_linears(state, linears, "layer moved", detail)


def smooth_layer(state: LoopState, layer: str, reason: str) -> None:
    """Give the input of a layer's linear_fc2 a scale per channel from the next step on; all ranks call it."""
    linears = [
        HighPrecisionFallback(name, state.step, reason, SMOOTHED)
        for name in watched_linears(state.run.config.model, state.run.config.precision)
        if name.startswith(f"{layer}.") and name.endswith(f".{SWIGLU_OUTPUT}")
    ]
    names = ", ".join(linear.name for linear in linears)
    detail = f"{names} has a scale per channel from step {state.step + 1} on: {reason}"
    change_linears(state, linears, "layer smoothed", detail)


def change_linears(state: LoopState, linears: list[HighPrecisionFallback], event: str, detail: str) -> None:
    """Change linears for the rest of the run and record it; nothing if they are all changed already."""
    changed = state.progress.history.after_fallback(linears)
    if changed is state.progress.history:
        return
    state.run.change_linears(linears)
    state.progress = dataclasses.replace(state.progress, history=changed)
    state.sinks.write(EventRecord(step=state.step, name=event, detail=detail))


class LayerStatistics:
    """The statistics of one step after the other, in one tensor of the device.

    Args:
        run: whose layers are watched.
        changed: linears that the run changed. Those in high precision are not watched any more. Of smoothed ones the
            input after its channel scales is watched, which is what is quantized, under a name of its own. The
            alignment of their weights is not: it harms by that input.
    """

    def __init__(self, run: Run, changed: Collection[HighPrecisionFallback] = ()):
        model, precision = run.config.model, run.config.precision
        assert model.num_layers is not None
        fallbacks = {linear.name for linear in changed if linear.form == HIGH_PRECISION}
        smoothed = {linear.name for linear in changed if linear.form == SMOOTHED}
        self.inputs = {
            name: f"{name}.{'smoothed_input' if name in smoothed else 'input'}"
            for name in watched_linears(model, precision)
            if name not in fallbacks
        }
        self.smoothed = smoothed
        keys = [(statistic, name) for name in self.inputs.values() for statistic in INPUT_STATISTICS]
        keys += [(statistic, f"layers.{layer}") for layer in range(model.num_layers) for statistic in LAYER_STATISTICS]
        self.run, self.changed = run, changed
        self.keys = {key: index for index, key in enumerate(keys)}
        self.table = torch.empty(len(keys), dtype=torch.float32, device=run.platform.device)
        self.handles: list[Any] = []

    def start(self) -> StepHooks:
        """Clear the values of the last step; the hooks of the next one."""
        self.table.fill_(-1.0)
        return StepHooks(self.attached)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Attach the hooks; each runs once."""
        try:
            self._attach()
            yield
        finally:
            for handle in self.handles:
                handle.remove()
            self.handles = []

    def take(self) -> dict[Key, float]:
        """The largest value of each statistic over all ranks; all ranks call it."""
        dist.all_reduce(self.table, op=dist.ReduceOp.MAX)
        return dict(zip(self.keys, self.table.tolist(), strict=True))

    def _attach(self) -> None:
        for name, linear, fused in self._linears():
            if name in self.inputs:
                record = functools.partial(self._record_input, name, linear)
                if fused is not None and linear is fused.linear_fc2:
                    self._once(fused.register_result_hook, record)
                else:
                    register = (fused or linear).register_forward_pre_hook
                    self._once(register, lambda _, args, record=record: record(args[0]))
            mlp, _, kind = name.rpartition(".")
            output = f"{mlp}.{SWIGLU_OUTPUT}"
            is_watched = output in self.inputs and output not in self.smoothed
            if kind == "linear_fc1" and is_watched and self.run.config.model.swiglu:
                self._record_alignment(".".join(name.split(".")[:2]), linear.weight)
        chunks = unwrap_model(self.run.training_state.chunks)
        for layer in (m for chunk in chunks for m in chunk.modules() if isinstance(m, TransformerLayer)):
            name = f"layers.{layer.layer_number - 1}"
            if ("residual", name) not in self.keys:  # layers of multi-token prediction come after the model's
                continue
            register = layer.register_forward_hook
            self._once(register, lambda _, args, output, name=name: self._record_residual(name, output))
            attention = getattr(layer.self_attention, "core_attention", None)
            if attention is not None:
                self._once(attention.register_forward_pre_hook, functools.partial(self._record_logits, name))

    def _linears(self) -> Iterator[tuple[str, Any, Optional[torch.nn.Module]]]:
        """Name, linear, and Transformer Engine's fused MLP that computes in its place, if one does."""
        for chunk in unwrap_model(self.run.training_state.chunks):
            fused = {linear: mlp for linear, mlp in fused_mlps(chunk).items() if not mlp.is_split}
            yield from ((name, linear, fused.get(linear)) for name, linear in named_linears(chunk))

    def _once(self, register: Callable[..., Any], record: Callable[..., None]) -> None:
        """Register a hook that is called once."""

        def hook(*args: Any) -> None:
            handle.remove()
            record(*args)

        handle = register(hook)
        self.handles.append(handle)

    def _record(self, statistic: str, name: str, value: Tensor) -> None:
        self.table[self.keys[statistic, name]] = value

    @torch.no_grad()
    def _record_alignment(self, layer: str, weight: Tensor) -> None:
        if isinstance(weight, QuantizedParameter) or is_float8tensor(weight):
            return
        complete = weight.full_tensor() if isinstance(weight, DTensor) else weight  # all ranks with its rows come here
        self._record(ALIGNMENT, layer, swiglu_alignment(complete))

    @torch.no_grad()
    def _record_input(self, name: str, linear: torch.nn.Module, values: Tensor) -> None:
        quantized = linear_input(linear, values)
        if name in self.smoothed:  # Transformer Engine's linear has divided it already; its scales are then 1
            quantized = quantized / channel_scales(quantized).to(quantized.dtype)
        for statistic, value in zip(INPUT_STATISTICS, input_statistics(quantized).unbind(), strict=True):
            self._record(statistic, self.inputs[name], value)

    @torch.no_grad()
    def _record_residual(self, name: str, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        self._record("residual", name, root_mean_square(hidden))

    @torch.no_grad()
    def _record_logits(self, name: str, attention: Any, args: tuple[Any, ...]) -> None:
        if len(args) >= 2 and isinstance(args[0], Tensor) and args[0].ndim == args[1].ndim == 4:
            cap = self.run.config.model.attention_logit_softcapping
            bound = attention_logit_bound(args[0], args[1], attention.softmax_scale, cap)
            self._record("attention logits", name, bound)
