"""Examples of rules on the model: sizes, attention, layers, and multi-token prediction.

They break the rules in `megafp8/config/rules/`: model.py, attention.py, layers.py, mla.py, mtp.py.
"""

LATENT = {"model.multi_latent_attention": True, "model.group_query_attention": False, "model.num_query_groups": 1}

DEPTHS = {"model.mtp_num_layers": 1}

EXAMPLES = {
    "shape_is_given": ({"model.num_layers": None}, 1, "--model-preset"),
    "heads_divide_hidden_size": ({"model.hidden_size": 130}, 1, "use --hidden-size 132"),
    "query_groups_divide_heads": ({"model.num_query_groups": 3}, 1, "--num-query-groups 1"),
    "windows_can_be_read": ({"model.window_size": "7,7"}, 1, "attention is causal"),
    "layers_without_rope_can_be_read": ({"model.no_rope_freq": "4"}, 1, "4 does not divide --num-layers 2"),
    "learned_positions_are_wanted_once": (
        {"model.add_position_embedding": False, "model.position_embedding_type": "learned_absolute"},
        1,
        "give --position-embedding-type rope, or none",
    ),
    "yarn_has_its_settings": (
        {"model.position_embedding_type": "yarn"},
        1,
        "give --yarn-original-max-position-embeddings",
    ),
    "queries_have_one_norm": ({"model.qk_layernorm": True, "model.qk_l2_norm": True}, 1, "keep one"),
    "documents_fit_the_attention": (
        {"data.reset_attention_mask": True, "precision.fp8_dot_product_attention": True},
        1,
        "FP8 attention has no borders of documents",
    ),
    "clipped_logits_follow_the_weights": (
        {"optimizer.qk_clip": True, "model.qk_layernorm": True},
        1,
        "--qk-layernorm is not supported with --qk-clip: the norms bound the logits",
    ),
    "capped_scores_are_not_fp8": (
        {"model.softmax_type": "learnable", "precision.fp8_dot_product_attention": True},
        1,
        "FP8 attention has a plain softmax",
    ),
    "multi_token_layers_are_like_all_others": (
        DEPTHS | {"model.window_size": "4,0"},
        1,
        "which layers it is for is not defined",
    ),
    "multi_token_fits_the_layout": (
        DEPTHS | {"parallel.pipeline_model_parallel_size": 2, "model.share_embeddings_and_output_weights": True},
        2,
        "add --untie-embeddings-and-output-weights",
    ),
    "layout_string_has_multi_token_prediction": (
        {"parallel.pipeline_model_parallel_size": 2, "parallel.pipeline_model_parallel_layout": "Et|tmL"},
        2,
        "has 1 modules of multi-token prediction (m), not --mtp-num-layers 0",
    ),
    "multi_token_recomputes_one_layer": (
        DEPTHS
        | {
            "training.recompute_granularity": "full",
            "training.recompute_method": "block",
            "training.recompute_num_layers": 1,
        },
        1,
        "its layers would not be recomputed",
    ),
    "precision_map_leaves_multi_token_prediction": (
        DEPTHS | {"precision.precision_map": ("*.linear_fc2=bf16",)},
        1,
        "layers.0-1.linear_fc2",
    ),
    "values_need_latent_attention": ({"model.rope_type": "yarn"}, 1, "no effect without --multi-latent-attention"),
    "model_has_what_its_settings_require": (
        {"model.mtp_loss_scaling_factor": 0.3},
        1,
        "--mtp-loss-scaling-factor 0.3 has no effect without --mtp-num-layers",
    ),
    "latent_attention_excludes_other_attention": (
        {"model.multi_latent_attention": True},
        1,
        "--multi-latent-attention with --group-query-attention",
    ),
    "latent_heads_rotate_pairs": (LATENT | {"model.qk_pos_emb_head_dim": 15}, 1, "use 16"),
    "latent_attention_fits_the_layout": (
        LATENT | {"parallel.tensor_model_parallel_size": 2},
        2,
        "does not sum the gradient of the rotated keys",
    ),
    "one_activation": ({"model.squared_relu": True}, 1, "keep one"),
    "mlp_has_width": ({"model.hidden_size": 16, "model.ffn_hidden_size": None}, 1, "give --ffn-hidden-size"),
    "positions_reach_the_sequence": (
        {"model.position_embedding_type": "learned_absolute", "model.max_position_embeddings": 64},
        1,
        "64 is less than --seq-length 128",
    ),
    "norms_across_heads_are_rms": ({"model.qk_layernorm_across_heads": True}, 1, "no effect without --qk-layernorm"),
    "parallel_residual_has_its_norms": (
        {"model.parallel_residual": True, "model.norm_placement": "post"},
        1,
        "need a norm of their input",
    ),
    "local_rotary_base_has_its_layers": ({"model.rotary_base_local": 10_000}, 1, "no effect without --window-size"),
    "rotated_channels_are_pairs": ({"model.rotary_percent": 0.04}, 1, "of a head's 32 channels is 1"),
    "world_size_divides": (
        {"parallel.tensor_model_parallel_size": 2, "parallel.context_parallel_size": 2},
        6,
        "2 x 1 x 2 = 4",
    ),
    "tensor_ranks_divide_the_model": (
        {"parallel.tensor_model_parallel_size": 4},
        4,
        "--num-query-groups 2 is not divisible",
    ),
    "context_levels_multiply_to_the_group": (
        {
            "parallel.context_parallel_size": 4,
            "parallel.cp_comm_type": "a2a+p2p",
            "parallel.hierarchical_context_parallel_sizes": (2, 4),
        },
        4,
        "whose product is --context-parallel-size 4, not 2 4",
    ),
    "sequence_divides": (
        {"parallel.context_parallel_size": 2, "data.seq_length": 130},
        2,
        "2 x --context-parallel-size = 2 x 2 = 4",
    ),
    "context_exchange_divides_heads": (
        {"parallel.context_parallel_size": 4, "parallel.cp_comm_type": "a2a"},
        4,
        "1 x 4 = 4",
    ),
    "registered_buffers_have_ranks": (
        {"parallel.use_nccl_ub": True, "parallel.pipeline_model_parallel_size": 2},
        2,
        "--use-nccl-ub with one data- x context-parallel rank of 2",
    ),
    "parameter_gather_overlap_has_its_parts": (
        {
            "parallel.overlap_param_gather": True,
            "parallel.overlap_grad_reduce": False,
            "parallel.use_distributed_optimizer": False,
        },
        1,
        "--use-distributed-optimizer and --overlap-grad-reduce",
    ),
    "tensor_overlap_has_its_parts": (
        {"parallel.tp_comm_overlap": True, "precision.fp8_recipe": "blockwise"},
        1,
        "blockwise",
    ),
    "padded_rows_are_divisible": (
        {"model.padded_vocab_size": 1020, "parallel.tensor_model_parallel_size": 2},
        2,
        "is not a multiple of 32",
    ),
}
