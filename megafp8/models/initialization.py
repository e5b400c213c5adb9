"""Initial weights that depend on the parameter, never on the layout.

Every parameter has a global name and shape; a rank holds a block of it. The values come from a generator seeded with
(seed, global name, layer), for the whole parameter, of which the rank keeps its block. So tensor, pipeline, virtual and
data parallelism all start from the same model. (megatron-core's own initialization makes equal copies of pipeline
stages on a CPU, and on a GPU depends on the tensor-parallel size.)

The names and offsets are those of the sharded checkpoint, which already knows them.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.transformer.transformer_config import TransformerConfig

# The linears that write into the residual stream are scaled down by sqrt(2 x layers) (GPT-2, section 2.3).
RESIDUAL_WRITERS = ("linear_fc2.weight", "linear_proj.weight")


def leaves(tree: Any) -> Iterator[Any]:
    """The leaves of nested dictionaries and lists."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, (list, tuple)):
        for branch in tree:
            yield from leaves(branch)
    else:
        yield tree


def sharded_parameters(chunk: torch.nn.Module) -> Iterator[ShardedTensor]:
    """Every block of a parameter that a model chunk holds, gate and up halves of a gated MLP apart.

    Their `data` are views of the parameters: writing to them writes the model. Buffers are checkpointed too, and are
    left out.
    """
    memory = {parameter.untyped_storage().data_ptr() for parameter in chunk.parameters()}
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    for leaf in leaves(chunk.sharded_state_dict(metadata=metadata)):
        parts = leaves(leaf.build()) if isinstance(leaf, ShardedTensorFactory) else (leaf,)
        for part in parts:
            is_tensor = isinstance(part, ShardedTensor) and part.data is not None
            if is_tensor and part.data.untyped_storage().data_ptr() in memory:
                yield part


@torch.no_grad()
def initialize_parameters(chunks: list[torch.nn.Module], config: TransformerConfig, seed: int) -> None:
    """Fill every parameter of the model chunks of this rank.

    Numerics: matrices are drawn in FP32 from N(0, init_method_std^2) and rounded once to the parameter's dtype.
    """
    filled = 0
    for chunk in chunks:
        for block in sharded_parameters(chunk):
            fill(block, config, seed)
            filled += block.data.numel()
    held = sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())
    assert filled >= held, f"{held - filled} elements of the model have no place in its checkpoint"


def fill(block: ShardedTensor, config: TransformerConfig, seed: int) -> None:
    """Give one block its values."""
    stacked = block.prepend_axis_num  # leading dimensions that count layers
    layer, shape = tuple(block.global_offset[:stacked]), tuple(block.global_shape[stacked:])
    if len(shape) == 1:
        is_weight = not block.key.endswith("bias")
        block.data.fill_(1.0 if is_weight and not config.layernorm_zero_centered_gamma else 0.0)
        return
    std = config.init_method_std
    if block.key.endswith(RESIDUAL_WRITERS):
        std /= math.sqrt(2 * config.num_layers)
    generator = torch.Generator(block.data.device)
    generator.manual_seed(zlib.crc32(f"{seed}|{block.key}|{layer}".encode()))
    whole = torch.randn(shape, generator=generator, device=block.data.device).mul_(std)
    offsets = block.global_offset[stacked:]
    block.data.copy_(whole[tuple(slice(o, o + n) for o, n in zip(offsets, block.data.shape, strict=True))])
