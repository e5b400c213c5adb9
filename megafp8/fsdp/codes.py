"""FSDP2 gathers weights of linears as FP8 codes (`--use-torch-fsdp2 --fp8-param-gather`).

A rank keeps its rows of a weight in BF16, which the optimizer updates. Before the first forward pass of a step:

    1. each rank computes the amaxes of its rows
    2. one MAX all-reduce gives those of the complete weights, and every rank the same scales
    3. each rank quantizes its rows; one byte an element

FSDP2 then gathers the codes of a layer when it is used, forward and backward, in place of BF16. The linear reads the
gathered codes, so that a run is bitwise that of a gather in BF16.

torch's extension point is a pair of functions on the local tensor of a sharded parameter, `fsdp_pre_all_gather` and
`fsdp_post_all_gather`. What FSDP2 sets on the module after a gather is a `QuantizedParameter` for emulated linears, and
a tensor of Transformer Engine for its own (`te/gathered_codes.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megafp8.mcore.layer_runtime import CodesOf
from megafp8.mcore.torch_fsdp import fsdp_modules, fsdp_parameters
from megafp8.quantization.fp8_parameter import GatheredCodes, quantize_codes


def give_codes(chunk: Any, codes: Mapping[Any, CodesOf], is_quantized: Callable[[], bool]) -> None:
    """Let FSDP2 gather the codes of some linears.

    Args:
        chunk: a `TorchFSDP`.
        codes: by linear.
        is_quantized: whether a forward pass finds the weights quantized already.
    """
    for record in [record for module in fsdp_modules(chunk) for record in fsdp_parameters(module)]:
        info = record._module_info
        if info.module in codes and info.param_name == "weight":
            of_weight = codes[info.module](record._sharded_local_tensor, record._orig_size)
            extend(record, of_weight)
            chunk.quantized_weights.append((of_weight, record))
    chunk.register_forward_pre_hook(partial(quantize_rows, is_quantized))


def extend(record: Any, codes: GatheredCodes) -> None:
    """Let FSDP2 gather codes for one of its parameters."""
    rows = record._sharded_local_tensor

    def pre_all_gather(mesh: Any) -> tuple[tuple[Tensor, ...], None]:
        return (codes.own,), None

    def post_all_gather(
        outputs: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Optional[Tensor] = None
    ) -> Any:
        # `.data`: FSDP2 writes the storage again before the backward pass, with the same codes.
        gathered = outputs[0].data
        if out is None:
            return codes.build_parameter(gathered), ()
        return codes.renew(out, gathered)

    rows.fsdp_pre_all_gather, rows.fsdp_post_all_gather = pre_all_gather, post_all_gather
    record._init_extensions()


def quantize_rows(is_quantized: Callable[[], bool], chunk: nn.Module, *unused: Any) -> None:
    """Quantize this rank's rows of all weights, once in a step. Collective over the data-parallel ranks.

    With delayed scaling the scales change within a step, after which its other microbatches still use the old ones.
    """
    if is_quantized():
        return
    group: dist.ProcessGroup = chunk.process_group
    weights = [codes for codes, _ in chunk.quantized_weights]
    rows = [record._sharded_local_tensor for _, record in chunk.quantized_weights]
    assert all(hasattr(each, "fsdp_pre_all_gather") for each in rows), "rows were replaced: gathers in BF16"
    shards = [each.detach().flatten() for each in rows]
    quantize_codes(weights, shards, [group.rank() * shard.numel() for shard in shards], group)
