"""Weights of Transformer Engine's linears that ranks gather as FP8 codes, under tensorwise current scaling.

`quantization/fp8_parameter.py` has the steps (`quantize_codes`). Here amaxes and casts of a rank's rows are
Transformer Engine's kernels, and a gathered weight is a `Float8Tensor`, which its linears use as it is. The weights are
not made in FP8 (`fp8_param`), so that the rows of a rank, the optimizer and checkpoints are those without codes.

Hopper's dgrad reads the transpose of a weight. A linear makes it of the gathered codes in its backward pass, and drops
it after the GEMM. Without codes it casts the weight in every pass. The hooks of `Float8Tensor` for gathers are not
used: they are for weights that a rank keeps as codes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from megatron.core.fp8_utils import get_fp8_recipe
from torch import Tensor
from transformer_engine.pytorch.tensor.float8_tensor import (
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Float8Tensor,
)

from megafp8.config import precision_map
from megafp8.config.schema import ModelConfig, PrecisionConfig
from megafp8.mcore.layer_runtime import CodesOf
from megafp8.mcore.modules import named_linears
from megafp8.quantization.fp8_parameter import GatheredCodes
from megafp8.recipes.base import OperandRule, ScaleRule
from megafp8.te.quantizers import FORMATS

WEIGHT = 1  # index of its quantizer in the forward direction


class GatheredFloat8(GatheredCodes):
    """Codes of a weight under current scaling, with one scale for all rows.

    Args:
        rows: [n, K], this rank's rows, BF16 or FP16.
        shape: (N, K) of the weight.
        quantizer: of the weight in its linear, which has format and kind of scale.
    """

    def __init__(self, rows: Tensor, shape: Sequence[int], quantizer: Float8CurrentScalingQuantizer):
        assert quantizer.amax_epsilon == 0.0 and not quantizer.with_amax_reduction
        scale_rule = ScaleRule.POWER_OF_TWO if quantizer.force_pow_2_scales else ScaleRule.FP32
        super().__init__(rows, shape, OperandRule(format=FORMATS[quantizer.dtype.name], scale_rule=scale_rule))
        # A forward pass asks for the rows alone. Transposes of all layers would else be kept for the backward pass.
        self.quantizer = quantizer.copy()
        self.quantizer.set_usage(rowwise=True, columnwise=False)
        one = torch.ones(1, device=rows.device)
        self.caster = Float8Quantizer(one, torch.Tensor(), quantizer.dtype, rowwise=True, columnwise=False)
        self.own = torch.empty(rows.shape, dtype=torch.uint8, device=rows.device)
        # Not a view into the scales of all weights: cuBLAS refuses scales that are not aligned to 16 bytes.
        self.scale_inv = torch.empty_like(one)
        self.cast_rows = self.caster.create_tensor_from_data(self.own, rows.dtype)

    def write_amax(self, shard: Tensor, start: int, amax: Tensor) -> None:
        tex.compute_amax(shard, amax.view(1))

    def quantize(self, shard: Tensor, start: int, quant_scale: Tensor) -> None:
        self.caster.scale = quant_scale.view(1)
        self.caster.update_quantized(shard.view(self.own.shape), self.cast_rows)
        self.scale_inv.copy_(self.dequant_scale)

    def build_parameter(self, gathered: Tensor) -> Float8Tensor:
        return Float8Tensor(
            shape=gathered.shape, dtype=self.dtype, data=gathered, fp8_scale_inv=self.scale_inv,
            fp8_dtype=self.quantizer.dtype, quantizer=self.quantizer, device=gathered.device,
        )  # fmt: skip

    def renew(self, parameter: Float8Tensor, gathered: Tensor) -> None:
        """Also drops the transpose, which an interrupted backward pass may have left."""
        parameter._data = gathered
        parameter.remove_caches()


def codes_by_linear(
    model: ModelConfig, precision: PrecisionConfig, chunk: Any
) -> tuple[Mapping[Any, CodesOf], Callable[[], bool]]:
    """Makers of codes for all linears in the layers of a chunk, except those that read BF16; and `is_quantized`."""
    chosen = precision_map.resolve(model, precision)
    linears = [
        linear
        for name, linear in named_linears(chunk)
        if name != precision_map.OUTPUT_LAYER and chosen[name].is_quantized
    ]
    return {linear: codes_of(linear) for linear in linears}, partial(is_quantized, linears)


def codes_of(linear: Any) -> Callable[[Tensor, torch.Size], GatheredFloat8]:
    """Makes the codes of a linear's weight.

    The linear gets its quantizers now and not in its first forward pass, which would give them to the gathered weight:
    they ask for transposes.
    """
    recipe = get_fp8_recipe(linear.config)
    linear.fp8_meta["recipe"] = recipe
    linear.fp8_meta.setdefault("num_gemms", 1)
    with te.autocast(recipe=recipe):  # of which linears read the kinds of scales
        linear.init_fp8_meta_tensors(recipe)
    return partial(GatheredFloat8, quantizer=linear.quantizers["scaling_fwd"][WEIGHT])


def is_quantized(linears: Iterable[Any]) -> bool:
    """Whether this is not the first microbatch of a step or of an evaluation, of which megatron-core tells linears."""
    return not any(linear.is_first_microbatch for linear in linears)
