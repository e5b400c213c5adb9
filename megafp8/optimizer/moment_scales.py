"""Computes the scales of FP16 and FP8 Adam moments before the update that stores the moments.

A scale follows from the amax of the updated moment. An upper bound of the amax would need no pass over the tensors, but
would exceed the amax by a factor that varies with the gradients, and small FP8 values would underflow. Gradient and
moments are therefore read twice: a first kernel computes the updated moments and keeps only their amax, and the update
computes them again.

Memory traffic per element with FP8 and FP16 moments, FP32 gradients and 16-bit remainders: 7 bytes here (gradient 4,
moments 1 and 2) and 18 in the update, compared with 20 in total for BF16 moments. Transformer Engine needs 74: it
copies the moments to FP32 (19), updates them (28) and quantizes them (27). At 4.1 TB/s and 1.4e9 elements the lower
bounds are 8.5 ms, 6.8 ms with BF16 moments, and 25 ms for Transformer Engine.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megafp8.kernels.adam import (
    SUM_BLOCK,
    SUM_BLOCKS,
    SUM_CHUNK,
    SUM_WARPS,
    TRITON_TYPES,
    AdamStep,
    TensorTable,
    largest_kernel,
)
from megafp8.optimizer.tensor_table import ParameterRow
from megafp8.quantization.scaling import MOMENT_FORMAT_MAX, moment_dequant_scale


class MomentScales:
    """Moment scales of rows with equal dtypes, where at least one moment is in FP16 or FP8."""

    def __init__(self, rows: Sequence[ParameterRow]):
        self.table = TensorTable([(row.grad, row.exp_avg, row.exp_avg_sq) for row in rows], SUM_CHUNK)
        self.row = rows[0]  # for the dtypes
        maxima = [MOMENT_FORMAT_MAX.get(moment.dtype, 1.0) for moment in (self.row.exp_avg, self.row.exp_avg_sq)]
        self.format_max = torch.tensor(maxima, device=self.table.device)
        one = torch.ones(1, device=self.table.device)
        self.dequant_scales = [one if scale is None else scale.dequant for row in rows for scale in row.scales]
        # Nominal dequant scales, quant scales, and dequant scales of the codes.
        self.new_scales = torch.empty(3, len(self.dequant_scales), 1, device=self.table.device)
        self.destinations: list[Tensor] = []
        self.sources: list[Tensor] = []
        for index, scale in enumerate(scale for row in rows for scale in row.scales):
            if scale is not None:
                tensors = (scale.nominal,) if scale.quant is None else (scale.nominal, scale.quant, scale.dequant)
                self.destinations += tensors
                self.sources += [self.new_scales[kind, index] for kind in range(len(tensors))]

    def update(self, grad_factor: Tensor, adam_step: AdamStep) -> Tensor:
        """Write the scales of the updated moments into the optimizer state. The update of the moments must follow.

        Args:
            grad_factor, adam_step: those of the update.

        Returns:
            FP32 [rows, 2, 2]: for each moment the dequant scale of the old codes and the quant scale of the new ones.
        """
        table = self.table
        dequant_scales = torch.cat(self.dequant_scales).view(-1, 2)
        # Both columns are dequantization scales here: the kernel only reads the first. The second follows below.
        scales = torch.stack((dequant_scales, dequant_scales), dim=-1)
        # Raised from zero by atomic maxima.
        amax = torch.zeros_like(dequant_scales)
        largest_kernel[(table.num_chunks,)](
            table.addresses,
            table.lengths,
            table.row_of_chunk,
            table.index_of_chunk,
            scales,
            grad_factor,
            adam_step.clip,
            adam_step.beta1,
            adam_step.beta2,
            amax,
            GRAD=TRITON_TYPES[self.row.grad.dtype],
            EXP_AVG=TRITON_TYPES[self.row.exp_avg.dtype],
            EXP_AVG_SQ=TRITON_TYPES[self.row.exp_avg_sq.dtype],
            ALIGNED=table.is_aligned,
            BLOCK=SUM_BLOCK,
            BLOCKS=SUM_BLOCKS,
            num_warps=SUM_WARPS,
        )
        nominal, quant, dequant = self.new_scales.view(3, -1, 2)
        nominal.copy_(moment_dequant_scale(amax, self.format_max))
        torch.reciprocal(nominal, out=quant)
        # Codes are multiplied by `quant`: their dequantization scale is its reciprocal, which may differ from `nominal`
        # by a rounding.
        torch.reciprocal(quant, out=dequant)
        scales[..., 1] = quant
        torch._foreach_copy_(self.destinations, self.sources)
        return scales
