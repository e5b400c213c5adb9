"""Examples of rules on what surrounds training: data, checkpoints, statistics and settings without effect.

They break the rules in `megafp8/config/rules/`: data.py, checkpoint.py, statistics.py, base.py.
"""

EXAMPLES = {
    "data_has_one_source": ({"data.data_path": ("a",)}, 1, "keep one"),
    "evaluation_shards_need_training_shards": ({"data.valid_data_path": ("a",)}, 1, "needs --train-data-path"),
    "split_has_three_parts": ({"data.split": "90;10"}, 1, "969,30,1"),
    "blends_are_pairs": ({"data.data_path": ("0.3", "a", "b")}, 1, "must alternate"),
    "data_phases_follow_each_other": ({"data.data_phases": ("web 5% a",)}, 1, "the first phase starts the run"),
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
    "run_has_what_its_settings_require": ({"checkpoint.ckpt_keep": 10}, 1, "without --save"),
    "retained_steps_are_saved": (
        {"checkpoint.save": "/runs/a", "checkpoint.save_interval": 100, "checkpoint.save_retain_interval": 250},
        1,
        "use --save-retain-interval 300",
    ),
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
    "unsupported_settings_are_refused": (
        {"training.data_parallel_random_init": True},
        1,
        "--data-parallel-random-init: ",
    ),
    "shards_are_there": ({"data.data_path": ("/nowhere/a.bin",)}, 1, "without .bin or .idx"),
    "prompts_are_there": ({"logging.sample_interval": 5, "logging.sample_prompts": "/nowhere/p"}, 1, "no such file"),
    "task_files_are_there": ({"training.eval_tasks": ("/nowhere/t.jsonl",)}, 1, "no such file"),
    "tokenizer_files_are_there": (
        {"data.tokenizer_type": "SentencePieceTokenizer", "data.tokenizer_model": "/nowhere/m"},
        1,
        "no such file",
    ),
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
    "fused_operations_show_swiglu": (
        {
            "logging.fp8_log_interval": 10,
            "precision.use_transformer_engine_op_fuser": True,
            "model.swiglu": False,
            "model.squared_relu": True,
        },
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
