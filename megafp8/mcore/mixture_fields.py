"""Fields of megatron-core's configuration for mixture-of-experts layers."""

from __future__ import annotations

from typing import Any

from megafp8.config import mixture
from megafp8.config.schema import ParallelConfig, RunConfig
from megafp8.mcore.patches import is_installed

SAME_NAME_IN_MODEL = (
    "moe_shared_expert_intermediate_size", "moe_shared_expert_gate", "moe_router_topk", "moe_z_loss_coeff",
    "moe_input_jitter_eps", "moe_router_score_function", "moe_router_pre_softmax", "moe_router_topk_scaling_factor",
    "moe_router_enable_expert_bias", "moe_router_bias_update_rate", "moe_router_num_groups", "moe_router_group_topk",
    "moe_router_force_load_balancing", "moe_pad_expert_input_to_capacity",
    "moe_token_drop_policy", "moe_apply_probs_on_input",
)  # fmt: skip
SAME_NAME_IN_PARALLEL = (
    "expert_model_parallel_size", "moe_flex_dispatcher_backend", "moe_shared_expert_overlap",
)  # fmt: skip


def mixture_fields(config: RunConfig, implementation: str) -> dict[str, Any]:
    """The fields of experts; empty for a dense model.

    Args:
        implementation: `transformer_engine`, `emulated` or `local`. Fused kernels and grouped GEMMs are Transformer
            Engine's; other layers have the same results without them.
    """
    model, parallel = config.model, config.parallel
    if not mixture.is_mixture(model):
        return {}
    on_te = implementation == "transformer_engine"
    types, coefficients = mixture.balancing_fields(model)
    return {
        **{name: getattr(model, name) for name in SAME_NAME_IN_MODEL},
        **{name: getattr(parallel, name) for name in SAME_NAME_IN_PARALLEL},
        **_num_sms(parallel),
        "num_moe_experts": model.num_experts,
        "moe_expert_capacity_factor": model.moe_expert_capacity_factor if mixture.has_capacity(model) else None,
        "expert_tensor_parallel_size": mixture.expert_tensor_size(parallel),
        "moe_token_dispatcher_type": mixture.token_dispatcher(config),
        "moe_layer_freq": [int(has_experts) for has_experts in mixture.expert_layers(model)],
        "moe_ffn_hidden_size": mixture.moe_ffn_hidden_size(model),
        "moe_router_load_balancing_type": types,
        "moe_aux_loss_coeff": coefficients,
        "moe_router_dtype": mixture.router_dtype(model),
        "moe_grouped_gemm": on_te and parallel.moe_grouped_gemm,
        "moe_permute_fusion": on_te and parallel.moe_permute_fusion,
        "moe_router_fusion": on_te and parallel.moe_router_fusion,
        # Emulated experts pad their inputs themselves, as Transformer Engine's do.
        "moe_router_padding_for_quantization": on_te and model.moe_router_padding_for_quantization,
    }


def _num_sms(parallel: ParallelConfig) -> dict[str, int]:
    """The SMs of the flex dispatcher's library, if they are given."""
    if parallel.moe_flex_dispatcher_num_sms is None:
        return {}
    name = (
        f"moe_{parallel.moe_flex_dispatcher_backend}_num_sms"
        if is_installed("<0.19")
        else "moe_flex_dispatcher_num_sms"
    )
    return {name: parallel.moe_flex_dispatcher_num_sms}
