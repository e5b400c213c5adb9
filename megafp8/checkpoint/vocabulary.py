"""Rows of the vocabulary that only the layout asks for.

An embedding is padded to a multiple of the tensor-parallel size, so that a layout may need rows that a checkpoint does
not have. megatron-core reads them and their moments as zeros, and their tokens take part in the softmax: with a model
whose logits are far below zero, as GPT-2's, they would take all of the probability.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor

EMBEDDING, OUTPUT_LAYER = "embedding.word_embeddings.weight", "output_layer.weight"


def rows_known(model: dict[str, Any], num_rows: int) -> dict[Tensor, int]:
    """The vocabulary's parameters that are longer than in a checkpoint, and how many of this rank's rows it has.

    Args:
        model: the sharded state that will be loaded; its data are the model's parameters.
        num_rows: that the checkpoint has.
    """
    return {
        leaf.data: min(len(leaf.data), max(0, num_rows - leaf.global_offset[0]))
        for leaf in nested_values(model)
        if isinstance(leaf, ShardedTensor)
        and leaf.key in (EMBEDDING, OUTPUT_LAYER)
        and leaf.global_shape[0] > num_rows
    }


@torch.no_grad()
def fill_new_rows(rows: dict[Tensor, int], num_rows: int) -> None:
    """Give rows that a checkpoint did not have the mean of those that it had; all ranks call it.

    A row's logit is then the mean of the others', and its probability, as the exponential is convex, at most
    1 / num_rows of what they have together.

    Args:
        rows: from `rows_known`; loaded by now.
        num_rows: that the checkpoint had.
    """
    for parameter, num_known in rows.items():
        mean = parameter[:num_known].sum(dim=0, dtype=torch.float32) / num_rows
        dist.all_reduce(mean, group=parallel_state.get_tensor_model_parallel_group())
        parameter[num_known:] = mean.to(parameter.dtype)
