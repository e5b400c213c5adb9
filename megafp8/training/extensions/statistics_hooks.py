"""Hooks of the quantization statistics: observers of a linear's operands, and access to its gradient and weight.

The gradient noise scale is the "simple" one of McCandlish et al., "An Empirical Model of Large-Batch Training"
(arXiv:1812.06162), appendix A.1. The expected squared norm of the mean gradient over b sequences is

    E |G_b|^2 = |G|^2 + tr(S) / b

with the expected gradient G and the covariance S of the gradient of one sequence. From a small batch b and the global
batch B follow the estimates

    |G|^2 = (B |G_B|^2 - b |G_b|^2) / (B - b)        tr(S) = (|G_b|^2 - |G_B|^2) / (1 / b - 1 / B)

and the noise scale is tr(S) / |G|^2, in sequences. Both estimates are unbiased but have a high variance: average them
over steps before dividing. Here b is one microbatch of a rank, and |G_b|^2 is averaged over the data-parallel ranks.
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

from megafp8.mcore.modules import fused_mlps, named_linears
from megafp8.mcore.process_groups import bucket_groups, is_reduced_over_expert_ranks
from megafp8.metrics.collector import is_stored_as_codes
from megafp8.metrics.recipe_comparison import GEMMS
from megafp8.models.emulated_layers import EmulatedColumnParallelLinear, EmulatedOutputLayer, EmulatedRowParallelLinear
from megafp8.optimizer.gradient_communication import add_grad_sync_hook
from megafp8.quantization.delayed_scaling import OPERANDS, DelayedScale
from megafp8.quantization.fp8_parameter import QuantizedParameter
from megafp8.quantization.linear_plan import Observer
from megafp8.quantization.quantize import quantize_for
from megafp8.quantization.quantized_tensor import Quantized, Use
from megafp8.recipes.base import Gemm, LinearRecipe, Operand, OperandRule, ScaleRule


class TrackedLinear:
    """An emulated linear, which calls its observer itself.

    Args:
        name: `layers.3.linear_fc1`.
        module: a column- or row-parallel linear.
        recipe: of this linear; None in high precision.
    """

    def __init__(self, name: str, module: nn.Module, recipe: Optional[LinearRecipe]):
        self.name, self.module, self.recipe = name, module, recipe

    @property
    def weight(self) -> Tensor:
        """[N, K], this rank's shard."""
        return self.module.gemm_weight[0] if isinstance(self.module, EmulatedOutputLayer) else self.module.weight

    @property
    def first_channel(self) -> int:
        """Index of the first input channel of this rank's shard."""
        module, group = self.module, getattr(self.module, "tp_group", None)
        is_split = getattr(module, "input_is_parallel", False) or getattr(module, "parallel_mode", "") == "row"
        return group.rank() * self.weight.shape[1] if is_split and group is not None else 0

    def attach(self, observer: Observer) -> None:
        """Call the observer with every operand from now on."""
        self.module.observer = observer

    def detach(self) -> None:
        """Remove the observer."""
        self.module.observer = None

    def delayed_scale(self, operand: Operand) -> Optional[DelayedScale]:
        """A copy of the delayed scale that records no amax; None if there is none."""
        scale = self.module.quantizer_state.quant_scale[OPERANDS.index(operand)]
        return DelayedScale(scale.clone(), amax=None)

    def scale_group(self, operand: Operand) -> Optional[dist.ProcessGroup]:
        """The process group that shares the scale of an operand."""
        return getattr(self.module.amax_groups(self.module.sequence_parallel), operand.value)

    def weight_codes(self) -> Optional[Tensor]:
        """A copy of the weight's codes for fprop, or else for dgrad, uint8; None in high precision."""
        rules = [self.recipe.rule(Operand.WEIGHT, gemm) for gemm in (Gemm.FPROP, Gemm.DGRAD)] if self.recipe else []
        rule = next((rule for rule in rules if rule is not None), None)
        weight = self.weight
        if rule is None:
            return None
        if isinstance(weight, QuantizedParameter):
            return weight.codes.raw.clone()
        values = weight.detach()
        values = values.dequantize() if is_stored_as_codes(values) else values
        codes = self.codes_of(values, Operand.WEIGHT, [rule]).get(rule)
        return None if codes is None else codes.codes.view(torch.uint8)

    def codes_of(
        self, tensor: Tensor, operand: Operand, rules: Collection[OperandRule]
    ) -> dict[OperandRule, Quantized]:
        """An operand quantized by rules of its recipe with the current scales.

        Rules of delayed scaling are left out while the operand has no scale yet.
        """
        needs_delayed = any(rule.scale_rule is ScaleRule.DELAYED for rule in rules)
        delayed = self.delayed_scale(operand) if needs_delayed else None
        if delayed is None:
            rules = [rule for rule in rules if rule.scale_rule is not ScaleRule.DELAYED]
        # With a fixed seed each, so that statistics draw none of the run's random numbers.
        generators = [torch.Generator(tensor.device).manual_seed(0) if rule.is_stochastic else None for rule in rules]
        uses = [Use(rule) for rule in rules]
        quantized = quantize_for(tensor, uses, self.scale_group(operand), delayed, generators)
        return {rule: codes for rule, codes in zip(rules, quantized, strict=True) if isinstance(codes, Quantized)}


class HookedLinear(TrackedLinear):
    """A linear of Transformer Engine or megatron-core, observed by module hooks."""

    def __init__(self, name: str, module: nn.Module, recipe: Optional[LinearRecipe]):
        super().__init__(name, module, recipe)
        self.handles: list[Any] = []
        self.observer: Optional[Observer] = None
        self.seen: set[Operand] = set()

    def attach(self, observer: Observer) -> None:
        """Observe input and weight once with their codes, and every gradient, the first one with its codes."""
        self.observer, self.seen = observer, set()
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
        """The tensor-parallel group if the operand is gathered over it, as in Transformer Engine; else None."""
        module = self.module
        gathered = {"column": Operand.INPUT, "row": Operand.GRAD_OUTPUT}.get(getattr(module, "parallel_mode", ""))
        return module.tp_group if getattr(module, "sequence_parallel", False) and operand is gathered else None

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if Operand.INPUT not in self.seen:
            self._show(Operand.INPUT, linear_input(module, args[0].detach()))
        if Operand.WEIGHT not in self.seen:
            self._show(Operand.WEIGHT, module.weight)

    def _after_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if first.requires_grad:
            first.register_hook(self._on_gradient)

    def _on_gradient(self, gradient: Tensor) -> None:
        if self.observer is None:
            return
        if Operand.GRAD_OUTPUT in self.seen:
            self.observer(Operand.GRAD_OUTPUT, gradient, {})
        else:
            self._show(Operand.GRAD_OUTPUT, gradient)

    @torch.no_grad()
    def _show(self, operand: Operand, tensor: Tensor) -> None:
        assert self.observer is not None
        is_stored = is_stored_as_codes(tensor)
        values = tensor.dequantize() if is_stored else tensor.detach()
        rows = values.reshape(-1, values.shape[-1])
        codes: dict[Gemm, Quantized] = {}
        if self.recipe is not None:
            rules = {gemm: self.recipe.rule(operand, gemm) for gemm in GEMMS[operand].values()}
            found = self.codes_of(rows, operand, dict.fromkeys(rule for rule in rules.values() if rule is not None))
            codes = {gemm: found[rule] for gemm, rule in rules.items() if rule in found}
        if codes or self.recipe is None:  # delayed scaling has no scale before the first forward pass
            self.seen.add(operand)
        self.observer(operand, tensor if is_stored else rows, codes)


class FusedLinear(HookedLinear):
    """A linear in whose place an operation of Transformer Engine's fused MLP computes."""

    def __init__(self, name: str, module: nn.Module, recipe: Optional[LinearRecipe], mlp: Any):
        super().__init__(name, module, recipe)
        self.mlp = mlp

    def attach(self, observer: Observer) -> None:
        if self.mlp.is_split:  # since a linear of it was moved to BF16
            super().attach(observer)
            return
        self.observer, self.seen, mlp = observer, set(), self.mlp
        if self.module is mlp.linear_fc1:
            self.handles = [
                mlp.register_forward_pre_hook(lambda _, args: self._before_forward(self.module, args)),
                mlp.register_gradient_hook(self._on_gradient),
            ]
        else:
            self.handles = [
                mlp.register_result_hook(self._on_result),
                mlp.register_forward_hook(lambda _, args, output: self._after_forward(self.module, args, output[0])),
            ]

    def _on_result(self, values: Tensor) -> None:
        self._before_forward(self.module, (values,))
        if {Operand.INPUT, Operand.WEIGHT} <= self.seen:
            self.handles[0].remove()  # SwiGLU need not compute more of them


def linear_input(module: nn.Module, tensor: Tensor) -> Tensor:
    """The input of the linear's GEMM: for a linear with a fused norm the result of the norm, computed by torch."""
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
    """The linears of this rank that have an entry in `recipes`."""
    found: list[TrackedLinear] = []
    for chunk in chunks:
        fused = fused_mlps(chunk)
        for name, module in named_linears(chunk):
            if name not in recipes:
                continue
            if module in fused:
                found.append(FusedLinear(name, module, recipes[name], fused[module]))
            else:
                found.append((TrackedLinear if is_emulated(module) else HookedLinear)(name, module, recipes[name]))
    return found


def is_emulated(module: nn.Module) -> bool:
    """Whether a linear is an emulated one with a recipe."""
    return isinstance(module, (EmulatedColumnParallelLinear, EmulatedRowParallelLinear)) and module.recipe is not None


def signal_and_noise(few: float, all: float, num_few: int, num_all: int) -> tuple[float, float]:
    """Estimates of |G|^2 and tr(S).

    Args:
        few, all: squared norms of the mean gradients over `num_few` and `num_all` sequences.
    """
    signal = (num_all * all - num_few * few) / (num_all - num_few)
    noise = (few - all) / (1 / num_few - 1 / num_all)
    return signal, noise


@contextmanager
def observe_reductions(chunks: Sequence[Any], observe: Callable[[Tensor], None]) -> Iterator[None]:
    """Call a function with each weight just before its gradient is reduced over the data-parallel ranks."""

    def observe_group(group: Any) -> None:
        for bucket in group.buckets:
            for weight in bucket.params:
                observe(weight)

    with ExitStack() as stack:
        for group in (group for chunk in chunks for group in bucket_groups(chunk)):
            stack.callback(add_grad_sync_hook(group, partial(observe_group, group)))
        yield


def reduced_gradient_shard(optimizer: Any, weight: Tensor) -> Optional[Tensor]:
    """This rank's shard of a weight's reduced gradient, flat; None if it has none. Shards of ranks are disjoint."""
    parts = [part for part in optimizer.chained_optimizers if isinstance(part, DistributedOptimizer)]
    if not parts:
        is_first = replica_rank(weight) == 0
        return weight.main_grad.view(-1) if is_first else None
    for part in parts:
        if not part.is_stub_optimizer and weight in part.model_param_gbuf_map:
            shard = part._get_model_param_range_map(weight)["param"]
            return weight.main_grad.view(-1)[shard.start : shard.end]
    return None


def replica_rank(weight: Tensor) -> int:
    """This rank's number among those that hold the same weight."""
    if is_reduced_over_expert_ranks(weight):
        return parallel_state.get_expert_data_parallel_rank()
    return parallel_state.get_data_parallel_rank(with_context_parallel=True)


def master_values(weight: Tensor, has_masters: bool) -> Optional[Tensor]:
    """The values that the optimizer updates; None if other ranks hold them.

    Args:
        has_masters: whether there are FP32 master weights; else the values are the weight itself, in which updates may
            be lost to rounding.
    """
    if has_masters and hasattr(weight, "main_param"):
        return weight.main_param
    values = weight.detach()
    return values.float() if is_float8tensor(values) else values  # else torch rounds to BF16 first


def squared_norms(tensors: Sequence[Tensor]) -> Tensor:
    """The squared norm of each tensor, taken in FP32 in few kernel launches; FP64 [tensors]."""
    return squares(torch._foreach_norm(tensors, 2, torch.float32) if tensors else [])


def squares(norms: Sequence[Tensor]) -> Tensor:
    """The squares of norms, FP64 [tensors]."""
    return torch.stack(list(norms)).double().square() if norms else torch.zeros(0)
