"""Parameters and activations of experts on one rank."""

from __future__ import annotations

from megafp8.config import dimensions, mixture, model_shapes, multi_token, stages
from megafp8.config.schema import RunConfig


def expert_layers_on_stage(config: RunConfig, stage: int) -> int:
    """Layers with experts on a pipeline stage, with those of multi-token prediction."""
    if not mixture.is_mixture(config.model):
        return 0
    has_experts = mixture.expert_layers(config.model)
    depths = multi_token.depths_on(config, stage) if multi_token.has_experts(config.model) else 0
    return sum(has_experts[layer] for layer in stages.layers_on(config, stage)) + depths


def expert_parameters_on_stage(config: RunConfig, stage: int) -> int:
    """Parameters of the routed experts on one rank of a stage."""
    if not mixture.is_mixture(config.model):
        return 0
    ranks = config.parallel.expert_model_parallel_size * mixture.expert_tensor_size(config.parallel)
    per_layer = model_shapes.count_parameters(config.model, 0).experts_per_layer
    return expert_layers_on_stage(config, stage) * per_layer // ranks


def mlp_channels(config: RunConfig, tokens: int, residual: int) -> tuple[int, int]:
    """Elements in the MLP of a layer on one rank, mean over the layers, and permuted elements of experts' inputs.

    The load of the experts counts as balanced. A rank with more tokens needs more.

    Args:
        tokens: of a microbatch on a context-parallel rank.
        residual: elements of the residual stream of a microbatch on one rank.
    """
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    dense = tokens * dimensions.ffn_hidden_size(model) // tp
    if not mixture.is_mixture(model):
        return dense, 0
    assert model.num_layers is not None
    fraction = mixture.num_expert_layers(model) / model.num_layers
    widths = model.moe_router_topk * mixture.moe_ffn_hidden_size(model)
    widths += model.moe_shared_expert_intermediate_size or 0
    elements = (1 - fraction) * dense + fraction * tokens * widths // tp
    return int(elements), int(fraction * model.moe_router_topk * residual)
