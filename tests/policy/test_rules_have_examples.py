"""Every rule has an example that breaks it, the base configuration breaks none, and no rule ever raises."""

import random
import re

import pytest

from megafp8.config import rules
from megafp8.config.flags import build_parser
from megafp8.config.model_shapes import PRESETS
from megafp8.config.rules.base import UNSUPPORTED_SETTINGS
from megafp8.config.rules.training import RANGES
from megafp8.config.schema import RunConfig
from megafp8.config.settings import all_settings, settings_by_name, with_values

BASE = {
    **PRESETS["tiny"],
    "model.model_preset": "tiny",
    "model.vocab_size": 1000,
    "data.mock_data": True,
    "data.tokenizer_type": "NullTokenizer",
    "data.seq_length": 128,
    "training.micro_batch_size": 2,
    "training.global_batch_size": 16,
    "training.train_iters": 100,
    "optimizer.lr": 1e-3,
    "optimizer.lr_warmup_iters": 10,
    "precision.bf16": True,
    "precision.fp8_format": "hybrid",
    "precision.fp8_recipe": "tensorwise",
}

MIXTURE = {"model.num_experts": 4, "model.moe_ffn_hidden_size": 128, "parallel.moe_token_dispatcher_type": "alltoall"}

LATENT = {"model.multi_latent_attention": True, "model.group_query_attention": False, "model.num_query_groups": 1}

DEPTHS = {"model.mtp_num_layers": 1}

# Name of the rule -> changes of BASE, ranks, and a part of the problem's text.
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
        {"data.reset_attention_mask": True, "parallel.context_parallel_size": 2},
        2,
        "the ranks would split documents",
    ),
    "capped_scores_are_not_fp8": (
        {"model.softmax_type": "learnable", "precision.fp8_dot_product_attention": True},
        1,
        "FP8 attention has a plain softmax",
    ),
    "loss_factor_needs_multi_token_prediction": (
        {"model.mtp_loss_scaling_factor": 0.3},
        1,
        "--mtp-loss-scaling-factor 0.3 has no effect without --mtp-num-layers",
    ),
    "multi_token_layers_are_like_all_others": (
        DEPTHS | {"data.reset_attention_mask": True},
        1,
        "shifts tokens at the borders of documents",
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
    "latent_sizes_need_latent_attention": ({"model.kv_lora_rank": 64}, 1, "no effect without --multi-latent-attention"),
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
    "rope_scaling_needs_rope": (
        {"model.position_embedding_type": "none", "model.use_rope_scaling": True},
        1,
        "--use-rope-scaling has no effect",
    ),
    "norms_across_heads_are_rms": ({"model.qk_layernorm_across_heads": True}, 1, "no effect without --qk-layernorm"),
    "parallel_residual_has_its_norms": (
        {"model.parallel_residual": True, "model.norm_placement": "post"},
        1,
        "need a norm of their input",
    ),
    "local_rotary_base_has_its_layers": ({"model.rotary_base_local": 10_000}, 1, "no effect without --window-size"),
    "rotated_channels_are_pairs": ({"model.rotary_percent": 0.04}, 1, "of a head's 32 channels is 1"),
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
        "use --expert-model-parallel-size 1, or 6 experts",
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
        MIXTURE | {"training.cuda_graph_impl": "local"},
        1,
        "--cuda-graph-impl local is for dense models",
    ),
    "experts_recompute_what_they_have": (
        MIXTURE | {"training.recompute_granularity": "selective", "training.recompute_modules": ("moe_act",)},
        1,
        "give --moe-grouped-gemm",
    ),
    "flexible_dispatcher_has_its_library": (
        MIXTURE | {"parallel.moe_token_dispatcher_type": "flex"},
        1,
        "use alltoall",
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
    "numbers_are_in_range": ({"model.hidden_dropout": 1.0}, 1, "--hidden-dropout 1.0 must be in [0, 1)"),
    "one_batch_schedule": (
        {"training.step_batch_size_schedule": ("0:8", "1K:32")},
        1,
        "ends at 32, and --global-batch-size gives 16",
    ),
    "batch_schedule_is_valid": ({"training.rampup_batch_size": (32, 8, 100)}, 1, "not below the global batch of 16"),
    "rampup_counts_samples": ({"training.rampup_batch_size": (8, 8, 100)}, 1, "use --train-samples 1496 "),
    "scheduled_batches_divide": (
        {"training.rampup_batch_size": (7, 3, 100), "training.train_samples": 1000, "training.train_iters": None},
        1,
        "sizes 7 (from sample 0), 13 (from sample 67) are not multiples",
    ),
    "eval_batch_divides": ({"training.eval_global_batch_size": 9}, 2, "use 12"),
    "profiled_ranks_exist": ({"logging.profile": True, "logging.profile_ranks": (0, 8)}, 4, "0 to 3"),
    "profile_ends_after_it_starts": ({"logging.profile": True, "logging.profile_step_end": 10}, 1, "must be above"),
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
    "stages_divide_the_layers": ({"parallel.pipeline_model_parallel_size": 4}, 4, "2 / 4 = 0.5"),
    "stages_are_split_in_one_way": (
        {
            "model.num_layers": 8,
            "parallel.pipeline_model_parallel_size": 2,
            "parallel.decoder_first_pipeline_num_layers": 3,
            "parallel.account_for_loss_in_pipeline_split": True,
        },
        2,
        "keep one of these",
    ),
    "layout_string_has_every_layer": (
        {"parallel.pipeline_model_parallel_size": 2, "parallel.pipeline_model_parallel_layout": "Et|L"},
        2,
        "has 1 layers (t), not --num-layers 2",
    ),
    "flush_overlap_needs_overlapped_messages": (
        {"parallel.overlap_p2p_comm_warmup_flush": True},
        1,
        "needs virtual pipeline stages",
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
    "one_spelling_of_virtual_stages": (
        {
            "parallel.num_layers_per_virtual_pipeline_stage": 1,
            "parallel.num_virtual_stages_per_pipeline_rank": 2,
        },
        1,
        "two ways to set the same value",
    ),
    "virtual_stages_divide_the_layers": (
        {
            "model.num_layers": 6,
            "parallel.pipeline_model_parallel_size": 2,
            "parallel.num_layers_per_virtual_pipeline_stage": 2,
        },
        2,
        "6 / 2 = 3 layers",
    ),
    "interleaving_needs_a_pipeline": (
        {
            "model.num_layers": 4,
            "parallel.pipeline_model_parallel_size": 2,
            "parallel.num_virtual_stages_per_pipeline_rank": 2,
            "training.global_batch_size": 6,
        },
        2,
        "6 / (2 x 1) = 3: use --global-batch-size 8",
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
    "fsdp_excludes_other_settings": (
        {"parallel.use_torch_fsdp2": True, "parallel.use_distributed_optimizer": True},
        2,
        "--use-distributed-optimizer is not supported with --use-torch-fsdp2",
    ),
    "fsdp_replicas_have_ranks": (
        {
            "parallel.use_torch_fsdp2": True,
            "precision.gradient_accumulation_fusion": False,
            "parallel.num_distributed_optimizer_instances": 4,
        },
        4,
        "are not 4 replicas of the same number of ranks, two or more",
    ),
    "fsdp_ranks_divide_the_rows": (
        {"parallel.use_torch_fsdp2": True, "precision.gradient_accumulation_fusion": False},
        3,
        "3 data- x context-parallel ranks do not divide hidden size 128",
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
    "batch_is_given": ({"training.micro_batch_size": None}, 1, "--micro-batch-size is missing"),
    "global_batch_divides": ({"training.global_batch_size": 10}, 4, "use --global-batch-size 16"),
    "automatic_size_divides_a_given_batch": (
        {"training.micro_batch_size_memory_limit": 8.0},
        1,
        "without --micro-batch-size auto",
    ),
    "length_is_given_once": ({"training.train_samples": 1000}, 1, "keep one"),
    "samples_fill_a_batch": ({"training.train_iters": None, "training.train_samples": 8}, 1, "at least 16"),
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
        "use --fp8-recipe delayed",
    ),
    "fp8_weights_need_sharded_optimizer": (
        {"precision.fp8_param_gather": True, "parallel.use_distributed_optimizer": False},
        1,
        "needs --use-distributed-optimizer",
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
    "fp8_gradient_options_need_their_switch": (
        {"precision.grad_reduce_fp8_format": "e5m2"},
        2,
        "--grad-reduce-fp8-format e5m2 has no effect without --grad-reduce-in-fp8",
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
    "learning_rate_is_given": ({"optimizer.lr": None}, 1, "--lr is missing"),
    "learning_rate_is_the_peak": ({"optimizer.min_lr": 0.01}, 1, "above --lr 0.001"),
    "schedule_is_counted_like_the_run": ({"optimizer.lr_decay_samples": 1000}, 1, "use --lr-decay-iters"),
    "warmup_is_given_once": ({"optimizer.lr_warmup_fraction": 0.1}, 1, "--lr-warmup-iters 10"),
    "warmup_ends_within_the_schedule": ({"optimizer.lr_warmup_iters": 100}, 1, "(100 steps)"),
    "wsd_has_its_decay": ({"optimizer.lr_decay_style": "WSD"}, 1, "--lr-wsd-decay-iters"),
    "weight_decay_has_its_ends": (
        {"optimizer.weight_decay_incr_style": "linear"},
        1,
        "--start-weight-decay and --end-weight-decay",
    ),
    "fixed_loss_scale_has_a_scaler": (
        {"optimizer.loss_scale": 8.0, "precision.bf16": False, "parallel.use_distributed_optimizer": False},
        1,
        "--use-distributed-optimizer",
    ),
    "dynamic_loss_scale_can_move": ({"optimizer.loss_scale_window": 2.5}, 1, "an integer number of steps"),
    "sharded_state_has_a_layout": (
        {"optimizer.optimizer": "sgd", "parallel.use_distributed_optimizer": True},
        1,
        "not sgd: remove one of them",
    ),
    "muon_has_complete_matrices": (
        {"optimizer.optimizer": "muon", "parallel.overlap_param_gather": True, "parallel.overlap_grad_reduce": True},
        1,
        "--overlap-param-gather is not supported with --optimizer muon",
    ),
    "newton_schulz_steps_fit": (
        {"optimizer.optimizer": "muon", "optimizer.muon_num_ns_steps": 7},
        1,
        "--muon-coefficient-type quintic needs a multiple of 5 steps",
    ),
    "low_precision_state_needs_its_switch": ({"optimizer.exp_avg_dtype": "bf16"}, 1, "--use-precision-aware-optimizer"),
    "full_recompute_says_which_layers": (
        {"training.recompute_granularity": "full", "training.recompute_method": "uniform"},
        1,
        "--recompute-num-layers",
    ),
    "delayed_scaling_excludes_norm_recompute": (
        {
            "precision.fp8_recipe": "delayed",
            "training.recompute_activations": True,
            "training.recompute_modules": ("layernorm",),
        },
        1,
        "remove layernorm",
    ),
    "saved_activations_can_be_codes": (
        {"precision.fp8_saved_activations": ("norm",), "model.hidden_size": 136},
        1,
        "--hidden-size, 136, must be a multiple of the group size, 16",
    ),
    "saved_activations_are_saved": (
        {
            "precision.fp8_saved_activations": ("activation",),
            "training.recompute_activations": True,
            "training.recompute_modules": ("mlp",),
        },
        1,
        "keeps the MLP's input in high precision",
    ),
    "mlp_recompute_excludes_biases": (
        {
            "model.add_bias_linear": True,
            "training.recompute_activations": True,
            "training.recompute_modules": ("mlp",),
        },
        1,
        "--disable-bias-linear",
    ),
    "saved_activations_have_ranks_to_spread_over": (
        {"training.distribute_saved_activations": True},
        1,
        "--tensor-model-parallel-size 2",
    ),
    "cuda_graph_steps_are_identical": (
        {"training.cuda_graph_impl": "local", "model.hidden_dropout": 0.1, "training.recompute_activations": True},
        1,
        "--hidden-dropout 0.1 with --cuda-graph-impl local",
    ),
    "offloading_has_its_modules": (
        {"training.fine_grained_activation_offloading": True, "training.offload_modules": ("attn_proj",)},
        1,
        "add core_attn",
    ),
    "cuda_graph_has_warmup_steps": (
        {"training.cuda_graph_impl": "local", "training.cuda_graph_warmup_steps": 0},
        1,
        "use at least 1",
    ),
    "data_has_one_source": ({"data.data_path": ("a",)}, 1, "keep one"),
    "evaluation_shards_need_training_shards": ({"data.valid_data_path": ("a",)}, 1, "needs --train-data-path"),
    "split_has_three_parts": ({"data.split": "90;10"}, 1, "969,30,1"),
    "blends_are_pairs": ({"data.data_path": ("0.3", "a", "b")}, 1, "must alternate"),
    "tokenizer_has_its_files": ({"data.tokenizer_type": "GPT2BPETokenizer"}, 1, "--vocab-file and --merge-file"),
    "overrides_name_a_field": ({"overrides": ("model.num_layers=3",)}, 1, "transformer.FIELD=VALUE"),
    "second_folder_is_used": (
        {"checkpoint.save": "here", "checkpoint.non_persistent_global_ckpt_dir": "there"},
        1,
        "without --non-persistent-save-interval",
    ),
    "late_saves_end_before_collectives": (
        {"checkpoint.save": "here", "checkpoint.async_save": True, "checkpoint.async_save_timeout": 600},
        1,
        "--distributed-timeout-minutes 10",
    ),
    "late_saves_end_before_the_run": (
        {"checkpoint.save": "here", "checkpoint.async_save": True, "training.checkpoint_timeout_s": 200.0},
        1,
        "lower the first",
    ),
    "saving_needs_a_folder": ({"checkpoint.ckpt_keep": 10}, 1, "without --save"),
    "retained_steps_are_saved": (
        {"checkpoint.save": "/runs/a", "checkpoint.save_interval": 100, "checkpoint.save_retain_interval": 250},
        1,
        "use --save-retain-interval 300",
    ),
    "checkpoint_settings_have_a_source": (
        {"checkpoint.use_checkpoint_args": True},
        1,
        "--use-checkpoint-args has no effect without --load",
    ),
    "padded_rows_are_divisible": (
        {"model.padded_vocab_size": 1020, "parallel.tensor_model_parallel_size": 2},
        2,
        "is not a multiple of 32",
    ),
    "expert_kernels_suit_the_experts": ({"parallel.moe_expert_kernels": "te"}, 1, "has no effect without"),
    "loading_needs_a_folder": ({"checkpoint.finetune": True}, 1, "--finetune has no effect without --load"),
    "grace_is_for_signals": (
        {"training.exit_signal_grace_s": 60.0, "training.exit_signal_handler": False},
        1,
        "--no-exit-signal-handler",
    ),
    "schedule_has_one_source": (
        {
            "checkpoint.load": "/",
            "checkpoint.use_checkpoint_opt_param_scheduler": True,
            "checkpoint.override_opt_param_scheduler": True,
        },
        1,
        "contradict",
    ),
    "skipping_needs_the_check": (
        {"training.check_for_nan_in_loss_and_grad": False, "training.max_skipped_steps": 2},
        1,
        "keep one",
    ),
    "skipping_spikes_has_a_limit": ({"training.spike_policy": "skip"}, 1, "could not skip any step"),
    "nonfinite_activations_are_seen": (
        {"training.on_nonfinite_activation": "skip", "precision.fp8_format": "hybrid"},
        1,
        "--on-nonfinite-activation skip with --max-skipped-steps 0",
    ),
    "guard_has_quantized_layers": (
        {"training.fp8_guard_interval": 5},
        1,
        "--fp8-guard-interval 5 has no effect without --fp8-guard",
    ),
    "planted_fault_has_a_place": (
        {"training.planted_fault_step": 5},
        1,
        "--planted-fault-step 5 has no effect without --planted-fault",
    ),
    "spike_settings_need_their_policy": (
        {"training.spike_policy": "skip", "training.max_skipped_steps": 1, "training.max_rollbacks": 1},
        1,
        "--max-rollbacks 1 has no effect without --spike-policy rollback",
    ),
    "spikes_are_detectable": (
        {"training.spike_policy": "skip", "training.max_skipped_steps": 1, "training.spike_window": 16},
        1,
        "--spike-min-steps 32 is above --spike-window 16",
    ),
    "rollback_has_somewhere_to_go": ({"training.spike_policy": "rollback"}, 1, "give --save and --save-interval"),
    "unsupported_settings_are_refused": (
        {"training.data_parallel_random_init": True},
        1,
        "--data-parallel-random-init: ",
    ),
    "shards_are_there": ({"data.data_path": ("/nowhere/a.bin",)}, 1, "without .bin or .idx"),
    "tokenizer_files_are_there": (
        {"data.tokenizer_type": "SentencePieceTokenizer", "data.tokenizer_model": "/nowhere/m"},
        1,
        "no such file",
    ),
    "statistics_have_an_interval": ({"logging.fp8_what_if": "mxfp8"}, 1, "give --fp8-log-interval"),
    "statistics_have_an_object": ({"logging.fp8_log_interval": 10, "precision.fp8_format": None}, 1, "--fp8-what-if"),
    "patterns_name_linears": (
        {"logging.fp8_log_interval": 10, "logging.fp8_log_layers": "*fc3"},
        1,
        "*fc3 matches no linear layer",
    ),
    "tried_recipes_can_be_tried": (
        {"logging.fp8_log_interval": 10, "logging.fp8_what_if": "delayed"},
        1,
        "choose from tensorwise",
    ),
    "fused_operations_have_no_statistics": (
        {"logging.fp8_log_interval": 10, "precision.use_transformer_engine_op_fuser": True},
        1,
        "remove one",
    ),
    "checkpoints_to_load_are_there": (
        {"checkpoint.load": "/nowhere/a", "checkpoint.save": "/tmp"},
        1,
        "it differs from --save /tmp",
    ),
    "outputs_can_be_written": ({"checkpoint.save": "/dev/null/run"}, 1, "/dev/null is not a folder"),
}


def config_of(changes):
    return with_values(RunConfig(), BASE | changes)


@pytest.mark.parametrize("rule", rules.ALL_RULES, ids=lambda rule: rule.__name__)
def test_every_rule_has_an_example_that_breaks_it(rule):
    assert rule.__name__ in EXAMPLES, f"add an example that breaks {rule.__name__}"
    changes, world_size, text = EXAMPLES[rule.__name__]
    found = list(rule(config_of(changes), world_size))
    assert any(text in problem for problem in found), found
    assert set(found) <= set(rules.problems(config_of(changes), world_size))


@pytest.mark.parametrize("entry", UNSUPPORTED_SETTINGS, ids=lambda entry: entry.setting)
def test_settings_without_effect_are_refused(entry):
    found = rules.problems(config_of({entry.setting: True}), 1)
    assert any(entry.reason in problem for problem in found), found


def test_no_example_without_a_rule():
    assert set(EXAMPLES) == {rule.__name__ for rule in rules.ALL_RULES}


@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_the_base_configuration_breaks_no_rule(world_size):
    assert rules.problems(config_of({}), world_size) == []


@pytest.mark.parametrize("rule", rules.ALL_RULES, ids=lambda rule: rule.__name__)
def test_rules_have_one_line_docstrings(rule):
    assert rule.__doc__ and "\n" not in rule.__doc__.strip()


def test_problems_name_flags_that_exist():
    known = set(build_parser()._option_string_actions)
    for changes, world_size, _ in EXAMPLES.values():
        for problem in rules.problems(config_of(changes), world_size):
            for flag in re.findall(r"--[a-z0-9][a-z0-9_-]*", problem):
                assert flag in known, f"{flag} in: {problem}"


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"data.mock_data": False}, "no training data: give"),
        ({"data.mock_data": False, "data.data_path": ("a",), "data.train_data_path": ("b",)}, "keep one"),
        (
            {"data.mock_data": False, "data.data_path": ("a",), "data.valid_data_path": ("b",)},
            "--valid-data-path needs",
        ),
        ({"data.mock_data": False, "data.train_data_path": ("a",), "data.split": "1,1,1"}, "--split 1,1,1 has no"),
        ({"data.mock_data": False, "data.data_path": ("x", "a", "1", "b")}, "must alternate"),
        ({"data.mock_data": False, "data.train_data_path": ("0", "a", "1", "b")}, "and 0 is not"),
        ({"checkpoint.override_sample_order": True}, "--override-sample-order has no effect without --load"),
        ({"checkpoint.override_precision": True}, "--override-precision has no effect without --load"),
        ({"data.data_cache_path": "/dev/null/cache"}, "--data-cache-path /dev/null/cache"),
    ],
)
def test_contradictory_data_settings(changes, part):
    assert any(part in problem for problem in rules.problems(config_of(changes), 1))


def test_all_problems_are_reported_together():
    changes = {
        "model.num_layers": 3,
        "parallel.pipeline_model_parallel_size": 2,
        "optimizer.lr": None,
        "data.split": "x",
    }
    found = rules.problems(config_of(changes), 3)
    for part in ("world size 3", "--num-layers 3", "--lr is missing", "--split"):
        assert any(part in problem for problem in found), (part, found)


def test_tables_name_settings_and_numbers():
    for name in RANGES:
        assert settings_by_name()[name].type in (int, float)
    for entry in UNSUPPORTED_SETTINGS:
        assert not entry.is_asked(settings_by_name()[entry.setting].default), f"{entry.setting}: the default is refused"
    unchecked = {
        setting.name
        for setting in all_settings()
        if setting.type in (int, float) and not setting.choices and setting.name not in RANGES
    }
    # Other rules check them; the offset may be any number.
    assert unchecked == {
        "logging.profile_ranks", "parallel.hierarchical_context_parallel_sizes", "training.rampup_batch_size",
        "model.glu_linear_offset", "model.moe_aux_loss_coeff",
    }  # fmt: skip


def test_no_rule_raises_on_missing_or_out_of_range_values():
    generator = random.Random(0)
    choices = {
        int: [0, -1, 1, 2, 3, 7, 16, 128],
        float: [0.0, -1.0, 0.5, 1.0, 3e-4],
        bool: [False, True],
        str: ["", "1", "x", "0,0,0", "90,10"],
    }
    base = config_of({})
    for _ in range(300):
        changes = {}
        for setting in generator.sample(all_settings(), 40):
            options = list(setting.choices) or choices[setting.type]
            options = [(), (options[0],), tuple(options)] if setting.many else options
            changes[setting.name] = generator.choice(options + ([None] if setting.optional else []))
        config, world_size = with_values(base, changes), generator.choice([0, 1, 3, 8])
        assert isinstance(rules.problems(config, world_size), list)
        assert isinstance(rules.notices(config, "emulated", world_size), list)
