"""Roles of settings where a run continues or converts a checkpoint."""

from __future__ import annotations

# Settings of the model that do not change its function: how it is trained, initialized or computed. The number of query
# groups is explicit when models are compared.
NOT_OF_THE_FUNCTION = frozenset(
    f"model.{name}"
    for name in (
        "model_preset", "vocab_size", "make_vocab_size_divisible_by", "attention_dropout", "hidden_dropout",
        "init_method_std", "embedding_init_method_std", "group_query_attention",
        "attention_softmax_in_fp32", "apply_query_key_layer_scaling", "moe_aux_loss_coeff", "moe_z_loss_coeff",
        "moe_input_jitter_eps", "moe_router_bias_update_rate", "moe_router_dtype",
        "moe_router_padding_for_quantization", "moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity",
        "moe_token_drop_policy", "mtp_loss_scaling_factor",
    )
)  # fmt: skip
# Settings of the model in which a run may differ from the checkpoint that it continues: also those that only a
# conversion refuses. The vocabulary is compared by its size or its rows.
NOT_OF_THE_WEIGHTS = (NOT_OF_THE_FUNCTION - {"model.vocab_size"}) | {
    "model.add_position_embedding",
    "model.padded_vocab_size",
    "model.moe_router_force_load_balancing",
}
# Settings whose change is not named when a run continues a checkpoint: what has no effect on what it learns, or is
# compared elsewhere (layout, samples, rows of the embedding, threads). A name that ends in "." or "_" is of a group.
UNNAMED_CHANGES = (
    "parallel.", "checkpoint.", "logging.", "model.model_preset", "model.vocab_size", "model.padded_vocab_size",
    "model.init_method_std", "model.embedding_init_method_std", "data.data_path", "data.train_data_path",
    "data.valid_data_path", "data.test_data_path", "data.data_cache_path", "data.num_workers", "data.mmap_bin_files",
    "data.create_attention_mask_in_dataloader", "training.eval_", "training.start_eval_at_iter",
    "training.skip_train", "training.exit_", "training.step_timeout_s", "training.checkpoint_timeout_s",
    "training.max_crashes", "training.micro_batch_size_memory_limit", "training.recompute_",
    "training.moe_layer_recompute", "training.fine_grained_activation_offloading", "training.offload_modules",
    "training.min_offloaded_tensor_size", "training.distribute_saved_activations",
    "training.check_weight_hash_across_dp_replicas_interval", "training.manual_gc", "training.manual_gc_interval",
    "training.empty_unused_memory_level", "training.performance", "training.cuda_graph_", "training.num_threads",
)  # fmt: skip


def is_unnamed(name: str) -> bool:
    """Return whether a setting is one of `UNNAMED_CHANGES`, or of one of its groups."""
    return any(name == each or (each[-1] in "._" and name.startswith(each)) for each in UNNAMED_CHANGES)
