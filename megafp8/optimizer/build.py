"""Builds the optimizer of a run: megatron-core's, or Muon from megatron-core's optimizer for Adam.

megatron-core builds its own Muon only with the package emerging_optimizers. Here it builds its optimizer for Adam, with
parameter groups, FP32 master weights, loss scale, gradient norm and clipping. Only the torch optimizer inside is
replaced, after the parameter groups were divided into those of Muon and those of AdamW.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Optional

import torch
from megatron.core import parallel_state
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from torch import Tensor

from megafp8.config import dimensions
from megafp8.config.optimizers import IS_MATRIX, is_layer_wise, updates_matrices
from megafp8.config.schema import ModelConfig, RunConfig
from megafp8.mcore.process_groups import is_reduced_over_expert_ranks
from megafp8.optimizer.layer_wise import LayerWiseOptimizer, Ownership, adopt_fp8_weights
from megafp8.optimizer.muon import Matrix, Muon, MuonSettings
from megafp8.optimizer.parameter_groups import is_matrix, matrices, mup_overrides


def build(config: RunConfig, core_config: OptimizerConfig, chunks: Sequence[Any]) -> MegatronOptimizer:
    """Build the optimizer; all ranks call it.

    Args:
        core_config: of megatron-core's optimizer; for one that updates matrices of its Adam, without its distributed
            optimizer.
        chunks: the model chunks with gradient buffers.
    """
    if not updates_matrices(config.optimizer):
        overrides = mup_overrides(config.model, core_config)
        return get_megatron_optimizer(core_config, list(chunks), config_overrides=overrides)
    groups = {
        **get_standard_config_overrides(core_config),
        matrices(): {IS_MATRIX: True},
    }
    ownerships = divide_weights(chunks) if is_layer_wise(config.optimizer, config.parallel) else []
    with trainable_only(chunks, ownerships):
        optimizer = get_megatron_optimizer(core_config, list(chunks), config_overrides=groups)
    weights, settings = find_matrices(config.model, chunks), MuonSettings.from_config(config.optimizer)
    for part in optimizer.chained_optimizers:
        part.optimizer = Muon(part.optimizer.param_groups, weights, settings)
        part.init_state_fn = initialize
        if ownerships:  # gradients of a weight count on its owner only
            part.grad_stats_parallel_group = parallel_state.get_intra_distributed_optimizer_instance_group()
        if config.precision.fp8_param_gather:
            adopt_fp8_weights(part)
    return LayerWiseOptimizer(optimizer, ownerships) if ownerships else optimizer


def has_state_by_weight(part: Any) -> bool:
    """Whether one of megatron-core's optimizers has complete tensors of state for each of its weights: Muon."""
    return isinstance(part.optimizer, Muon)


def initialize(optimizer: Muon, config: Any = None) -> None:
    """Give an optimizer that has made no step its initial state."""
    optimizer.initialize()


def named_weights(chunks: Sequence[Any]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The trained weights of this rank with their names in the chunks."""
    for chunk in chunks:
        yield from ((name, weight) for name, weight in chunk.named_parameters() if weight.requires_grad)


def divide_weights(chunks: Sequence[Any]) -> list[Ownership]:
    """The owners of the weights that data-parallel ranks hold, and of those that expert data-parallel ranks hold."""
    weights = [weight for _, weight in named_weights(chunks)]
    experts = [weight for weight in weights if is_reduced_over_expert_ranks(weight)]
    others = [weight for weight in weights if not is_reduced_over_expert_ranks(weight)]
    found = [Ownership.divide(others, parallel_state.get_data_parallel_group(with_context_parallel=True))]
    if experts:
        found.append(Ownership.divide(experts, parallel_state.get_expert_data_parallel_group()))
    return found


@contextmanager
def trainable_only(chunks: Sequence[Any], ownerships: Sequence[Ownership]) -> Iterator[None]:
    """Context in which megatron-core sees only this rank's weights as trained; all of them without ownerships.

    Master weights of the other ranks' weights are then never allocated. `main_param` of these is None, as in
    megatron-core's distributed optimizer.
    """
    own = {weight for ownership in ownerships for weight in ownership.of_this_rank}
    others = [weight for _, weight in named_weights(chunks) if ownerships and weight not in own]
    for weight in others:
        weight.main_param = None
        weight.requires_grad_(False)
    try:
        yield
    finally:
        for weight in others:
            weight.requires_grad_(True)


def find_matrices(model: ModelConfig, chunks: Sequence[Any]) -> dict[Tensor, Matrix]:
    """How each weight that Muon updates is a matrix, by the tensor that the optimizer updates."""
    heads = dimensions.query_projection_size(model) // dimensions.num_query_groups(model)
    channels = dimensions.kv_channels(model)
    found = {}
    for name, weight in named_weights(chunks):
        if is_matrix(weight, name):
            master = getattr(weight, "main_param", None)
            is_split = getattr(weight, "tensor_model_parallel", False)
            found[weight if master is None else master] = Matrix(
                group=tensor_group(name) if is_split else None,
                sharded_dim=weight.partition_dim if is_split else None,
                qkv_rows=(heads, channels, channels) if name.endswith("linear_qkv.weight") else None,
            )
    return found


def tensor_group(name: str) -> Optional[torch.distributed.ProcessGroup]:
    """The ranks that hold shards of a weight. Those of routed experts may be others than those of the other weights."""
    if "experts" in name.split("."):
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()
