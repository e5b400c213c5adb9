"""The linears of a model that can be looked at, whoever computes them.

What a step does to weights: how far it moves them, and how much of their gradients is noise.

The gradient noise scale is the "simple" one of McCandlish et al., "An Empirical Model of Large-Batch Training"
(arXiv:1812.06162), appendix A.1. The squared norm of the mean gradient over b sequences is on average

    E |G_b|^2 = |G|^2 + tr(S) / b

with the expected gradient G and the covariance S of one sequence's. From a small b and the whole batch B

    |G|^2 = (B |G_B|^2 - b |G_b|^2) / (B - b)        tr(S) = (|G_b|^2 - |G_B|^2) / (1 / b - 1 / B)

and the noise scale is tr(S) / |G|^2, in sequences. Both estimates have no bias, and much variance: average them over
steps before dividing. Here b is one microbatch of a rank, averaged over the data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Optional

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor, nn

from megafp8.mcore.modules import linears_of
from megafp8.metrics.collector import is_kept_as_codes, separate_generators
from megafp8.metrics.recipe_comparison import GEMMS
from megafp8.models.emulated_layers import EmulatedColumnParallelLinear, EmulatedOutputLayer, EmulatedRowParallelLinear
from megafp8.optimizer.gradient_communication import on_reduction
from megafp8.quantization.delayed_scaling import OPERANDS, DelayedScale
from megafp8.quantization.fp8_parameter import QuantizedParameter
from megafp8.quantization.linear import Observer
from megafp8.quantization.quantize import Quantized, Use, quantize_for
from megafp8.recipes.base import Gemm, LinearRecipe, Operand, OperandRule, ScaleRule


class TrackedLinear:
    """A linear that quantizes by itself and shows its operands: an emulated one.

    Args:
        name: `layers.3.linear_fc1`.
        module: a column- or row-parallel linear.
        recipe: its own.
    """

    def __init__(self, name: str, module: nn.Module, recipe: Optional[LinearRecipe]):
        self.name, self.module, self.recipe = name, module, recipe

    @property
    def weight(self) -> Tensor:
        """[N, K], this rank's shard."""
        return self.module.known_weight[0] if isinstance(self.module, EmulatedOutputLayer) else self.module.weight

    @property
    def first_channel(self) -> int:
        """Number of the first input channel of this rank's shard."""
        module, group = self.module, getattr(self.module, "tp_group", None)
        is_split = getattr(module, "input_is_parallel", False) or getattr(module, "parallel_mode", "") == "row"
        return group.rank() * self.weight.shape[1] if is_split and group is not None else 0

    def attach(self, observer: Observer) -> None:
        """Show every operand from now on."""
        self.module.observer = observer

    def detach(self) -> None:
        """Show nothing any more."""
        self.module.observer = None

    def delayed_scale(self, operand: Operand) -> Optional[DelayedScale]:
        """The scale of delayed scaling, to be used without leaving a trace; None if there is none."""
        scale = self.module.quantizer_state.quant_scale[OPERANDS.index(operand)]
        return DelayedScale(scale.clone(), amax=None)

    def scale_group(self, operand: Operand) -> Optional[dist.ProcessGroup]:
        """Ranks that share the scale of an operand."""
        return getattr(self.module.amax_groups(self.module.sequence_parallel), operand.value)

    def weight_codes(self) -> Optional[Tensor]:
        """A copy of the bytes that fprop would multiply now; None in high precision."""
        rule = None if self.recipe is None else self.recipe.rule(Operand.WEIGHT, Gemm.FPROP)
        weight = self.weight
        if rule is None:
            return None
        if isinstance(weight, QuantizedParameter):
            return weight.codes.raw.clone()
        values = weight.detach()
        values = values.dequantize() if is_kept_as_codes(values) else values
        codes = self.codes_of(values, Operand.WEIGHT, [rule]).get(rule)
        return None if codes is None else codes.codes.view(torch.uint8)

    def codes_of(
        self, tensor: Tensor, operand: Operand, rules: Collection[OperandRule]
    ) -> dict[OperandRule, Quantized]:
        """An operand under the run's own rules, by the scales of the moment; without those of delayed scaling where it
        has none yet."""
        needs_delayed = any(rule.scale_rule is ScaleRule.DELAYED for rule in rules)
        delayed = self.delayed_scale(operand) if needs_delayed else None
        if delayed is None:
            rules = [rule for rule in rules if rule.scale_rule is not ScaleRule.DELAYED]
        uses, generators = [Use(rule) for rule in rules], separate_generators(rules, tensor.device)
        return dict(zip(rules, quantize_for(tensor, uses, self.scale_group(operand), delayed, generators), strict=True))


class HookedLinear(TrackedLinear):
    """A linear of Transformer Engine or megatron-core, watched from outside."""

    def __init__(self, name: str, module: nn.Module, recipe: Optional[LinearRecipe]):
        super().__init__(name, module, recipe)
        self.handles: list[Any] = []
        self.observer: Optional[Observer] = None
        self.shown: set[Operand] = set()

    def attach(self, observer: Observer) -> None:
        """Show input and weight until they had codes once, and every gradient, with codes the first time."""
        self.observer, self.shown = observer, set()
        self.handles = [
            self.module.register_forward_pre_hook(self._before_forward),
            self.module.register_forward_hook(self._after_forward),
        ]

    def detach(self) -> None:
        self.observer = None
        for handle in self.handles:
            handle.remove()
        self.handles = []

    def delayed_scale(self, operand: Operand) -> Optional[DelayedScale]:
        from megafp8.te import layers  # needs Transformer Engine

        scale = layers.delayed_scale(self.module, operand.value)
        return None if scale is None else DelayedScale(scale, amax=None)

    def scale_group(self, operand: Operand) -> Optional[dist.ProcessGroup]:
        """As in Transformer Engine: the tensor-parallel ranks, where shards of one activation are gathered."""
        module = self.module
        gathered = {"column": Operand.INPUT, "row": Operand.GRAD_OUTPUT}.get(getattr(module, "parallel_mode", None))
        return module.tp_group if getattr(module, "sequence_parallel", False) and operand is gathered else None

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if Operand.INPUT not in self.shown:
            self._show(Operand.INPUT, normed(module, args[0].detach()))
        if Operand.WEIGHT not in self.shown:
            self._show(Operand.WEIGHT, module.weight)

    def _after_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if first.requires_grad:
            first.register_hook(self._on_gradient)

    def _on_gradient(self, gradient: Tensor) -> None:
        if self.observer is None:
            return
        if Operand.GRAD_OUTPUT in self.shown:
            self.observer(Operand.GRAD_OUTPUT, gradient, {})
        else:
            self._show(Operand.GRAD_OUTPUT, gradient)

    @torch.no_grad()
    def _show(self, operand: Operand, tensor: Tensor) -> None:
        assert self.observer is not None
        is_kept = is_kept_as_codes(tensor)
        values = tensor.dequantize() if is_kept else tensor.detach()
        rows = values.reshape(-1, values.shape[-1])
        codes: dict[Gemm, Quantized] = {}
        if self.recipe is not None:
            rules = {gemm: self.recipe.rule(operand, gemm) for gemm in GEMMS[operand].values()}
            found = self.codes_of(rows, operand, dict.fromkeys(rule for rule in rules.values() if rule is not None))
            codes = {gemm: found[rule] for gemm, rule in rules.items() if rule in found}
        if codes or self.recipe is None:  # delayed scaling has no scale before the first pass
            self.shown.add(operand)
        self.observer(operand, tensor if is_kept else rows, codes)


def normed(module: nn.Module, tensor: Tensor) -> Tensor:
    """The input that the linear multiplies: of a linear with a norm in it, the norm's result, by torch's own norm."""
    weight = getattr(module, "layer_norm_weight", None)
    if weight is None:
        return tensor
    weight = weight.detach() + 1 if module.zero_centered_gamma else weight.detach()
    shape, values = tensor.shape[-1:], tensor.float()
    if module.normalization == "RMSNorm":
        return nn.functional.rms_norm(values, shape, weight.float(), module.eps).to(tensor.dtype)
    bias = None if module.layer_norm_bias is None else module.layer_norm_bias.detach().float()
    return nn.functional.layer_norm(values, shape, weight.float(), bias, module.eps).to(tensor.dtype)


def find_linears(chunks: Sequence[nn.Module], recipes: Mapping[str, Optional[LinearRecipe]]) -> list[TrackedLinear]:
    """The linears of this rank that are named, with their recipes."""
    return [
        (TrackedLinear if is_emulated(module) else HookedLinear)(name, module, recipes[name])
        for chunk in chunks
        for name, module in linears_of(chunk)
        if name in recipes
    ]


def is_emulated(module: nn.Module) -> bool:
    """Does it quantize by itself?"""
    return isinstance(module, (EmulatedColumnParallelLinear, EmulatedRowParallelLinear)) and module.recipe is not None


def signal_and_noise(few: float, all: float, num_few: int, num_all: int) -> tuple[float, float]:
    """Estimates of |G|^2 and tr(S).

    Args:
        few, all: mean squared norms of the mean gradients over `num_few` and `num_all` sequences.
    """
    signal = (num_all * all - num_few * few) / (num_all - num_few)
    noise = (few - all) / (1 / num_few - 1 / num_all)
    return signal, noise


@contextmanager
def before_reduction(chunks: Sequence[Any], note: Callable[[Tensor], None]) -> Iterator[None]:
    """Within, show every weight whose gradient is about to be reduced over the data-parallel ranks."""

    def show(group: Any) -> None:
        for bucket in group.buckets:
            for weight in bucket.params:
                note(weight)

    with ExitStack() as stack:
        for group in (group for chunk in chunks for group in chunk.bucket_groups):
            stack.callback(on_reduction(group, partial(show, group)))
        yield


def reduced_gradient(optimizer: Any, weight: Tensor) -> Optional[Tensor]:
    """The part of a weight's reduced gradient that this rank alone counts, flat; None where it has none."""
    parts = [part for part in optimizer.chained_optimizers if isinstance(part, DistributedOptimizer)]
    if not parts:
        is_first = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
        return weight.main_grad.view(-1) if is_first else None
    for part in parts:
        if not part.is_stub_optimizer and weight in part.model_param_gbuf_map:
            place = part._get_model_param_range_map(weight)["param"]
            return weight.main_grad.view(-1)[place.start : place.end]
    return None


def trained_values(weight: Tensor, has_masters: bool) -> Optional[Tensor]:
    """What the optimizer updates; None where other ranks have it.

    Args:
        has_masters: whether FP32 master weights stand beside weights of fewer bits; else the weight itself is looked
            at, and updates that its type rounds away are not seen.
    """
    if has_masters and hasattr(weight, "main_param"):
        return weight.main_param
    values = weight.detach()
    return values.float() if is_float8tensor(values) else values  # which torch would round to the weight's BF16 first


def norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Norm of each tensor, FP32 scalars; all of them in few operations on a GPU."""
    return list(torch._foreach_norm(tensors, 2, torch.float32)) if tensors else []


def squared(norms: Sequence[Tensor]) -> Tensor:
    """Their squares, FP64 [tensors]."""
    return torch.stack(list(norms)).double().square() if norms else torch.zeros(0)
