"""What features add to a training step. A run has a list of the parts that it needs, and the step asks each in order.

A part is what one feature does around forward-backward and the update: clear what it counts, name numbers that all
ranks sum, restore what a step without an update must not have changed, and give fields of the step's record. The step
(`step.py`) knows no part by name. A new number of a step is a part, a name in its `counts`, and a field of `StepRecord`
in `metrics/records.py` that its `metrics` return.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor

from megafp8.checkpoint.progress import Progress, TrainingState
from megafp8.config import derived, multi_token
from megafp8.config.health_case import health_case
from megafp8.config.layer_backends import LayerBackend
from megafp8.config.mixture import PEER, is_mixture, token_dispatcher
from megafp8.config.optimizers import is_layer_wise
from megafp8.config.schema import RunConfig
from megafp8.metrics.health_suggestions import for_nonfinite_values
from megafp8.metrics.step_totals import StepTotals
from megafp8.models.attention_logits import LargestLogits
from megafp8.models.graph_room import GraphRoom
from megafp8.models.grouped_moe import PeerMoELayer
from megafp8.models.peer_exchange import load_room
from megafp8.models.router import ExpertBiasSnapshot
from megafp8.nonfinite.gradients import GradientNormCheck, build_gradient_check
from megafp8.nonfinite.operands import NonfiniteOperands, OperandMonitor, build_operand_monitor
from megafp8.nonfinite.policy import BadStepPolicy
from megafp8.optimizer.data_parallel import runtime_of
from megafp8.optimizer.fp8_gradients import CodeCounts, Fp8Reduction, next_factor
from megafp8.optimizer.fp8_reduction import build_fp8_reduction
from megafp8.optimizer.gradient_communication import WgradOverwrite
from megafp8.optimizer.qk_clip import QkClip, data_group
from megafp8.optimizer.received_bytes import ReceivedBytes
from megafp8.optimizer.skip_update import SpikeDetector
from megafp8.optimizer.weight_ema import WeightEma
from megafp8.training.precision import DelayedScalingSnapshot

Reports = Sequence[Mapping[str, Tensor]]
"""What the losses of the microbatches report on this rank; none on a rank that computes no loss."""


class StepPart:
    """What one feature adds to a step; all ranks call the methods of the same parts in the same order."""

    def clear_gradients(self) -> None:
        """Before forward-backward, also before passes that are no step."""

    def begin(self, progress: Progress) -> None:
        """Before a step, and before passes that are no step; `progress` is that before it."""

    def counts(self, reports: Reports) -> Mapping[str, Tensor]:
        """After forward-backward: numbers of this rank, which are summed over all ranks. Names and shapes are the same
        on all ranks."""
        return {}

    def undo(self) -> None:
        """The step made no update, because it was bad or a loss scale overflowed."""

    def must_repeat(self, totals: StepTotals) -> bool:
        """After forward-backward: whether its results are of no use, and it has to be repeated kernel by kernel."""
        return False

    def skip(self) -> None:
        """The step was bad, and the run goes on without its update; after `undo`."""

    def changed_progress(self, progress: Progress, totals: StepTotals) -> Mapping[str, Any]:
        """Fields of the progress that an update changes."""
        return {}

    def after_update(self, progress: Progress) -> None:
        """After an update of the weights; `progress` is that before the step."""

    def metrics(self, progress: Progress, totals: StepTotals) -> Mapping[str, Any]:
        """At the end of a step: fields of its `StepRecord`."""
        return {}

    def byte_counters(self) -> Iterator[ReceivedBytes]:
        """What counts bytes in forward-backward, so that a replay of a CUDA graph counts them, too."""
        yield from ()

    def end_passes(self) -> None:
        """After passes that are no step, which `begin` preceded: undo what they counted and changed."""

    def after_load(self) -> None:
        """After a rollback loaded a checkpoint, which may have gathered weights."""

    def begin_evaluation(self) -> None:
        """Before forward passes on other data."""

    def end_evaluation(self) -> None:
        """After them."""

    def linears_changed(self) -> None:
        """Linears compute in another precision from now on."""


class ZeroedBuffers(StepPart):
    """Zeroes the gradient buffers."""

    def __init__(self, state: TrainingState):
        self.chunks = state.chunks

    def clear_gradients(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()


class OverwrittenBuffers(StepPart):
    """Lets the first wgrad of a step overwrite its gradients, and zeroes the others."""

    def __init__(self, overwrite: WgradOverwrite):
        self.overwrite = overwrite

    def clear_gradients(self) -> None:
        self.overwrite.start()

    def linears_changed(self) -> None:
        self.overwrite.choose_weights()


class AmaxHistories(StepPart):
    """Keeps amaxes of skipped steps and of validations out of the state of delayed scaling.

    Args:
        can_skip: whether steps may be skipped, so that each step saves the state.
    """

    def __init__(self, snapshot: DelayedScalingSnapshot, can_skip: bool):
        self.snapshot, self.can_skip = snapshot, can_skip

    def begin(self, progress: Progress) -> None:
        if self.can_skip:
            self.snapshot.save()

    def skip(self) -> None:
        self.snapshot.restore()

    def begin_evaluation(self) -> None:
        self.snapshot.save()

    def end_evaluation(self) -> None:
        self.snapshot.restore()


class ExpertBiases(StepPart):
    """Restores the biases of experts where a step makes no update."""

    def __init__(self, snapshot: ExpertBiasSnapshot):
        self.snapshot = snapshot

    def begin(self, progress: Progress) -> None:
        self.snapshot.save()

    def undo(self) -> None:
        self.snapshot.restore()

    def end_passes(self) -> None:
        self.snapshot.restore()


class RepeatedStep(StepPart):
    """Has a step repeated whose CUDA graph had too little room.

    Attributes:
        counted: what the passes count for records, which the repeated ones count again.
        is_repeated: whether the step is repeated.
    """

    def __init__(self, rooms: Sequence[GraphRoom]):
        self.rooms, self.counted, self.is_repeated = rooms, list[Tensor](), False

    def begin(self, progress: Progress) -> None:
        for room in self.rooms:
            room.overflows.zero_()

    def counts(self, reports: Reports) -> Mapping[str, Tensor]:
        return {"graph_overflows": torch.cat([room.overflows for room in self.rooms]).sum()}

    def must_repeat(self, totals: StepTotals) -> bool:
        self.is_repeated = totals.number("graph_overflows") > 0
        for counts in self.counted if self.is_repeated else ():
            counts.zero_()
        return self.is_repeated

    def metrics(self, progress: Progress, totals: StepTotals) -> Mapping[str, Any]:
        return {"is_repeated": self.is_repeated}


class Traffic(StepPart):
    """Records the bytes that this rank received in a step, by the field of the record."""

    def __init__(self, counter: ReceivedBytes, field: str):
        self.counter, self.field = counter, field

    def metrics(self, progress: Progress, totals: StepTotals) -> Mapping[str, Any]:
        return {self.field: self.counter.take()}

    def byte_counters(self) -> Iterator[ReceivedBytes]:
        yield self.counter

    def end_passes(self) -> None:
        self.counter.take()

    after_load = end_passes


class Fp8Gradients(StepPart):
    """The reduction of gradients in FP8: its automatic factor, its error feedback, and its counts.

    Args:
        has_factor: whether the scales of parameters have an automatic factor, which follows from the counts.
    """

    def __init__(self, reduction: Fp8Reduction, has_factor: bool):
        self.reduction, self.has_factor = reduction, has_factor

    def begin(self, progress: Progress) -> None:
        self.reduction.begin_step(progress.grad_factor)

    def counts(self, reports: Reports) -> Mapping[str, Tensor]:
        return {"grad_codes": self.reduction.counts}

    def undo(self) -> None:
        self.reduction.clear_residuals()

    def changed_progress(self, progress: Progress, totals: StepTotals) -> Mapping[str, Any]:
        codes = CodeCounts(*totals["grad_codes"])
        return {"grad_factor": next_factor(progress.grad_factor, codes)} if self.has_factor else {}

    def metrics(self, progress: Progress, totals: StepTotals) -> Mapping[str, Any]:
        codes = CodeCounts(*totals["grad_codes"])
        return {
            "grad_reduce_bytes": self.reduction.received_bytes,
            "grad_intra_node_bytes": self.reduction.within_node.received_bytes or None,  # none without two levels
            "grad_underflow_fraction": codes.underflow_fraction,
            "grad_saturated_fraction": codes.saturated_fraction,
        }

    def end_passes(self) -> None:
        self.reduction.clear_residuals()

    def byte_counters(self) -> Iterator[ReceivedBytes]:
        yield self.reduction
        yield self.reduction.within_node


class AttentionLogits(StepPart):
    """Records the largest attention logit of a step, and clips the weights that made it too large.

    Args:
        qk_clip: None clips nothing.
    """

    def __init__(self, chunks: Sequence[Any], device: torch.device, qk_clip: Optional[QkClip] = None):
        self.logits = LargestLogits(chunks, device)
        self.device, self.qk_clip, self.num_clipped = device, qk_clip, 0
        self.largest: Optional[float] = None

    def begin(self, progress: Progress) -> None:
        self.num_clipped, self.largest = 0, None
        self.logits.clear()

    def after_update(self, progress: Progress) -> None:
        if self.qk_clip is None or self.reduce_largest() <= self.qk_clip.threshold:
            return
        of_all_data = self.logits.values.clone()
        if self.logits.attentions:
            dist.all_reduce(of_all_data, op=dist.ReduceOp.MAX, group=data_group())
        num_clipped = self.qk_clip.clip(self.logits.attentions, self.logits.by_layer(of_all_data), self.device)
        self.qk_clip.share()
        dist.all_reduce(num_clipped)
        self.num_clipped = int(num_clipped) // dist.get_world_size(data_group())

    def reduce_largest(self) -> float:
        """The largest logit of all ranks, reduced once a step; all ranks call it."""
        if self.largest is None:
            none = torch.full((1,), -torch.inf, device=self.device)
            largest = torch.cat([self.logits.values, none]).max()
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
            self.largest = float(largest)
        return self.largest

    def metrics(self, progress: Progress, totals: StepTotals) -> Mapping[str, Any]:
        found: dict[str, Any] = {"max_attention_logit": self.reduce_largest()}
        return found if self.qk_clip is None else found | {"num_clipped_heads": self.num_clipped}


class AveragedWeights(StepPart):
    """Updates the moving average of the weights."""

    def __init__(self, ema: WeightEma):
        self.ema = ema

    def after_update(self, progress: Progress) -> None:
        self.ema.after_update(progress.step + 1)


class GradientFactor(StepPart):
    """Records the automatic factor, also of a run on one rank, which reduces nothing."""

    def metrics(self, progress: Progress, totals: StepTotals) -> Mapping[str, Any]:
        return {"grad_scale_factor": progress.grad_factor}


class DepthLosses(StepPart):
    """The mean loss of each depth of multi-token prediction.

    Args:
        is_counted: whether the loss of this rank counts; other ranks have copies of it.
    """

    def __init__(self, num_depths: int, device: torch.device, is_counted: bool):
        self.zeros, self.is_counted = torch.zeros(num_depths, 2, device=device), is_counted

    def counts(self, reports: Reports) -> Mapping[str, Tensor]:
        counted = reports if self.is_counted else ()
        return {"mtp_losses": sum((report["mtp_losses"] for report in counted), self.zeros)}  # sums and tokens

    def metrics(self, progress: Progress, totals: StepTotals) -> Mapping[str, Any]:
        pairs = zip(totals["mtp_losses"][::2], totals["mtp_losses"][1::2], strict=True)
        return {"mtp_losses": tuple(total / count if count else math.nan for total, count in pairs)}


class DocumentLengths(StepPart):
    """The length of a token's document, on average over the tokens of the step, if attention stops at its borders."""

    def __init__(self, device: torch.device, is_counted: bool):
        self.zero = torch.zeros(1, dtype=torch.float64, device=device)
        self.is_counted = is_counted  # other ranks have copies

    def counts(self, reports: Reports) -> Mapping[str, Tensor]:
        counted = reports if self.is_counted else ()
        return {"document_squares": sum((report["document_squares"] for report in counted), self.zero)}

    def metrics(self, progress: Progress, totals: StepTotals) -> Mapping[str, Any]:
        return {"document_squares": totals.number("document_squares")}


class BadStepDetector(StepPart):
    """Finds bad steps: non-finite losses, gradients and operands, and spikes.

    Attributes:
        gradients: the check of this rank's gradients.
        operands: counts non-finite and saturated operands.
        policy: decides on what they find.
        nonfinite: the operands of the last step.
    """

    def __init__(self, gradients: GradientNormCheck, operands: OperandMonitor, policy: BadStepPolicy):
        self.gradients, self.operands, self.policy = gradients, operands, policy
        self.nonfinite = NonfiniteOperands()

    def begin(self, progress: Progress) -> None:
        self.gradients.reset()
        self.operands.reset()

    def counts(self, reports: Reports) -> Mapping[str, Tensor]:
        return self.operands.counts()

    def metrics(self, progress: Progress, totals: StepTotals) -> Mapping[str, Any]:
        return self.operands.metrics(self.nonfinite)


def build_bad_step_detector(
    config: RunConfig, training_state: TrainingState, implementation: LayerBackend, device: torch.device
) -> BadStepDetector:
    """The detector of a run. The checks of its gradients come before their reduction."""
    training, precision = config.training, config.precision
    spikes = None
    if training.spike_policy != "off":
        spikes = SpikeDetector(
            training.spike_window, training.spike_sigma, training.spike_min_steps, training.spike_norm_factor
        )
    operands = build_operand_monitor(config.model, precision, training_state.chunks, implementation, device)
    in_fp8 = precision.grad_reduce_in_fp8
    gradients = build_gradient_check(training_state, training, config.parallel, in_fp8, device)
    policy = BadStepPolicy(
        training, config.optimizer, training_state.optimizer, spikes, lambda: for_nonfinite_values(health_case(config))
    )
    return BadStepDetector(gradients, operands, policy)


def state_parts(
    config: RunConfig,
    state: TrainingState,
    implementation: LayerBackend,
    device: torch.device,
    counts_loss: bool,
    documents_room: GraphRoom,
) -> Iterator[StepPart]:
    """The parts that restore state of the layers, and those of the losses.

    Args:
        counts_loss: whether the loss of this rank counts.
        documents_room: that of the run.
    """
    rooms = list[GraphRoom]()
    if derived.uses_cuda_graph(config) and is_mixture(config.model) and token_dispatcher(config) == PEER:
        layers = (module for chunk in state.chunks for module in chunk.modules() if isinstance(module, PeerMoELayer))
        # Also on a stage without experts: all ranks count the same.
        rooms.append(next((layer.exchange.room for layer in layers), load_room(device)))
    if derived.uses_cuda_graph(config) and config.data.reset_attention_mask:
        rooms.append(documents_room)
    if derived.is_stateful(config.precision):
        snapshot = DelayedScalingSnapshot(state.chunks, implementation)
        yield AmaxHistories(snapshot, can_skip=config.training.max_skipped_steps > 0 or bool(rooms))
    if config.model.moe_router_enable_expert_bias:
        yield ExpertBiases(ExpertBiasSnapshot(state.chunks))
    if rooms:
        yield RepeatedStep(rooms)
    if derived.measures_attention_logits(config):
        settings, clip = config.optimizer, None
        if settings.qk_clip:
            clip = QkClip(state.optimizer, state.chunks, settings.qk_clip_threshold, settings.qk_clip_alpha)
        yield AttentionLogits(state.chunks, device, clip)
    if state.weight_ema is not None:
        yield AveragedWeights(state.weight_ema)
    if config.precision.grad_reduce_fp8_scaling == "tensor":
        yield GradientFactor()
    if depths := multi_token.num_depths(config.model):
        yield DepthLosses(depths, device, counts_loss)
    if config.data.reset_attention_mask:
        yield DocumentLengths(device, counts_loss)


def reduction_parts(config: RunConfig, state: TrainingState, device: torch.device) -> Iterator[StepPart]:
    """The parts of the communication of gradients and weights. They hook into it, before the checks of gradients do."""
    if reduction := build_fp8_reduction(config.precision, state.chunks, device):
        state.gradient_residuals.extend(reduction.residuals)
        yield Fp8Gradients(reduction, config.precision.grad_reduce_fp8_scaling == "tensor")
    runtime, chunks = runtime_of(state.chunks[0]), state.chunks
    gathers_complete = is_layer_wise(config.optimizer, config.parallel)
    counters = {
        "param_gather_bytes": state.optimizer if gathers_complete else runtime.gather_traffic(chunks),
        "grad_reduce_bytes": None if config.precision.grad_reduce_in_fp8 else runtime.reduction_traffic(chunks),
    }
    yield from (Traffic(counter, field) for field, counter in counters.items() if counter is not None)
