"""Examples of rules on mixtures of experts.

They break the rules in `megafp8/config/rules/`: moe.py, routing.py.
"""

MIXTURE = {"model.num_experts": 4, "model.moe_ffn_hidden_size": 128, "parallel.moe_token_dispatcher_type": "alltoall"}

EXAMPLES = {
    "experts_of_a_token_exist": (MIXTURE | {"model.moe_router_topk": 8}, 1, "use at most 4"),
    "one_expert_has_a_gradient": (MIXTURE | {"model.moe_router_topk": 1}, 1, "give --moe-router-pre-softmax"),
    "expert_groups_divide": (
        MIXTURE | {"model.moe_router_num_groups": 3, "model.moe_router_group_topk": 1},
        1,
        "not divisible by --moe-router-num-groups 3",
    ),
    "layers_with_experts_are_layers": (MIXTURE | {"model.moe_layer_freq": "[0]*3"}, 1, "has 3 elements"),
    "losses_have_coefficients": (
        MIXTURE | {"model.moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss")},
        1,
        "2 types and 1 coefficients",
    ),
    "expert_bias_needs_sigmoid": (
        MIXTURE | {"model.moe_router_enable_expert_bias": True},
        1,
        "give --moe-router-score-function sigmoid",
    ),
    "sinkhorn_has_its_own_scores": (
        MIXTURE | {"model.moe_router_load_balancing_type": ("sinkhorn",), "model.moe_router_score_function": "sigmoid"},
        1,
        "--moe-router-score-function sigmoid with sinkhorn",
    ),
    "capacity_has_its_parts": (
        MIXTURE | {"model.moe_expert_capacity_factor": 1.0, "parallel.moe_token_dispatcher_type": "allgather"},
        1,
        "use alltoall",
    ),
    "shared_experts_have_their_parts": (
        MIXTURE | {"model.moe_shared_expert_gate": True},
        1,
        "without --moe-shared-expert-intermediate-size",
    ),
    "scores_on_input_are_of_one_expert": (
        MIXTURE | {"model.moe_apply_probs_on_input": True},
        1,
        "it needs --moe-router-topk 1",
    ),
    "expert_ranks_divide_the_experts": (
        MIXTURE | {"parallel.expert_model_parallel_size": 3},
        3,
        "use --expert-model-parallel-size 2, or another model with 6 experts",
    ),
    "expert_ranks_divide_the_world": (
        MIXTURE | {"parallel.expert_model_parallel_size": 4},
        2,
        "not a multiple of expert tensor x expert x pipeline",
    ),
    "experts_need_sequence_parallelism": (
        MIXTURE | {"parallel.tensor_model_parallel_size": 2},
        2,
        "needs --sequence-parallel",
    ),
    "expert_tensor_ranks_divide_the_experts": (
        MIXTURE | {"model.moe_ffn_hidden_size": 129, "parallel.expert_tensor_parallel_size": 2},
        2,
        "129 is not divisible by 2",
    ),
    "padding_is_for_quantized_experts": (
        MIXTURE | {"model.moe_router_padding_for_quantization": True, "precision.fp8_format": None},
        1,
        "without --fp8-format",
    ),
    "expert_sizes_suit_the_recipe": (MIXTURE | {"model.moe_ffn_hidden_size": 120}, 1, "use --moe-ffn-hidden-size 128"),
    "experts_have_no_fused_operations": (
        MIXTURE | {"precision.residual_norm_fusion": True},
        1,
        "--residual-norm-fusion is for dense models",
    ),
    "experts_recompute_what_they_have": (
        MIXTURE | {"training.recompute_granularity": "selective", "training.recompute_modules": ("moe_act",)},
        1,
        "give --moe-grouped-gemm",
    ),
    "peer_dispatcher_has_its_parts": (
        MIXTURE | {"parallel.moe_token_dispatcher_type": "peer"},
        1,
        "peer does not support a single expert-parallel rank",
    ),
    "flex_dispatcher_has_its_parts": (
        MIXTURE | {"parallel.moe_token_dispatcher_type": "flex"},
        1,
        "give --expert-model-parallel-size 2 or more",
    ),
    "dispatch_in_fp8_sends_codes": (
        MIXTURE
        | {
            "parallel.moe_dispatch_in_fp8": True,
            "parallel.expert_model_parallel_size": 2,
            "precision.fp8_recipe": "mxfp8",
            "precision.fp8_format": "e4m3",
        },
        2,
        "use tensorwise, delayed",
    ),
    "expert_kernels_suit_the_experts": ({"parallel.moe_expert_kernels": "te"}, 1, "has no effect without"),
}
