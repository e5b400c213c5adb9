"""Examples of rules on training: batches, optimizer, recomputation, CUDA graphs and reactions.

They break the rules in `megafp8/config/rules/`: batch.py, optimizer.py, recompute.py, cuda_graph.py, training.py,
guard.py.
"""

EXAMPLES = {
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
    "batch_is_given": ({"training.micro_batch_size": None}, 1, "--micro-batch-size is missing"),
    "global_batch_divides": ({"training.global_batch_size": 10}, 4, "use --global-batch-size 16"),
    "automatic_size_divides_a_given_batch": (
        {"training.micro_batch_size": 0, "training.skip_train": True},
        1,
        "--micro-batch-size auto runs trial training steps",
    ),
    "length_is_given_once": ({"training.train_samples": 1000}, 1, "keep one"),
    "samples_fill_a_batch": ({"training.train_iters": None, "training.train_samples": 8}, 1, "at least 16"),
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
    "mup_has_its_scaling": (
        {"model.use_mup": True, "optimizer.optimizer": "muon"},
        1,
        "--optimizer muon is not supported with --use-mup",
    ),
    "newton_schulz_steps_fit": (
        {"optimizer.optimizer": "muon", "optimizer.muon_num_ns_steps": 7},
        1,
        "--muon-coefficient-type quintic needs a multiple of 5 steps",
    ),
    "low_precision_state_needs_its_switch": ({"optimizer.exp_avg_dtype": "bf16"}, 1, "--use-precision-aware-optimizer"),
    "average_is_of_fp32_weights": (
        {
            "optimizer.ema_decay": 0.999,
            "optimizer.use_precision_aware_optimizer": True,
            "optimizer.main_params_dtype": "fp16",
            "parallel.use_distributed_optimizer": True,
        },
        1,
        "--ema-decay with --main-params-dtype fp16",
    ),
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
    "cuda_graph_of_evaluations_is_possible": (
        {"training.cuda_graph_evaluation": True, "parallel.pipeline_model_parallel_size": 2},
        2,
        "--cuda-graph-evaluation with --pipeline-model-parallel-size 2",
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
    "guard_can_change_a_layer": (
        {
            "model.swiglu": True,
            "training.fp8_guard": "smooth-swiglu",
            "precision.precision_map": ("*.linear_fc2=bf16",),
        },
        1,
        "--fp8-guard smooth-swiglu: the inputs of linear_fc2 in all layers are in high precision",
    ),
    "average_is_updated": (
        {"optimizer.ema_decay": 0.9, "optimizer.ema_interval": 1000},
        1,
        "--ema-interval 1000 is above the 100 steps of the run",
    ),
    "spikes_are_detectable": (
        {"training.spike_policy": "skip", "training.max_skipped_steps": 1, "training.spike_window": 16},
        1,
        "--spike-min-steps 32 is above --spike-window 16",
    ),
    "rollback_has_somewhere_to_go": ({"training.spike_policy": "rollback"}, 1, "give --save and --save-interval"),
}
