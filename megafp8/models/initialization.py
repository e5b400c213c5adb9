"""Parameter initialization that does not depend on the parallel layout.

Every parameter has a global name and shape, and a rank holds a block of it. A rank draws the complete parameter from a
generator seeded with (seed, global name, layer) and keeps its block, so every layout starts from the same model. With
megatron-core's initialization, pipeline stages have equal weights on a CPU, and the weights on a GPU depend on the
tensor-parallel size. Names and offsets are those of the sharded state dict.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.transformer.transformer_config import TransformerConfig

# Projections into the residual stream are divided by sqrt(2 x layers) (GPT-2, section 2.3).
RESIDUAL_PROJECTIONS = ("linear_fc2.weight", "linear_proj.weight")


def sharded_parameters(chunk: torch.nn.Module) -> Iterator[ShardedTensor]:
    """The parameter blocks of a model chunk. The gate and up halves of a gated MLP are separate blocks.

    Their `data` are views of the parameters. Buffers, which are in the sharded state dict too, are left out.
    """
    storages = {parameter.untyped_storage().data_ptr() for parameter in chunk.parameters()}
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    for leaf in nested_values(chunk.sharded_state_dict(metadata=metadata)):
        parts = nested_values(leaf.build()) if isinstance(leaf, ShardedTensorFactory) else (leaf,)
        for part in parts:
            is_tensor = isinstance(part, ShardedTensor) and part.data is not None
            if is_tensor and part.data.untyped_storage().data_ptr() in storages:
                yield part


@torch.no_grad()
def initialize_parameters(
    chunks: list[torch.nn.Module], config: TransformerConfig, seed: int, is_mup: bool = False
) -> None:
    """Fill every parameter of the model chunks of this rank.

    Args:
        is_mup: an output layer has the standard deviation of the embeddings, which does not depend on the width.

    Numerics: matrices, and the offsets of the softmax, are drawn in FP32 from N(0, init_method_std^2) and rounded once
    to the parameter's dtype.
    """
    filled = 0
    for chunk in chunks:
        for block in sharded_parameters(chunk):
            initialize_block(block, config, seed, is_mup)
            filled += block.data.numel()
    expected = sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())
    assert filled >= expected, f"{expected - filled} elements of the model are not in its sharded state dict"


def initialize_block(block: ShardedTensor, config: TransformerConfig, seed: int, is_mup: bool = False) -> None:
    """Draw and copy the values of one block."""
    num_layer_dims = block.prepend_axis_num  # leading dimensions that stack layers
    layer, shape = tuple(block.global_offset[:num_layer_dims]), tuple(block.global_shape[num_layer_dims:])
    if len(shape) == 1 and not block.key.endswith("softmax_offset"):
        is_weight = not block.key.endswith("bias")
        block.data.fill_(1.0 if is_weight and not config.layernorm_zero_centered_gamma else 0.0)
        return
    tables = ("embedding.", "output_layer.") if is_mup else ("embedding.",)
    std = config.embedding_init_method_std if block.key.startswith(tables) else config.init_method_std
    if block.key.endswith(RESIDUAL_PROJECTIONS):
        std /= math.sqrt(2 * config.num_layers)
    generator = torch.Generator(block.data.device)
    generator.manual_seed(zlib.crc32(f"{seed}|{block.key}|{layer}".encode()))
    complete = torch.randn(shape, generator=generator, device=block.data.device).mul_(std)
    offsets = block.global_offset[num_layer_dims:]
    block.data.copy_(complete[tuple(slice(o, o + n) for o, n in zip(offsets, block.data.shape, strict=True))])
