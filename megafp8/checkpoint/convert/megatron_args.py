"""Megatron-LM's arguments in a checkpoint, as settings of megafp8 and back.

Most settings have the name of Megatron-LM's argument. Arguments that change the model and have no setting here must
have the values of `PLAIN_MODEL`; otherwise the import is refused.

A checkpoint has several hundred arguments, most of them with their default. Of those that are not read, the user is
told what may change something: settings of megafp8 with a value other than the default, arguments of flags that are
refused, and unknown ones.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Set
from types import MappingProxyType
from typing import Any

import torch

from megafp8.config import attention_layers, derived, dimensions, megatron_flags, stages
from megafp8.config.schema import ModelConfig, RunConfig
from megafp8.config.schema.setting import DEPRECATED
from megafp8.config.settings import Setting, all_settings, read_settings, settings_by_name, value_of
from megafp8.errors import ConfigError
from megafp8.mcore.overrides import DTYPES

# Settings whose names are those of the arguments, by section.
SAME_NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "model": (
            "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels",
            "group_query_attention", "num_query_groups", "max_position_embeddings", "position_embedding_type",
            "rotary_base", "rotary_percent", "rotary_interleaved", "rotary_seq_len_interpolation_factor",
            "use_rope_scaling", "rope_scaling_factor", "normalization", "norm_epsilon", "apply_layernorm_1p", "swiglu",
            "squared_relu", "add_bias_linear", "add_qkv_bias", "qk_layernorm", "make_vocab_size_divisible_by",
            "attention_dropout", "hidden_dropout", "init_method_std", "attention_softmax_in_fp32",
            "apply_query_key_layer_scaling", "qk_l2_norm", "embedding_init_method_std", "window_size",
            "window_attn_skip_freq", "no_rope_freq",
        ),
        "parallel": (
            "tensor_model_parallel_size", "pipeline_model_parallel_size",
            "context_parallel_size", "sequence_parallel", "use_distributed_optimizer",
            "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers",
            "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
        ),
        "training": (
            "micro_batch_size", "global_batch_size", "train_iters", "train_samples", "seed", "eval_iters",
            "eval_interval", "rampup_batch_size", "decrease_batch_size_if_needed",
        ),
        # All but those that are not converted.
        "optimizer": tuple(
            setting.field for setting in all_settings()
            if setting.section == "optimizer"
            and setting.audience is not DEPRECATED
            and setting.field != "one_pass_optimizer"
        ),
        "precision": (
            "bf16", "fp16", "fp8_recipe", "fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo", "fp8_wgrad",
            "first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16",
            "grad_reduce_in_bf16", "bias_gelu_fusion", "fp8_param_gather",
        ),
        "data": (
            "seq_length", "tokenizer_type", "tokenizer_model", "vocab_file", "merge_file", "split",
            "reset_position_ids", "reset_attention_mask", "eod_mask_loss",
        ),
    }
)  # fmt: skip
# Settings with an integer or a list for the layers.
PATTERNS = ("model.window_attn_skip_freq", "model.no_rope_freq")
# Settings with the name of a dtype, which is a dtype of torch there and has no effect without the flag.
STATE_DTYPES = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
STATE_DTYPES_FLAG = "use_precision_aware_optimizer"
# Beginnings of names that have no effect without FP8.
FP8_NAMES = ("fp8_", "first_last_layers_bf16", "num_layers_at_")
# Arguments of the model that have no setting here, and the values with which it is the plain one.
PLAIN_MODEL: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "num_experts": (None, 0), "mtp_num_layers": (None, 0), "multi_latent_attention": (False,),
        "apply_residual_connection_post_layernorm": (False,), "openai_gelu": (False,), "quick_geglu": (False,),
        "onnx_safe": (None, False), "softmax_type": ("vanilla",), "rope_type": (None, "rope"),
        "activation_func_clamp_value": (None,), "glu_linear_offset": (0.0,), "fp32_residual_connection": (False,),
        "hybrid_override_pattern": (None,), "hybrid_layer_pattern": (None,), "is_hybrid_model": (False,),
        "heterogeneous_layers_config_path": (None,), "heterogeneous_layers_config_encoded_json": (None,),
        "attention_output_gate": (False,), "experimental_attention_variant": (None,),
        "linear_attention_freq": (None, 0), "mrope_section": (None,), "use_mup": (False,), "spec": (None, ["local"]),
    }
)  # fmt: skip
# Settings of the model that are arguments with another name or value, or none that matters for a checkpoint.
OTHER_NAMES = ("model_preset", "share_embeddings_and_output_weights", "vocab_size", "padded_vocab_size",
               "add_position_embedding")  # fmt: skip
# Set in every checkpoint, and without a meaning for another program: layout of the job, progress, derived values.
SILENT = frozenset(
    [
        "encoder_num_layers", "encoder_seq_length", "add_position_embedding", "params_dtype",
        "untie_embeddings_and_output_weights", "vocab_size", "padded_vocab_size", "fp8", "iteration", "world_size",
        "consumed_train_samples", "consumed_valid_samples", "rank", "local_rank", "data_parallel_size",
        "transformer_pipeline_model_parallel_size", "total_parallel_size", "ckpt_format", "save", "load", "mock_data",
        "data_path", "save_interval", "transformer_impl", "attention_backend",
        "virtual_pipeline_model_parallel_size", "skipped_train_samples",
        "expert_model_parallel_size", "expert_tensor_parallel_size", "num_virtual_stages_per_pipeline_rank",
        "num_layers_per_virtual_pipeline_stage", "cuda_graph_impl", "distributed_backend", "cross_entropy_fusion_impl",
        "exit_signal", "activation_offload_fraction", "tiktoken_num_special_tokens",
        "torch_fsdp2_no_reshard_after_forward", "clone_scatter_output_in_embedding",
    ]
)  # fmt: skip


def settings_of_args(args: Mapping[str, Any]) -> tuple[dict[str, Any], list[str], list[str]]:
    """Translate Megatron-LM's arguments.

    Args:
        args: by name (`vars` of the namespace).

    Returns:
        Settings by name, problems, and the arguments that are set and were not read, as text.
    """
    tree: dict[str, dict[str, Any]] = {}
    is_fp8, skipped = args.get("fp8") is not None, without_effect(args)
    for section, fields in SAME_NAMES.items():
        for field in fields:
            if args.get(field) is not None and field not in skipped:
                tree.setdefault(section, {})[field] = as_setting(f"{section}.{field}", args[field])
    tied = args.get("untie_embeddings_and_output_weights")
    tree.setdefault("model", {})["share_embeddings_and_output_weights"] = not tied
    if is_fp8:
        tree.setdefault("precision", {})["fp8_format"] = args["fp8"]
    if isinstance(args.get("virtual_pipeline_model_parallel_size"), int):
        num_chunks = args["virtual_pipeline_model_parallel_size"]
        tree.setdefault("parallel", {})["num_virtual_stages_per_pipeline_rank"] = num_chunks
    if isinstance(args.get("vocab_size"), int):
        tree["model"]["vocab_size"] = args["vocab_size"] - counts_end_of_document(args)
    problems = [
        f"{flag_of(name)} {value}: there is no such model here"
        for name, allowed in PLAIN_MODEL.items()
        if (value := args.get(name, allowed[0])) not in allowed
    ]
    if args.get("position_embedding_type") == "yarn":
        problems.append("--position-embedding-type yarn: its settings are not converted")
    try:
        values = read_settings(json.dumps(tree, default=str))
    except ConfigError as error:
        return {}, [*problems, *error.problems], []
    read = {field for fields in SAME_NAMES.values() for field in fields} | SILENT | set(PLAIN_MODEL)
    return values, problems, unread_arguments(args, read)


def without_effect(args: Mapping[str, Any]) -> set[str]:
    """Return the arguments of `SAME_NAMES` that change nothing with the others.

    They are those of FP8, of a plain GELU, and of optimizer state.
    """
    names = {field for fields in SAME_NAMES.values() for field in fields}
    skipped = set() if args.get("fp8") is not None else {name for name in names if name.startswith(FP8_NAMES)}
    skipped |= set() if args.get(STATE_DTYPES_FLAG) else set(STATE_DTYPES)
    has_other_activation = bool(args.get("swiglu") or args.get("squared_relu"))
    return skipped | ({"bias_gelu_fusion"} if has_other_activation or args.get("add_bias_linear") is False else set())


def as_setting(name: str, value: Any) -> Any:
    """Return a value in the type of a setting: Megatron-LM has some whole numbers as floats, and patterns as lists."""
    if isinstance(value, torch.dtype):
        return next((name for name, dtype in DTYPES.items() if dtype is value), str(value))
    if name == "model.window_size" and isinstance(value, (tuple, list)):
        return ",".join(map(str, value))
    if name in PATTERNS and isinstance(value, (int, tuple, list)):
        return str(list(value) if isinstance(value, tuple) else value) if value else None
    if settings_by_name()[name].many and isinstance(value, (tuple, list)):  # texts in the command line's form
        return [int(each) if isinstance(each, str) and each.isascii() and each.isdecimal() else each for each in value]
    is_whole = isinstance(value, float) and value.is_integer() and settings_by_name()[name].type is int
    return int(value) if is_whole else value


def unexpressed_settings(model: ModelConfig) -> list[str]:
    """Return the settings of the model that Megatron-LM does not have or that are not converted, as flags."""
    problems = [
        f"{setting.as_flag(value)}: not converted to Megatron-LM"
        for setting in settings_by_name().values()
        if setting.section == "model" and setting.field not in (*SAME_NAMES["model"], *OTHER_NAMES)
        and (value := getattr(model, setting.field)) != setting.default
        # GELU fused with a bias, Megatron-LM's default, is this approximation.
        and not (setting.field == "openai_gelu" and model.add_bias_linear)
    ]  # fmt: skip
    if model.position_embedding_type == "yarn":
        problems.append("--position-embedding-type yarn: not converted to Megatron-LM")
    return problems


def counts_end_of_document(args: Mapping[str, Any]) -> bool:
    """Return whether `vocab_size` includes NullTokenizer's end-of-document id, as in some versions of Megatron-LM.

    Here the setting does not include it. The embedding then has no row for one more id.
    """
    rows, is_null = args.get("padded_vocab_size"), args.get("tokenizer_type") == "NullTokenizer"
    return is_null and isinstance(rows, int) and args["vocab_size"] >= rows


def args_of_settings(config: RunConfig, values: Mapping[str, Any]) -> argparse.Namespace:
    """Return Megatron-LM's arguments for a run's settings.

    Args:
        values: of arguments that are not settings, such as `iteration`.
    """
    named = {
        field: value_of(config, f"{section}.{field}") for section, fields in SAME_NAMES.items() for field in fields
    }
    plain = {name: allowed[0] for name, allowed in PLAIN_MODEL.items()}
    model = config.model
    for name in PATTERNS:
        field = name.removeprefix("model.")
        if named[field] is not None:
            pattern = attention_layers.parse_pattern(flag_of(field), named[field])
            named[field] = list(pattern) if isinstance(pattern, tuple) else pattern
    named |= {name: DTYPES[named[name]] for name in STATE_DTYPES}
    named |= {
        "rampup_batch_size": list(config.training.rampup_batch_size) or None,
        "rotary_base": int(model.rotary_base) if model.rotary_base == int(model.rotary_base) else model.rotary_base,
        "window_size": attention_layers.window_size(model),
        "ffn_hidden_size": dimensions.ffn_hidden_size(model),
        "kv_channels": dimensions.kv_channels(model),
        "encoder_num_layers": model.num_layers,
        "max_position_embeddings": model.max_position_embeddings or config.data.seq_length,
        "params_dtype": DTYPES[derived.params_dtype(config.precision)],
        "encoder_seq_length": config.data.seq_length,
        "add_position_embedding": True,  # also with rotary embeddings: False only with --no-position-embedding
        "untie_embeddings_and_output_weights": not model.share_embeddings_and_output_weights,
        "vocab_size": model.vocab_size,
        "fp8": config.precision.fp8_format,
        "num_layers_per_virtual_pipeline_stage": config.parallel.num_layers_per_virtual_pipeline_stage,
        "virtual_pipeline_model_parallel_size": stages.virtual_pipeline_size(config.model, config.parallel),
        "ckpt_format": "torch_dist",
        "no_save_optim": None,
        "no_save_rng": None,
        "data_parallel_random_init": False,
        "expert_model_parallel_size": 1,
        "transformer_impl": "transformer_engine",
    }
    return argparse.Namespace(**plain | named | dict(values))


def unread_arguments(args: Mapping[str, Any], read: Set[str]) -> list[str]:
    """Return the arguments that are not read and may matter, as `name = value`, sorted."""
    given = frozenset(flag_of(name) for name, value in args.items() if is_set(value))
    by_field = {setting.field: setting for setting in all_settings() if setting.section}
    off_flags = {flag for setting in all_settings() for flag in setting.off}
    return [
        f"{name} = {value}"
        for name, value in sorted(args.items())
        if name not in read and is_set(value)
        and not has_default(by_field.get(name), value)
        and not has_no_effect(name, value, given)
        and not is_on_by_default(name, value, off_flags)
    ]  # fmt: skip


def is_set(value: Any) -> bool:
    """Return whether an argument has a value other than off, none or zero."""
    return value is not None and value is not False and value not in (0, "", [], ())


def flag_of(name: str, prefix: str = "") -> str:
    """Return the flag of an argument: `--no-rope-fusion` of `rope_fusion` and the prefix `no_`."""
    return "--" + (prefix + name).replace("_", "-")


def has_default(setting: Setting | None, value: Any) -> bool:
    """Return whether a value is the default of a setting. Megatron-LM has some as lists of one."""
    if setting is None:
        return False
    values = value if isinstance(value, (list, tuple)) else [value]
    defaults = setting.default if setting.many else (setting.default,)
    return [str(each) for each in values] == [str(each) for each in defaults]


def has_no_effect(name: str, value: Any, given: Set[str]) -> bool:
    """Return whether megafp8 accepts the flag and ignores it.

    Args:
        given: flags of all arguments that are set.
    """
    verdict = megatron_flags.classify(flag_of(name), [] if value is True else [str(value)], given)
    return verdict is not None and verdict.accepted


def is_on_by_default(name: str, value: Any, off_flags: Set[str]) -> bool:
    """Return whether an argument is on and has a flag that turns it off."""
    turned_off = [flag_of(name, prefix) for prefix in ("no_", "disable_")]
    return value is True and any(flag in off_flags or megatron_flags.classify(flag, []) for flag in turned_off)
