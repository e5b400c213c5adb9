"""FSDP2 gathers weights of emulated linears as FP8 codes (`--use-torch-fsdp2 --fp8-param-gather`).

A rank keeps its rows of a weight in BF16, which the optimizer updates. Before the first forward pass of a step:

    1. each rank computes the amaxes of its rows
    2. one MAX all-reduce gives those of the complete weights, and every rank the same scales
    3. each rank quantizes its rows; one byte an element

FSDP2 then gathers the codes of a layer when it is used, forward and backward, in place of BF16. The linear reads the
gathered codes, so that a run is bitwise that of a gather in BF16.

torch's extension point is a pair of functions on the local tensor of a sharded parameter, `fsdp_pre_all_gather` and
`fsdp_post_all_gather`. `QuantizedParameter` is the parameter that FSDP2 sets on the module after a gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor

from megafp8.mcore.fsdp_groups import fsdp_modules, fsdp_parameters
from megafp8.mcore.torch_fsdp import TorchFSDP
from megafp8.models.emulated_layers import EmulatedLinearMixin, emulated_linears
from megafp8.quantization.fp8_parameter import QuantizedParameter, WeightCodes, quantize_shards
from megafp8.recipes.base import Gemm


class GatheredCodes(WeightCodes):
    """Codes of a weight of which this rank quantizes its rows, and FSDP2 gathers all.

    Attributes:
        own: uint8 [rows of this rank, K], the codes that this rank sends.
        raw: uint8 [N, K], the gathered codes. FSDP2 frees their storage between uses.
    """

    own: Tensor

    def __init__(self, rows: Tensor, *options: Any):
        """`rows` is [N, K] on the device `meta`; the other arguments are those of `WeightCodes`."""
        super().__init__(rows, *options)
        self.high_precision = None

    def place(self, device: torch.device) -> None:
        """Set the device of scales and codes."""
        self.device = device
        self.dequant_scale = self.amax = torch.zeros(self.scales_shape, device=device)

    def store(self, start: int, encoded: Tensor) -> None:
        """Keep the codes of this rank's rows for the next gathers."""
        self.own = encoded.view(-1, self.shape[1])


def gather_codes(chunk: TorchFSDP) -> None:
    """Let FSDP2 gather the codes of all emulated linears of a chunk, except those that read BF16."""
    linears: dict[Any, EmulatedLinearMixin] = {
        linear: linear
        for linear in emulated_linears([chunk])
        if not linear.is_output and linear.recipe is not None and linear.recipe.is_quantized(Gemm.FPROP)
    }
    records = [record for module in fsdp_modules(chunk) for record in fsdp_parameters(module)]
    for record in records:
        info = record._module_info
        linear = linears.get(info.module)
        if linear is not None and info.param_name == "weight":
            chunk.quantized_weights.append((quantized_weight(record, linear), record))
    chunk.register_forward_pre_hook(partial(quantize_rows, chunk, tuple(linears)))


def quantized_weight(record: Any, linear: EmulatedLinearMixin) -> QuantizedParameter:
    """The parameter of a linear after a gather, and the extension of FSDP2 that fills it."""
    rows = record._sharded_local_tensor
    codes = GatheredCodes(
        torch.empty(record._orig_size, dtype=rows.dtype, device="meta"), *linear.weight_code_options()
    )
    codes.place(rows.device)
    parameter = QuantizedParameter(codes)

    def pre_all_gather(mesh: Any) -> tuple[tuple[Tensor, ...], None]:
        return (codes.own,), None

    def post_all_gather(
        outputs: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Optional[Tensor] = None
    ) -> Any:
        # `.data`: FSDP2 writes the storage again before the backward pass, with the same codes.
        codes.raw = outputs[0].data
        return None if out is not None else (parameter, ())

    rows.fsdp_pre_all_gather, rows.fsdp_post_all_gather = pre_all_gather, post_all_gather
    record._init_extensions()
    return parameter


def quantize_rows(chunk: TorchFSDP, linears: Sequence[EmulatedLinearMixin], *unused: Any) -> None:
    """Quantize this rank's rows of all weights, once in a step. Collective over the data-parallel ranks.

    With delayed scaling the scales change within a step, after which its other microbatches still use the old ones.
    """
    if any(linear.has_cached_codes for linear in linears):
        return
    group: dist.ProcessGroup = chunk.process_group
    weights = [weight for weight, _ in chunk.quantized_weights]
    shards = [record._sharded_local_tensor.detach().flatten() for _, record in chunk.quantized_weights]
    quantize_shards(weights, shards, [group.rank() * shard.numel() for shard in shards], group)
