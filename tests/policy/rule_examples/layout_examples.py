"""Examples of rules on parallel layouts: pipelines and FSDP.

They break the rules in `megafp8/config/rules/`: pipeline.py, sharding.py.
"""

EXAMPLES = {
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
}
