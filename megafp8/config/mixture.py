"""Values derived from the settings of mixture-of-experts layers."""

from __future__ import annotations

from typing import Optional, Union

from megafp8.config import dimensions
from megafp8.config.expert_layers import expert_layers, has_capacity, is_mixture, layer_frequency, num_expert_layers
from megafp8.config.schema import ModelConfig, ParallelConfig, RunConfig
from megafp8.errors import ConfigError

__all__ = ["expert_layers", "has_capacity", "is_mixture", "layer_frequency", "num_expert_layers"]
PEER = "peer"
"""The dispatcher that writes tokens into the memory of the GPUs of their experts."""
PEER_ROOM = 1.25
"""Rows of a rank's experts in a CUDA graph with `PEER`, for each row that the largest load before it needed."""
AUXILIARY_LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss")


def moe_ffn_hidden_size(model: ModelConfig) -> int:
    """Hidden size of one expert: by default that of dense layers."""
    return dimensions.ffn_hidden_size(model) if model.moe_ffn_hidden_size is None else model.moe_ffn_hidden_size


def expert_tensor_size(parallel: ParallelConfig) -> int:
    """Tensor-parallel ranks of the experts."""
    size = parallel.expert_tensor_parallel_size
    return parallel.tensor_model_parallel_size if size is None else size


def expert_data_size(config: RunConfig, world_size: int) -> int:
    """Ranks that hold the same experts: world size / (expert tensor x expert x pipeline).

    Raises:
        ConfigError: the world size is not a multiple of that.
    """
    parallel = config.parallel
    ranks = expert_tensor_size(parallel) * parallel.expert_model_parallel_size * parallel.pipeline_model_parallel_size
    if ranks < 1 or world_size % ranks:
        raise ConfigError(f"world size {world_size} is not a multiple of the {ranks} ranks that divide the experts")
    return world_size // ranks


def experts_per_rank(config: RunConfig) -> int:
    """Experts of one layer on one rank."""
    assert config.model.num_experts is not None
    return config.model.num_experts // config.parallel.expert_model_parallel_size


def has_expert_ranks(config: RunConfig) -> bool:
    """Whether experts are divided over ranks in another way than other weights."""
    return is_mixture(config.model) and (
        config.parallel.expert_model_parallel_size > 1
        or expert_tensor_size(config.parallel) != config.parallel.tensor_model_parallel_size
    )


def expert_ranks_flag(config: RunConfig) -> str:
    """The setting that divides experts over ranks in another way than other weights, where one does."""
    parallel = config.parallel
    if parallel.expert_model_parallel_size > 1:
        return f"--expert-model-parallel-size {parallel.expert_model_parallel_size}"
    return (
        f"--expert-tensor-parallel-size {expert_tensor_size(parallel)} with --tensor-model-parallel-size "
        f"{parallel.tensor_model_parallel_size}"
    )


def token_dispatcher(config: RunConfig) -> str:
    """The exchange of tokens: `allgather`, `alltoall`, `flex` or `peer`.

    `auto`, before `peer` was chosen for the GPUs of the run, is `alltoall` where ranks exchange tokens, of which it
    sends only what an expert needs, and for settings that megatron-core has with `alltoall` only.
    """
    model, parallel = config.model, config.parallel
    if parallel.moe_token_dispatcher_type != "auto":
        return parallel.moe_token_dispatcher_type
    needs_alltoall = (
        parallel.expert_model_parallel_size > 1, has_capacity(model), model.moe_router_padding_for_quantization,
        parallel.moe_shared_expert_overlap,
    )  # fmt: skip
    return "alltoall" if any(needs_alltoall) else "allgather"


def exchange_library(config: RunConfig) -> Optional[str]:
    """The library by which ranks exchange tokens, DeepEP or HybridEP; None without the flex dispatcher."""
    if not is_mixture(config.model) or token_dispatcher(config) != "flex":
        return None
    return {"deepep": "DeepEP", "hybridep": "HybridEP"}[config.parallel.moe_flex_dispatcher_backend]


def router_dtype(model: ModelConfig) -> str:
    """Dtype of the router's logits and scores."""
    return model.moe_router_dtype or "fp32"


def balancing_fields(model: ModelConfig) -> tuple[Union[str, list[str]], Union[float, list[float]]]:
    """Types and coefficients of the load balancing as megatron-core takes them: lists only for several."""
    types, coefficients = list(model.moe_router_load_balancing_type), list(model.moe_aux_loss_coeff)
    if len(types) == 1:
        return types[0], coefficients[0]
    return types, coefficients


def routed_rows(config: RunConfig) -> Optional[int]:
    """Tokens of one microbatch that an expert of this layout computes if the load is balanced, rounded down.

    The tokens of all ranks that exchange tokens, times the experts of a token, over the number of experts.
    """
    model, parallel = config.model, config.parallel
    length, micro = config.data.seq_length, config.training.micro_batch_size
    if length is None or micro is None or not is_mixture(model) or model.num_experts is None:
        return None
    ranks = parallel.expert_model_parallel_size * expert_tensor_size(parallel)
    per_rank = length * micro // (parallel.context_parallel_size * parallel.tensor_model_parallel_size)
    return per_rank * ranks * model.moe_router_topk // model.num_experts
