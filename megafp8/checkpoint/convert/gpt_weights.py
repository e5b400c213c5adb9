"""The weights of a dense GPT of megatron-core: names in a checkpoint, shapes, order in the module, tensor parallelism.

Names are those of Transformer Engine's layers, in which a norm belongs to the linear after it. megatron-core gives its
own layers' weights the same names in checkpoints, but its modules have the norms in another order.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Optional

from torch import Tensor

from megafp8.checkpoint.convert.model_tensors import ModelTensor, model_tensors
from megafp8.config.schema import ModelConfig

POSITIONS = "embedding.position_embeddings.weight"
FINAL_NORM = "decoder.final_layernorm"
# The dimension of a weight that tensor-parallel ranks split; they have all of the others.
SPLIT_DIMS = {
    "word_embeddings": 0, "output_layer": 0, "linear_qkv": 0, "linear_proj": 1, "linear_fc1": 0, "linear_fc2": 1
}  # fmt: skip


@dataclass(frozen=True)
class Weight:
    """A weight of the complete model.

    Attributes:
        split_dim: that tensor-parallel ranks split; None if each has all of it.
        is_gated: it consists of two equal halves along dim 0, gate and value, and ranks split each.
    """

    name: str
    shape: tuple[int, ...]
    split_dim: Optional[int] = None
    is_gated: bool = False

    def local_shape(self, num_ranks: int) -> tuple[int, ...]:
        """Return the shape of a tensor-parallel rank's part."""
        return tuple(size // num_ranks if dim == self.split_dim else size for dim, size in enumerate(self.shape))

    def local_part(self, weight: Tensor, rank: int, num_ranks: int) -> list[Tensor]:
        """Return views of a complete weight that are a rank's part, to be concatenated along dim 0."""
        if self.split_dim is None:
            return [weight]
        halves = weight.chunk(2) if self.is_gated else (weight,)
        return [half.chunk(num_ranks, self.split_dim)[rank] for half in halves]


def gpt_weights(model: ModelConfig, num_rows: int, has_fused_norms: bool = True) -> list[Weight]:
    """Return the weights of a model in the order of the module's parameters.

    Args:
        num_rows: of the embedding.
        has_fused_norms: the order of Transformer Engine's layers, otherwise of megatron-core's own.
    """
    # Attention's output projection is made before the linear of its inputs, and so before that one's norm if it has it.
    first = ("linear_proj",) if has_fused_norms else ("linear_qkv.layer_norm", "linear_proj")
    weights = []
    for _, group in groupby(model_tensors(model, num_rows), key=lambda tensor: tensor.layer):
        tensors = list(group)
        leading = [tensor for name in first for tensor in tensors if tensor.module.endswith(name)]
        weights += leading + [tensor for tensor in tensors if tensor not in leading]
    return [split_weight(tensor, is_gated=model.swiglu) for tensor in weights]


def split_weight(tensor: ModelTensor, is_gated: bool) -> Weight:
    """Return a tensor with the way in which tensor-parallel ranks split it.

    Args:
        is_gated: the model has a gated MLP.
    """
    linear = tensor.module.rpartition(".")[2]
    split_dim = SPLIT_DIMS.get(linear)
    if split_dim == 1 and tensor.kind == "bias":
        split_dim = None  # ranks that split the inputs of a linear each have the complete bias
    return Weight(tensor.name, tensor.shape, split_dim, is_gated and linear == "linear_fc1")
