"""The plan of a quantized linear: which operand is quantized for which GEMM, in which dtype each GEMM multiplies, and
the codes of a weight that several forward passes share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Optional, Union

import torch
import torch.distributed as dist
from torch import Tensor

from megafp8.kernels.cpu_matmul import multiplies_bf16
from megafp8.quantization import scaled_gemm
from megafp8.quantization.counters import LinearCounts
from megafp8.quantization.delayed_scaling import DelayedScales
from megafp8.quantization.fp8_parameter import QuantizedParameter
from megafp8.quantization.nvfp4 import RoundingNoise
from megafp8.quantization.nvfp4_variants import draw_signs
from megafp8.quantization.prequantized import PrequantizedScale, prequantized_operand
from megafp8.quantization.quantize import decode_operand, dequantize, quantize_for
from megafp8.quantization.quantized_tensor import Decoded, Quantized, Use
from megafp8.recipes.base import OPERANDS_OF, Gemm, LinearRecipe, Operand, OperandRule


class AmaxGroups(NamedTuple):
    """Ranks whose shards of an operand share one scale; None: each rank scales its own shard."""

    input: Optional[dist.ProcessGroup] = None
    weight: Optional[dist.ProcessGroup] = None
    grad_output: Optional[dist.ProcessGroup] = None


# Called with an operand, its high-precision tensor, and its codes for each GEMM that it is quantized for.
Observer = Callable[[Operand, Tensor, Mapping[Gemm, Quantized]], None]


@dataclass(frozen=True, kw_only=True)
class LinearPlan:
    """Everything a linear needs besides its tensors.

    Attributes:
        recipe: how each operand is quantized.
        tensor_group: the tensor-parallel ranks; None with one rank.
        gather_input: the input is a shard along dim 0 (sequence parallelism): its codes are gathered over
            `tensor_group`, and its gradient is reduce-scattered.
        allreduce_dgrad: sum the input gradient over `tensor_group`.
        amax_groups: where amaxes are reduced.
        fuse_wgrad: add the weight gradient to `weight.main_grad`, where data parallelism has made one.
        delayed: with delayed scaling, the scales of the operands.
        noise: with stochastic rounding, the source of its random numbers.
        signs: in the backward pass of a recipe that transforms operands with random signs, those of this pass.
        after_backward: called at the end of the backward pass.
        observer: called with every operand that is quantized. Operands are then quantized to codes first and decoded
            from them.
        counts: to which the non-finite and saturated values of the operands are added.
        channel_scales: [K], powers of two: the input is already divided by them, and the weight is multiplied by them
            before it is quantized (`smoothing.py`). None is 1.
        prequantized: the scale of an input that arrived as codes (`prequantized.py`), which the observer does not see;
            None quantizes the input.
    """

    recipe: LinearRecipe
    tensor_group: Optional[dist.ProcessGroup] = None
    gather_input: bool = False
    allreduce_dgrad: bool = False
    amax_groups: AmaxGroups = AmaxGroups()
    fuse_wgrad: bool = False
    delayed: Optional[DelayedScales] = None
    noise: Optional[RoundingNoise] = None
    signs: Optional[Tensor] = None
    after_backward: Optional[Callable[[], None]] = None
    observer: Optional[Observer] = None
    counts: Optional[LinearCounts] = None
    channel_scales: Optional[Tensor] = None
    prequantized: Optional[PrequantizedScale] = None

    def smoothed(self, weight: Tensor) -> Tensor:
        """A weight [N, K], or a gradient of one, times the scales of the channels, without rounding."""
        return weight if self.channel_scales is None else weight * self.channel_scales.to(weight.dtype)

    def for_backward(self, device: torch.device) -> LinearPlan:
        """The plan of one backward pass: with random signs, where the recipe has them."""
        if not self.recipe.is_rotated or self.noise is None:
            return self
        return dataclasses.replace(self, signs=draw_signs(self.noise.next_generator(device)))

    def quantize(self, tensor: Tensor, operand: Operand, gemm: Gemm) -> Quantized:
        """The codes of one operand for one GEMM."""
        return self.quantize_to_codes(tensor, operand, (gemm,))[gemm]

    def backward_codes(self, stored: Union[Quantized, Tensor], operand: Operand, gemm: Gemm) -> Quantized:
        """The codes of weight or input for a GEMM of the backward pass, from what the forward pass kept."""
        if isinstance(stored, Tensor):
            return self.quantize(stored, operand, gemm)
        return self.quantize(dequantize(stored), operand, gemm) if self.recipe.requantizes(operand) else stored

    def quantize_to_codes(self, tensor: Tensor, operand: Operand, gemms: tuple[Gemm, ...]) -> dict[Gemm, Quantized]:
        """The codes of one operand for some of its GEMMs, which the observer sees."""
        quantized: dict[Gemm, Quantized] = {}
        for gemm, result in self._quantize(tensor, operand, dict.fromkeys(gemms)).items():
            assert isinstance(result, Quantized)
            quantized[gemm] = result
        if self.observer is not None and not self._arrived(operand):
            self.observer(operand, tensor, quantized)
        return quantized

    def quantize_for(
        self, tensor: Tensor, operand: Operand, dtypes: Mapping[Gemm, Optional[torch.dtype]]
    ) -> dict[Gemm, Union[Quantized, Decoded]]:
        """One operand for some of its GEMMs: decoded to the dtype of the GEMM, or codes where the dtype is None."""
        if self.observer is None or self._arrived(operand):
            return self._quantize(tensor, operand, dtypes)
        codes = self.quantize_to_codes(tensor, operand, tuple(dtypes))
        return {
            gemm: codes[gemm] if dtype is None else decode_operand(codes[gemm], dtype) for gemm, dtype in dtypes.items()
        }

    def _quantize(
        self, tensor: Tensor, operand: Operand, dtypes: Mapping[Gemm, Optional[torch.dtype]]
    ) -> dict[Gemm, Union[Quantized, Decoded]]:
        uses = [Use(self._rule(operand, gemm), dtype) for gemm, dtype in dtypes.items()]
        if self._arrived(operand):
            return dict(zip(dtypes, self._prequantized(tensor, tuple(dtypes), uses), strict=True))
        group = getattr(self.amax_groups, operand.value)
        delayed = None if self.delayed is None else getattr(self.delayed, operand.value)
        generators = [
            self.noise.next_generator(tensor.device) if self.noise is not None and use.rule.is_stochastic else None
            for use in uses
        ]
        counts = () if self.counts is None else [self.counts[operand, gemm] for gemm in dtypes]
        results = quantize_for(tensor, uses, group, delayed, generators, self.signs, counts)
        return dict(zip(dtypes, results, strict=True))

    def _arrived(self, operand: Operand) -> bool:
        return operand is Operand.INPUT and self.prequantized is not None

    def _prequantized(
        self, numbers: Tensor, gemms: tuple[Gemm, ...], uses: list[Use]
    ) -> list[Union[Quantized, Decoded]]:
        assert self.prequantized is not None
        if self.delayed is not None:
            self.delayed.input.record(self.prequantized.amax)
        counts = [None if self.counts is None else self.counts[Operand.INPUT, gemm] for gemm in gemms]
        return [prequantized_operand(numbers, self.prequantized, *each) for each in zip(uses, counts, strict=True)]

    def _rule(self, operand: Operand, gemm: Gemm) -> OperandRule:
        rule = self.recipe.rule(operand, gemm)
        assert rule is not None, f"{gemm.value} is in high precision"
        return rule

    def gemm_dtype(self, activation: Tensor, gemm: Gemm) -> Optional[torch.dtype]:
        """The dtype in which a GEMM multiplies decoded operands; None: it multiplies their codes.

        BF16 where that holds the operands exactly. A CUDA GEMM takes BF16 operands to an FP32 result; a CPU GEMM
        returns the type of its operands, so that an FP32 result needs FP32 operands, and many CPUs are slow in BF16.
        """
        if scaled_gemm.multiplies_codes(self.recipe, gemm, activation):
            return None
        is_exact = all(self._rule(operand, gemm).is_bf16_exact for operand in dict(OPERANDS_OF)[gemm])
        fits = activation.is_cuda or (activation.dtype == torch.bfloat16 and multiplies_bf16())
        return torch.bfloat16 if fits and is_exact else torch.float32


class QuantizedWeight(NamedTuple):
    """A weight [N, K] for the two GEMMs that read it; the same codes twice where the rules are the same, or where the
    backward pass makes its codes from those of fprop.

    None is for a GEMM in high precision, and for a dgrad whose codes the backward pass makes without those of fprop:
    they read the weight itself.
    """

    fprop: Optional[Quantized]
    dgrad: Optional[Quantized]


def quantize_weight(weight: Tensor, plan: LinearPlan) -> QuantizedWeight:
    """Quantize a weight [N, K] for fprop and dgrad. The result is valid until the weight changes.

    A weight that is stored as codes (`QuantizedParameter`) is returned unchanged.
    """
    if isinstance(weight, QuantizedParameter):
        if plan.delayed is not None:
            plan.delayed.weight.record(weight.codes.amax)
        codes = weight.codes.quantized()
        if plan.observer is not None:
            plan.observer(Operand.WEIGHT, weight, {Gemm.FPROP: codes, Gemm.DGRAD: codes})
        return QuantizedWeight(codes, codes)
    weight = plan.smoothed(weight)
    rules = {gemm: plan.recipe.rule(Operand.WEIGHT, gemm) for gemm in (Gemm.FPROP, Gemm.DGRAD)}
    gemms = tuple(gemm for gemm, rule in rules.items() if rule is not None and not rule.is_requantized)
    quantized = plan.quantize_to_codes(weight, Operand.WEIGHT, gemms) if gemms else {}
    for_dgrad = Gemm.FPROP if plan.recipe.requantizes(Operand.WEIGHT) else Gemm.DGRAD
    return QuantizedWeight(quantized.get(Gemm.FPROP), quantized.get(for_dgrad))
