"""The moving average of the weights (`--ema-decay`) in a checkpoint, by the names of the weights, in the run's dtype.

It is saved also with --no-save-optim: it is a result of the run. Any layout, optimizer and dtype loads it. BF16 that is
loaded into FP32 is exact; FP32 is rounded to nearest once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from torch import Tensor

from megafp8.checkpoint.optimizer_state import join_master_weight, leaf_by_weight, leaf_name, sharded_boxes
from megafp8.checkpoint.progress import TrainingState
from megafp8.optimizer.layer_wise import LayerWiseOptimizer
from megafp8.optimizer.tensor_table import flat
from megafp8.optimizer.weight_ema import MeanShard, WeightEma

KEY, NUM_UPDATES, SHARDS = "weight_ema", "num_updates", "shards"
STATE = "ema"
PREFIX = f"optimizer.state.{STATE}."
"""Of the names of the tensors; the name of the weight follows."""


def sharded_means(training_state: TrainingState, model: dict[str, Any]) -> dict[str, Any]:
    """This rank's part of a checkpoint's state dictionary, to save or to load it; empty without an average.

    Args:
        model: sharded state of the weights, with the parameters themselves as data.
    """
    ema = training_state.weight_ema
    if ema is None:
        return {}
    leaves = leaf_by_weight(model)
    # With the layer-wise optimizer no other data-parallel rank has the mean of a weight: this rank saves it.
    is_only_owner = isinstance(training_state.optimizer, LayerWiseOptimizer)
    found: dict[str, Any] = {}
    for index, shard in enumerate(ema.shards):
        leaf = leaves[rows_of(shard)]
        if shard.elements is not None:
            found[leaf_name(index)] = sharded_boxes(leaf, STATE, shard.elements, shard.mean)
            continue
        if is_only_owner:
            leaf = replace(leaf, replica_id=(*leaf.replica_id[:2], 0))
        mean = shard.mean.view(rows_of(shard).shape)
        found[leaf_name(index)] = make_sharded_optimizer_tensor(leaf, mean, PREFIX.removesuffix("."))
    return {KEY: {NUM_UPDATES: ema.num_updates, SHARDS: found}}


def rows_of(shard: MeanShard) -> Tensor:
    """This rank's part of the weight, which is the data of its leaf: rows of a sharded weight, else the weight."""
    return getattr(shard.weight, "_local_tensor", shard.weight)


@torch.no_grad()
def finish_load(ema: WeightEma, state: Mapping[str, Any], known_rows: Mapping[Tensor, int]) -> None:
    """Take what was read into `sharded_means`. Weights and master weights are loaded already.

    Args:
        known_rows: from `known_vocab_rows`. The means of further rows are the weights.
    """
    ema.num_updates = state[NUM_UPDATES]
    for index, shard in enumerate(ema.shards):
        if shard.elements is None:  # flat ranges were read in place
            shard.mean.copy_(flat(state[SHARDS][leaf_name(index)]))
        weight = rows_of(shard)
        if weight in known_rows:
            # Where the new rows begin. Past the end of the shard the slices are empty.
            new = slice(max(0, known_rows[weight] * prod(weight.shape[1:]) - shard.first), None)
            master, rounded = shard.master()
            shard.mean[new] = (master if rounded is None else join_master_weight(rounded, master))[new]


def note_on_load(ema: WeightEma | None, is_saved: bool, is_loaded: bool) -> str:
    """What happened to the average, as text for the user; empty if it was loaded, or there is none."""
    if ema is None:
        return "the moving average of the weights is dropped: this run has no --ema-decay" if is_saved else ""
    if is_loaded:
        return ""
    reason = "with --no-load-optim or --finetune" if is_saved else "the checkpoint has none"
    return f"the moving average of the weights (--ema-decay) starts anew, from the loaded weights: {reason}"
