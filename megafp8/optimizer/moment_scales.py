"""Scales of Adam's moments in FP16 and FP8, found before the update that stores the moments by them.

A scale follows from the largest magnitude of the updated moment. A bound of it would cost no pass, but lie above it by
a factor that changes with the gradients, and FP8 would lose that much at its lower end. So gradient and moments are
read twice: here they make the updated moments, of which the largest is kept, then the update makes them once more.
Nothing is written but two numbers a parameter's tensor.

Bytes an element with FP8 and FP16 moments, FP32 gradients and 16-bit remainders: 7 here (gradient 4, moments 1 and 2)
and 18 in the update; with BF16 moments 20 in all. Transformer Engine moves 74: it copies moments to FP32 (19),
updates those (28) and scales them again (27). At 4.1 TB/s and 1.4e9 elements that is 8.5 ms at best (BF16 moments 6.8)
beside 25.
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
from megafp8.quantization.scaling import FORMAT_MAX, dequant_scale_of


class MomentScales:
    """The scales of the moments of rows of equal dtypes, one or both of which are FP16 or FP8."""

    def __init__(self, rows: Sequence[ParameterRow]):
        self.table = TensorTable([(row.grad, row.exp_avg, row.exp_avg_sq) for row in rows], SUM_CHUNK)
        maxima = [FORMAT_MAX.get(moment.dtype, 1.0) for moment in (rows[0].exp_avg, rows[0].exp_avg_sq)]
        self.format_max = torch.tensor(maxima, device=self.table.device)
        none = torch.ones(1, device=self.table.device)
        self.dequant = [none if scale is None else scale.dequant for row in rows for scale in row.scales]
        # Noted scales, their inverses, and the inverses of those.
        self.renewed = torch.empty(3, len(self.dequant), 1, device=self.table.device)
        self.places: list[Tensor] = []
        self.sources: list[Tensor] = []
        for index, scale in enumerate(scale for row in rows for scale in row.scales):
            if scale is not None:
                places = (scale.noted,) if scale.quant is None else (scale.noted, scale.quant, scale.dequant)
                self.places += places
                self.sources += [self.renewed[kind, index] for kind in range(len(places))]

    def renew(self, grad_factor: Tensor, numbers: AdamStep) -> Tensor:
        """Give the optimizer the scales that the moments have after the update, which must come next.

        Args:
            grad_factor, numbers: those of the update.

        Returns:
            FP32 [rows, 2, 2], by moment: dequant scale of what is stored, and quant scale of what will be.
        """
        table = self.table
        dequant = torch.cat(self.dequant).view(-1, 2)
        scales = torch.stack((dequant, dequant), dim=-1)
        largest = torch.zeros_like(dequant)
        grad, exp_avg, exp_avg_sq = (TRITON_TYPES[tensor.dtype] for tensor in table.rows[0])
        largest_kernel[(table.num_chunks,)](
            table.addresses,
            table.lengths,
            table.row_of_chunk,
            table.place_of_chunk,
            scales,
            grad_factor,
            numbers.clip,
            numbers.beta1,
            numbers.beta2,
            largest,
            GRAD=grad,
            EXP_AVG=exp_avg,
            EXP_AVG_SQ=exp_avg_sq,
            ALIGNED=table.is_aligned,
            BLOCK=SUM_BLOCK,
            BLOCKS=SUM_BLOCKS,
            num_warps=SUM_WARPS,
        )
        noted, quant, inverse = self.renewed.view(3, -1, 2)
        noted.copy_(dequant_scale_of(largest, self.format_max))
        torch.reciprocal(noted, out=quant)
        torch.reciprocal(quant, out=inverse)
        scales[..., 1] = quant
        torch._foreach_copy_(self.places, self.sources)
        return scales
