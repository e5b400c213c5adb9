"""Examples of rules on number formats: recipes, precision maps and FP8 gradients.

They break the rules in `megafp8/config/rules/`: precision.py, precision_map.py, gradient_reduction.py.
"""

EXAMPLES = {
    "one_weight_format": ({"precision.fp16": True, "precision.fp8_format": None}, 1, "--bf16 and --fp16"),
    "one_low_format": ({"precision.fp4_format": "e2m1"}, 1, "--fp8-format hybrid and --fp4-format e2m1"),
    "low_formats_are_not_with_fp16": ({"precision.fp16": True, "precision.bf16": False}, 1, "use --bf16"),
    "low_format_settings_need_a_format": ({"precision.fp8_format": None}, 1, "--fp8-recipe tensorwise has no effect"),
    "recipe_settings_need_their_recipe": (
        {"precision.fp8_recipe": "blockwise", "precision.fp8_power_2_scale": True},
        1,
        "not of blockwise",
    ),
    "fp8_attention_is_supported": (
        {"precision.fp8_recipe": "tensorwise", "precision.fp8_dot_product_attention": True},
        1,
        "does not train attention in this one",
    ),
    "fp8_weights_need_sharded_optimizer": (
        {"precision.fp8_param_gather": True, "parallel.use_distributed_optimizer": False},
        1,
        "needs --use-distributed-optimizer",
    ),
    "high_precision_validation_needs_weights": (
        {
            "training.eval_high_precision": True,
            "precision.fp8_param_gather": True,
            "precision.fp8_format": "hybrid",
            "parallel.use_distributed_optimizer": True,
        },
        1,
        "--eval-high-precision with --fp8-param-gather",
    ),
    "fp8_weights_need_masters": (
        {
            "precision.fp8_param_gather": True,
            "precision.bf16": False,
            "parallel.use_distributed_optimizer": True,
        },
        1,
        "needs --bf16",
    ),
    "low_formats_need_quantizing_layers": ({"precision.transformer_impl": "local"}, 1, "do not quantize"),
    "high_precision_layers_fit_a_stage": (
        {"precision.first_last_layers_bf16": True, "precision.num_layers_at_end_in_bf16": 3},
        1,
        "2 / 1 = 2 layers",
    ),
    "gradient_reduction_has_one_format": (
        {"precision.grad_reduce_in_bf16": True, "precision.accumulate_allreduce_grads_in_fp32": True},
        1,
        "contradict",
    ),
    "fp8_gradients_have_ranks": ({"precision.grad_reduce_in_fp8": True}, 1, "has nothing to send"),
    "fp8_gradients_exclude_other_reductions": (
        {"precision.grad_reduce_in_fp8": True, "overrides": ("ddp.num_distributed_optimizer_instances=2",)},
        2,
        "both replace the reduction",
    ),
    "fp8_gradients_within_nodes": (
        {
            "precision.grad_reduce_in_fp8": True,
            "precision.grad_reduce_fp8_intra_node": "fp32",
            "precision.grad_reduce_in_bf16": True,
        },
        4,
        "--grad-reduce-fp8-intra-node fp32 with BF16 gradients",
    ),
    "fp8_gradient_errors_have_one_loss_scale": (
        {
            "precision.grad_reduce_in_fp8": True,
            "precision.grad_reduce_fp8_error_feedback": True,
            "precision.fp16": True,
        },
        2,
        "the errors are those of the old",
    ),
    "loss_fusion_is_on_for_its_implementation": (
        {"precision.cross_entropy_fusion_impl": "te", "precision.cross_entropy_loss_fusion": False},
        1,
        "--cross-entropy-loss-fusion",
    ),
    "split_rope_needs_whole_rotations": (
        {"precision.split_rope_fusion": True, "model.rotary_percent": 0.5},
        1,
        "does not support --qk-layernorm",
    ),
    "swiglu_fusion_has_what_it_fuses": (
        {"precision.swiglu_quantize_fusion": True},
        1,
        "without --quantize-kernels triton",
    ),
    "op_fuser_has_its_activation": (
        {"precision.use_transformer_engine_op_fuser": True, "model.swiglu": False, "model.geglu": True},
        1,
        "with --geglu",
    ),
    "residual_fusion_has_its_norm": (
        {"precision.residual_norm_fusion": True, "model.normalization": "LayerNorm"},
        1,
        "without --normalization RMSNorm",
    ),
    "quantize_kernels_have_what_they_quantize": (
        {"precision.quantize_kernels": "triton", "precision.fp8_recipe": "mxfp8"},
        1,
        "without --fp8-recipe tensorwise or delayed or blockwise",
    ),
    "determinism_excludes_its_opposites": (
        {"precision.deterministic_mode": True, "precision.cross_entropy_loss_fusion": True},
        1,
        "not deterministic",
    ),
    "entries_can_be_read": ({"precision.precision_map": ("*.linear_fc2=fp7",)}, 1, "'fp7' is not a recipe"),
    "entries_name_linears": ({"precision.precision_map": ("*.fc2=mxfp8",)}, 1, "matches no linear layer"),
    "high_precision_is_that_of_the_weights": ({"precision.precision_map": ("*=fp32",)}, 1, "give bf16"),
    "delayed_scales_have_one_format": (
        {"precision.precision_map": ("*:fprop=delayed/e4m3", "*:wgrad=delayed/hybrid")},
        1,
        "e4m3 and hybrid",
    ),
    "phases_quantize_what_the_run_does": (
        {"precision.fp8_schedule": "fp8:2,fp8[*=bf16]"},
        1,
        "leaves nothing quantized: give bf16",
    ),
    "phases_differ": (
        {"precision.fp8_schedule": "fp8:2,fp8[layers.0.*=tensorwise/hybrid]"},
        1,
        "computes as fp8, the phase before it",
    ),
    "schedule_can_be_read": ({"precision.fp8_schedule": "bf16:100"}, 1, "takes no step: give bf16"),
    "schedule_ends_within_the_run": (
        {"precision.fp8_schedule": "bf16:10000000,fp8"},
        1,
        "no phase after bf16:10000000",
    ),
    "weights_in_fp8_have_one_form": (
        {
            "precision.fp8_param_gather": True,
            "parallel.use_distributed_optimizer": True,
            "precision.precision_map": ("*.linear_fc1:dgrad=bf16",),
        },
        1,
        "one recipe for fprop and another for dgrad",
    ),
    "gemm_dimensions_suit_the_recipe": ({"model.ffn_hidden_size": 388}, 1, "use --ffn-hidden-size 400"),
    "layout_independent_scales_need_complete_blocks": (
        {
            "precision.fp8_recipe": "blockwise",
            "precision.fp8_amax_reduction": "all",
            "parallel.tensor_model_parallel_size": 2,
            "parallel.sequence_parallel": True,
        },
        2,
        "linear_proj's inputs per rank are 64",
    ),
}
