"""Gradient reduction in FP8 (`--grad-reduce-in-fp8`).

    1. each rank quantizes its gradients of a bucket, once, after the last microbatch
    2. all-to-all: rank r receives the codes of its shard from every rank
    3. rank r decodes them and adds them in FP32, in the order of the ranks
    4. reduce-scatter: the sums become rank r's shard of the main gradients, in their dtype
       all-reduce: rank r also sends its sums, rounded to BF16, to every rank

No sum is ever rounded to FP8, as a reduction of FP8 numbers inside the collective would do at every hop. What a rank
keeps for itself is quantized as well, so that all contributions have the same error.

Scales, `block`: one for each 128 elements, a power of two stored as its exponent (E8M0), sent with the codes.
Scales, `tensor`: one for each parameter, a power of two from the largest amax of all ranks (FP8-LM's minimum of the
scales), times FP8-LM's automatic factor. No scale is sent. The factor halves after a step in which more than 0.001% of
the values saturate, and otherwise doubles over 1000 steps (arXiv:2310.18313, section 2.1).

Rounding is to nearest. Stochastic rounding would avoid a bias in low-precision sums, of which there are none here, and
doubles the squared error of a code or more; it would also need random states in checkpoints. With error feedback the
error of a step is added to the gradients of the next one.

Non-finite gradients: codes of NaN are NaN. Codes of infinity saturate, but the scale of 128 elements with an infinity
is 2^127, with which the largest code overflows again, and the scale of such a parameter becomes infinity. The sums are
then not finite either, and the checks of local and of reduced gradients find them.

Source of the all-to-all with a local FP32 sum: megatron-core's `reduce_scatter_with_fp32_accumulation.py`, in BF16.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Optional

import torch
import torch.distributed as dist
from torch import Tensor

from megafp8.mcore.grad_reduction import Reduction
from megafp8.optimizer.fused_gradient_rows import FusedRows
from megafp8.optimizer.gradient_slices import BLOCK, Shard, gather_rows, scatter_rows, scatter_unquantized, split_shards
from megafp8.optimizer.received_bytes import ReceivedBytes
from megafp8.optimizer.reduction_works import BucketWork, BucketWorks, PartialWork
from megafp8.quantization.quantize import has_kernels, quantize
from megafp8.quantization.rounding import CODE_DTYPES, cast, decode
from megafp8.quantization.scaling import FP32_MAX, block_amax, quant_scale_of, reduce_amax
from megafp8.recipes.base import OperandRule, ScaleRule
from megafp8.recipes.formats import Format
from megafp8.utils.integers import round_up

MESSAGE_ALIGNMENT = 16  # bytes; FP32 gradients in a received message are read in place
ROWS_PER_PART, MAX_PARTS = 8192, 4  # of a bucket: a million codes or more each, so that a message is not latency
SAMPLE_ROWS = 4096  # of a bucket, half a million values, at least this many are counted; counting all takes a pass
SATURATION_LIMIT = 1e-5  # fraction of the values
FACTOR_GROWTH = 2 ** (1 / 1000)  # per step


@dataclass(frozen=True)
class GradientCodes:
    """How gradients are quantized.

    Attributes:
        format: E4M3 or E5M2.
        is_blockwise: block scales, else one scale for each parameter.
        has_feedback: add the error of the last step.
    """

    format: Format
    is_blockwise: bool
    has_feedback: bool


class Fp8Reduction(ReceivedBytes):
    """What the reductions of all buckets share in a step. It counts the bytes received from other ranks.

    Attributes:
        factor: automatic factor of the scales of parameters; FP32 scalar on the device, where a CUDA graph reads it.
        counts: FP64 [3], of a sample of this rank's rows of codes: values that are not 0, those that became 0, those
            that saturated.
        within_node: counts the bytes from ranks of the same node that are not codes (`node_reduction`), or all from
            ranks of the same replica of sharded weights.
        residuals: errors of the last codes, with error feedback.
    """

    def __init__(self, device: torch.device):
        self.factor = torch.ones((), device=device)
        self.counts = torch.zeros(3, dtype=torch.float64, device=device)
        self.within_node = ReceivedBytes()
        self.residuals: list[Tensor] = []

    def begin_step(self, factor: float) -> None:
        """Set the factor of a step, and count from 0."""
        # In place: a CUDA graph reads these addresses.
        self.factor.fill_(factor)
        self.counts.zero_()
        self.received_bytes = self.within_node.received_bytes = 0

    def count_within_node(self, num_bytes: int) -> None:
        """Count bytes that came from ranks of the same node."""
        self.received_bytes += num_bytes
        self.within_node.received_bytes += num_bytes

    def clear_residuals(self) -> None:
        """Drop the errors of gradients that were reduced without an update."""
        for residual in self.residuals:
            residual.zero_()


class CodeCounts(NamedTuple):
    """FP8 codes of gradients in a step, over all ranks: of all values, or of a sample from large buckets.

    Attributes:
        num_values: quantized values that are not 0.
        num_underflows: those of them that became 0.
        num_saturated: values beyond the largest number that their scale expresses.
    """

    num_values: float
    num_underflows: float
    num_saturated: float

    @property
    def underflow_fraction(self) -> float:
        """Of the nonzero values, those that became zero."""
        return self.num_underflows / self.num_values if self.num_values else 0.0

    @property
    def saturated_fraction(self) -> float:
        """Of the nonzero values, those that saturated."""
        return self.num_saturated / self.num_values if self.num_values else 0.0


def next_factor(factor: float, counts: CodeCounts) -> float:
    """The automatic factor after a step with these counts over all ranks."""
    if not counts.num_values:
        return factor
    return factor / 2 if counts.saturated_fraction > SATURATION_LIMIT else factor * FACTOR_GROWTH


class BucketReduction:
    """The reduction of one bucket.

    Args:
        gradients: of the bucket, flat, or a tensor of their dtype and device.
        shards: by rank, where the gradients lie that it adds.
        num_parameters: of the bucket.
        group: ranks that hold the parameters.
    """

    def __init__(
        self,
        gradients: Tensor,
        shards: Sequence[Shard],
        num_parameters: int,
        group: dist.ProcessGroup,
        settings: GradientCodes,
        step: Fp8Reduction,
    ):
        self.group, self.settings, self.step = group, settings, step
        self.shards, self.own, self.num_parameters = shards, shards[group.rank()], num_parameters
        num_rows = sum(shard.num_rows for shard in self.shards)
        # Every `sample`-th row counts, so that a large bucket has about SAMPLE_ROWS of them.
        self.sample = max(1, num_rows // SAMPLE_ROWS)
        # Rows are numbered over all shards, in the order of the ranks.
        self.first_own_row = sum(shard.num_rows for shard in self.shards[: group.rank()])
        self.unquantized_itemsize = gradients.itemsize
        self.zeros = gradients.new_zeros(BLOCK)
        self.fused: Optional[FusedRows] = None
        # The kernels keep no errors of codes, which error feedback needs.
        if has_kernels(gradients) and not settings.has_feedback:
            self.fused = FusedRows(
                shards, group.rank(), settings.format, settings.is_blockwise, self.unquantized_itemsize,
                MESSAGE_ALIGNMENT, gradients.device,
            )  # fmt: skip
        self.residual: Optional[Tensor] = None
        if settings.has_feedback:
            self.residual = torch.zeros(num_rows, BLOCK, device=gradients.device)
            step.residuals.append(self.residual)

    def start(self, request: Reduction) -> PartialWork:
        """Quantize the bucket and send its codes."""
        gradients = request.gradients
        if self.fused is not None:
            message, dequant_scale = self._encode_fused(self.fused, gradients)
            sizes = self.fused.sizes
        else:
            codes, dequant_scale, sent_scales = self._encode(gradients)
            message, sizes = self._pack(gradients, codes, sent_scales)
        own_size, num_ranks = sizes[self.group.rank()], self.group.size()
        received = message.new_empty(own_size * num_ranks)
        # All-to-all, not a reduce-scatter: the collective would add FP8 numbers at each hop. This rank receives equally
        # much from each rank, and sends each its shard.
        work = dist.all_to_all_single(received, message, [own_size] * num_ranks, sizes, group=self.group, async_op=True)
        self.step.received_bytes += own_size * (num_ranks - 1)
        # `message` belongs to the collective until it has ended.
        return BucketWork(work, (message,), partial(self._finish, request, received, dequant_scale))

    # Only the torch operations need it, not the kernels.
    @functools.cached_property
    def parameter_of_row(self) -> Tensor:
        """Int64 [rows]."""
        quantized = [slice_ for shard in self.shards for slice_ in shard.quantized]
        numbers, repeats = (
            torch.tensor(each) for each in ([p.parameter for p in quantized], [p.num_rows for p in quantized])
        )
        return numbers.long().repeat_interleave(repeats.long()).to(self.zeros.device)

    # --- encoding -----------------------------------------------------------------------------------------------------

    def _encode_fused(self, fused: FusedRows, gradients: Tensor) -> tuple[Tensor, Optional[Tensor]]:
        """The messages to all ranks, and the FP32 dequant scales of parameters if parameters have scales."""
        quant_scale = dequant_scale = None
        if not self.settings.is_blockwise:
            quant_scale, dequant_scale = self._parameter_scales(fused.amaxes(gradients, self.num_parameters))
        return fused.message(gradients, quant_scale, self.step.counts, self.sample), dequant_scale

    def _encode(self, gradients: Tensor) -> tuple[Tensor, Tensor, Optional[Tensor]]:
        """Quantize the elements of a bucket that are sent as codes.

        Returns:
            codes [rows, BLOCK], FP32 dequant scales of the rows, and the E8M0 scales to send, if any.
        """
        values = gather_rows(gradients, self.shards, self.zeros)
        if self.residual is not None:
            # In place: `values` is a copy, and the gradients stay as they are.
            values = values.float().add_(self.residual)
        encode = self._encode_blocks if self.settings.is_blockwise else self._encode_parameters
        codes, dequant_scale, sent_scales = encode(values)
        num_values = values[:: self.sample].count_nonzero()
        num_nonzero_codes = (codes.view(torch.uint8)[:: self.sample] & 0x7F).count_nonzero()  # without the sign
        self.step.counts[0] += num_values
        self.step.counts[1] += num_values - num_nonzero_codes
        if self.residual is not None:
            # What the codes lost: added in the next step, before it is quantized. An infinity must not stay in it.
            self.residual.copy_(values - self._decode(codes, dequant_scale)).nan_to_num_(0.0, 0.0, 0.0)
        return codes, dequant_scale, sent_scales

    def _encode_blocks(self, values: Tensor) -> tuple[Tensor, Tensor, Optional[Tensor]]:
        """`_encode` with one scale a row."""
        rule = OperandRule(format=self.settings.format, block=(1, BLOCK), scale_rule=ScaleRule.E8M0)
        quantized = quantize(values, rule)
        exponents = quantized.dequant_scale.view(torch.uint8).view(-1)
        return quantized.codes, e8m0_values(exponents), exponents

    def _encode_parameters(self, values: Tensor) -> tuple[Tensor, Tensor, Optional[Tensor]]:
        """`_encode` with one scale a parameter, shared by all ranks."""
        amax = torch.zeros(self.num_parameters, device=values.device)
        owners = self.parameter_of_row
        if len(values):
            row_amax = block_amax(values.view(len(values), 1, 1, BLOCK)).view(-1)
            # Rows of a parameter are reduced to its amax, in any order: a maximum is exact.
            amax.scatter_reduce_(0, owners, row_amax, "amax")
        quant_scale, dequant_scale = self._parameter_scales(amax)
        scaled = values.float() * quant_scale[owners, None]
        self.step.counts[2] += (scaled[:: self.sample].abs() > self.settings.format.max).count_nonzero()
        return cast(scaled, self.settings.format), dequant_scale[owners], None

    def _parameter_scales(self, amax: Tensor) -> tuple[Tensor, Tensor]:
        """Quant and dequant scales of parameters from this rank's amaxes, which become those of all ranks."""
        # Every rank decodes with the same scale, and tensor-parallel copies get the same codes.
        reduce_amax(amax, self.group)
        self.step.received_bytes += 2 * amax.nbytes * (self.group.size() - 1) // self.group.size()
        quant_scale = quant_scale_of(amax, self.settings.format, ScaleRule.POWER_OF_TWO) * self.step.factor
        quant_scale.clamp_(max=FP32_MAX)
        # An infinite amax: any code times infinity is not finite, so that the checks find it on every rank.
        return quant_scale, quant_scale.reciprocal().masked_fill_(amax == torch.inf, torch.inf)

    def _decode(self, codes: Tensor, dequant_scale: Tensor) -> Tensor:
        """FP32 [rows, BLOCK]."""
        return decode(codes, self.settings.format, torch.float32).mul_(dequant_scale[:, None])

    # --- messages -----------------------------------------------------------------------------------------------------

    def _pack(self, gradients: Tensor, codes: Tensor, scales: Optional[Tensor]) -> tuple[Tensor, list[int]]:
        """The messages to all ranks, uint8: unquantized elements, codes, scales. Also their sizes."""
        raw_codes, parts, sizes, row = codes.view(torch.uint8).view(-1), [], [], 0
        for shard in self.shards:
            end = row + shard.num_rows
            of_shard = [gradients[slice_.start : slice_.stop].view(torch.uint8) for slice_ in shard.unquantized]
            of_shard.append(raw_codes[row * BLOCK : end * BLOCK])
            of_shard += [] if scales is None else [scales[row:end]]
            size, row = sum(map(len, of_shard)), end
            # The next message starts at an aligned byte, so that its FP32 elements can be read in place.
            of_shard.append(raw_codes.new_zeros(-size % MESSAGE_ALIGNMENT))
            sizes.append(size + len(of_shard[-1]))
            parts += of_shard
        return torch.cat(parts), sizes

    def _finish(
        self, request: Reduction, received: Tensor, dequant_scale: Optional[Tensor]
    ) -> Optional[Callable[[], None]]:
        """Add the received gradients of the own shard, and write the sums, or in an all-reduce send them."""
        gradients, num_ranks = request.gradients, self.group.size()
        divisor = num_ranks if request.is_average else 1
        unquantized = torch.zeros(self.own.num_unquantized, device=gradients.device)
        # In the order of the ranks, in FP32, as the codes are added.
        for message in received.chunk(num_ranks) if self.own.unquantized else ():
            unquantized += message[: self.own.num_unquantized * self.unquantized_itemsize].view(gradients.dtype)
        if request.is_average:
            divide(unquantized, divisor)
        # The kernel writes its sums into the bucket. An all-reduce needs them apart, to send them.
        if self.fused is not None and not request.is_complete:
            self.fused.add_to_gradients(received, gradients, dequant_scale, num_ranks, divisor)
            scatter_unquantized(gradients, self.own, unquantized)
            return None
        if self.fused is not None:
            rows = self.fused.add_to_rows(received, dequant_scale, num_ranks, divisor)
        else:
            rows = self._add(received, dequant_scale)
            if request.is_average:
                divide(rows, divisor)
        if request.is_complete:
            return self._share(gradients, rows, unquantized)
        scatter_rows(gradients, self.own, rows, unquantized)
        return None

    def _add(self, received: Tensor, dequant_scale: Optional[Tensor]) -> Tensor:
        """The sums of the own rows, FP32 [rows, BLOCK].

        Args:
            dequant_scale: of all rows, if all ranks have the same scales; else the messages have them.
        """
        num_rows, end_unquantized = self.own.num_rows, self.own.num_unquantized * self.unquantized_itemsize
        end_codes = end_unquantized + num_rows * BLOCK
        rows = torch.zeros(num_rows, BLOCK, device=received.device)
        for message in received.chunk(self.group.size()):
            codes = message[end_unquantized:end_codes].view(CODE_DTYPES[self.settings.format.name]).view(-1, BLOCK)
            if dequant_scale is None or self.settings.is_blockwise:
                scale = e8m0_values(message[end_codes : end_codes + num_rows])
            else:
                scale = dequant_scale[self.first_own_row : self.first_own_row + num_rows]
            rows += self._decode(codes, scale)
        return rows

    def _share(self, gradients: Tensor, rows: Tensor, unquantized: Tensor) -> Callable[[], None]:
        """Send the sums of the own shard to all ranks; return what waits for all sums and writes them."""
        num_ranks = self.group.size()
        parts = [unquantized.to(gradients.dtype).view(torch.uint8), rows.bfloat16().view(-1).view(torch.uint8)]
        sizes = [
            shard.num_unquantized * self.unquantized_itemsize + 2 * shard.num_rows * BLOCK for shard in self.shards
        ]
        padded = [round_up(size, MESSAGE_ALIGNMENT) for size in sizes]
        own, own_padded = sizes[self.group.rank()], padded[self.group.rank()]
        # Shards differ in bytes, which an all-gather does not take: an all-to-all, in which every rank gets a copy of
        # the same message.
        message = torch.cat([*parts, parts[0].new_zeros(own_padded - own)]).repeat(num_ranks)
        received = message.new_empty(sum(padded))
        targets = [own_padded] * num_ranks
        work = dist.all_to_all_single(received, message, padded, targets, group=self.group, async_op=True)
        self.step.received_bytes += sum(padded) - own_padded
        # `message` belongs to the collective until it has ended.
        return partial(self._write_sums, gradients, work, message, received.split(padded), sizes)

    def _write_sums(
        self, gradients: Tensor, work: Any, message: Tensor, received: Sequence[Tensor], sizes: Sequence[int]
    ) -> None:
        """Wait for the sums of all shards, and write them."""
        # With NCCL the stream waits, not the host.
        work.wait()
        for shard, size, part in zip(self.shards, sizes, received, strict=True):
            end_unquantized = shard.num_unquantized * self.unquantized_itemsize
            sums = part[end_unquantized:size].view(torch.bfloat16).view(-1, BLOCK)
            scatter_rows(gradients, shard, sums, part[:end_unquantized].view(gradients.dtype))


class PipelinedReduction:
    """The reduction of one bucket in parts: one is quantized or added while others are sent. See `BucketReduction`."""

    def __init__(
        self,
        gradients: Tensor,
        shards: Sequence[Shard],
        num_parameters: int,
        group: dist.ProcessGroup,
        settings: GradientCodes,
        step: Fp8Reduction,
    ):
        num_rows = sum(shard.num_rows for shard in shards)
        # Scales of parameters need all of a parameter, so that the bucket is then one part. So it is on a GPU, where a
        # part costs more to launch than to quantize.
        is_divided = settings.is_blockwise and not has_kernels(gradients)
        num_parts = max(1, min(MAX_PARTS, num_rows // ROWS_PER_PART)) if is_divided else 1
        self.parts = [
            BucketReduction(gradients, part, num_parameters, group, settings, step)
            for part in split_shards(shards, num_parts)
        ]

    def start(self, request: Reduction) -> PartialWork:
        """Quantize the parts and send their codes."""
        return BucketWorks([part.start(request) for part in self.parts])


def divide(sums: Tensor, divisor: int) -> None:
    """Divide in place."""
    # On a GPU torch would multiply with the reciprocal of a number, but divides by a tensor.
    sums /= torch.full((), divisor, dtype=sums.dtype, device=sums.device)


def e8m0_values(exponents: Tensor) -> Tensor:
    """Powers of two in FP32 from biased exponents, uint8."""
    return exponents.view(torch.float8_e8m0fnu).float()
