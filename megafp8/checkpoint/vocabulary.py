"""Rows of the vocabulary that only the layout asks for.

An embedding is padded to a multiple of the tensor-parallel size, so that a layout may need rows that a checkpoint does
not have. megatron-core leaves them as they were initialized, at random, and their tokens take part in the softmax: with
a model whose logits are far below zero, as GPT-2's, they would take all of the probability.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor

EMBEDDING, OUTPUT_LAYER = "embedding.word_embeddings.weight", "output_layer.weight"


@torch.no_grad()
def fill_new_rows(model: dict[str, Any], num_rows: int) -> None:
    """Give rows that a checkpoint did not have the mean of those that it had; all ranks call it.

    A row's logit is then the mean of the others', and its probability, as the exponential is convex, at most
    1 / num_rows of what they have together.

    Args:
        model: the sharded state that was loaded; its data are the model's parameters.
        num_rows: that the checkpoint had.
    """
    for leaf in nested_values(model):
        is_vocabulary = isinstance(leaf, ShardedTensor) and leaf.key in (EMBEDDING, OUTPUT_LAYER)
        if is_vocabulary and leaf.global_shape[0] > num_rows:
            known = leaf.data[: max(0, num_rows - leaf.global_offset[0])]
            mean = known.sum(dim=0, dtype=torch.float32) / num_rows
            dist.all_reduce(mean, group=parallel_state.get_tensor_model_parallel_group())
            leaf.data[len(known) :] = mean.to(leaf.data.dtype)
