"""Parses `--override SECTION.FIELD=VALUE`, which sets fields of megatron-core's configuration that have no flag.

A field that a flag sets is refused: the run would differ from its recorded configuration, its memory estimate and its
checks.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import enum
import typing
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Optional

import torch
from megatron.core.distributed import DistributedDataParallelConfig

from megafp8.config import megatron_flags
from megafp8.config.settings import all_settings
from megafp8.errors import ConfigError
from megafp8.mcore.patches import core_version, is_installed

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.uint8}

# Fields that are set by a flag with another name.
FLAG_OF_FIELD: Mapping[str, str] = MappingProxyType({
    "layernorm_epsilon": "--norm-epsilon",
    "num_moe_experts": "--num-experts",
    "moe_deepep_num_sms": "--moe-flex-dispatcher-num-sms",
    "moe_hybridep_num_sms": "--moe-flex-dispatcher-num-sms",
    "moe_router_padding_for_fp8": "--moe-router-padding-for-fp8",
    "layernorm_zero_centered_gamma": "--apply-layernorm-1p",
    "gated_linear_unit": "--swiglu",
    "activation_func": "--swiglu or --squared-relu",
    "virtual_pipeline_model_parallel_size": "--num-layers-per-virtual-pipeline-stage",
    "num_layers_in_first_pipeline_stage": "--decoder-first-pipeline-num-layers",
    "num_layers_in_last_pipeline_stage": "--decoder-last-pipeline-num-layers",
    "microbatch_group_size_per_vp_stage": "--microbatch-group-size-per-virtual-pipeline-stage",
    "params_dtype": "--bf16 or --fp16",
    "pipeline_dtype": "--bf16 or --fp16",
    "fp8": "--fp8-format",
    "fp8_param": "--fp8-param-gather",
    "fp4": "--fp4-format",
    "grad_reduce_in_fp32": "--grad-reduce-in-bf16",
    "bucket_size": "--ddp-bucket-size",
    "average_in_collective": "--ddp-average-in-collective",
    "bias_activation_fusion": "--no-bias-swiglu-fusion or --no-bias-gelu-fusion",
})  # fmt: skip

# Prefixes of the fields of unsupported features, with the flag whose refusal gives the reason.
REFUSED_PREFIXES: tuple[tuple[str, str], ...] = (
    ("moe_", "--moe-use-grouped-tensor"),
    ("mtp_standalone", "--mtp-standalone"),
)

_SCHEDULE = "megatron-core's schedule that overlaps the exchange of tokens is not used; leave it out"
_FUSED_GROUPED_MLP = "the fused grouped MLP of megatron-core 0.19, for Blackwell, is not used; leave it out"

# Fields of megatron-core's own training loop, schedules, optimizer step and MLPs. megafp8 has its own.
WITHOUT_EFFECT: Mapping[str, str] = MappingProxyType({
    "overlap_moe_expert_parallel_comm": _SCHEDULE,
    "ep_overlap_early_attn_memory_release": _SCHEDULE,
    "delay_wgrad_compute": _SCHEDULE,  # without the schedule no weight gradient would be computed
    "optimizer_cuda_graph": "megafp8's optimizer step is not captured in a CUDA graph; leave it out",
    "grad_norm_skip_threshold": "megafp8's optimizer step does not read it; use --spike-policy skip",
    "moe_mlp_glu_interleave_size": _FUSED_GROUPED_MLP,
    "moe_shared_expert_glu_interleave_size": _FUSED_GROUPED_MLP,
    "use_grouped_gemm_for_dense_mlp": _FUSED_GROUPED_MLP,
    "use_grouped_gemm_for_shared_expert": _FUSED_GROUPED_MLP,
})  # fmt: skip

# All other fields of megatron-core 0.19 that 0.16 does not have.
FIELDS_OF_0_19 = frozenset((
    "activation_offload_fraction", "adaptive_muon_beta2", "adaptive_muon_eps", "adaptive_muon_moment2_method",
    "cpu_offloading_retain_pinned_cpu_buffers", "cuda_graph_modules", "delay_offload_until_cuda_graph",
    "delta_offload_bytes_across_pp_ranks", "dsa_indexer_k_norm_epsilon", "dsa_indexer_k_norm_fp32",
    "dsa_indexer_rope_interleaved", "dsa_indexer_rotate_activation", "dsa_indexer_scoring_relu",
    "dsa_indexer_skip_topk_offset", "dsa_indexer_topk_freq", "dsa_kernel_backend",
    "experimental_attention_variant_loss_scale_func", "expert_gtp_weight_remat_size",
    "expert_tensor_parallel_num_weight_shards", "fine_grained_offloading_max_inflight_offloads",
    "flash_attention_version", "fp4_param_gather", "fp8_output_proj", "fsdp_all_gather_in_start_param_sync",
    "fsdp_db_use_persist_buf_on_alloc_fail", "fused_residual_rmsnorm", "gtp_weight_remat_size",
    "high_priority_a2a_comm_stream", "inference_cuda_graph_scope", "inference_disable_triton_nvls_kernels",
    "inference_grouped_gemm_backend", "inference_moe_disable_fused_quant_kernels",
    "inference_moe_token_dispatcher_type", "lion_beta1", "lion_beta2", "mamba_training_ssm_states_dtype",
    "megatron_fsdp_cuda_graph_mode", "megatron_fsdp_enable_fine_grained_param_gather",
    "megatron_fsdp_grad_comm_dtype", "megatron_fsdp_main_grads_dtype", "megatron_fsdp_main_params_dtype",
    "megatron_fsdp_max_pool_double_buffer", "megatron_fsdp_use_decoupled_grad", "mlp_chunks_for_training",
    "moe_expert_rank_capacity_factor", "moe_flex_dispatcher_num_sms", "moe_grad_scale_func",
    "moe_hybridep_num_blocks_permute", "moe_hybridep_num_blocks_unpermute", "moe_hybridep_num_sms_preprocessing",
    "moe_hybridep_pad_uneven_dispatch_inputs", "moe_ncclep_static_shape", "moe_ncclep_zero_copy",
    "moe_pad_experts_for_cuda_graph_inference", "moe_paged_stash", "moe_paged_stash_buffer_size_factor_cpu",
    "moe_paged_stash_buffer_size_factor_cuda", "moe_paged_stash_page_size", "moe_permute_fusion_into_hybridep",
    "moe_router_force_biased", "moe_router_quantile_balancing_ema", "moe_single_grouped_bias",
    "moe_single_grouped_weight", "mtp_detach_heads", "mtp_grad_scale_func", "mtp_hybrid_override_pattern",
    "mtp_use_repeated_layer", "muon_coefficient_type", "muon_nesterov", "muon_scalar_optimizer",
    "mup_attn_scale_power", "mup_base_head_dim", "mup_base_hidden_size", "mup_embedding_mult", "mup_output_mult",
    "mup_width_mult", "nccl_all_reduce_for_prefill", "num_buckets", "overlap_dispatch_backward_with_experts_wgrad",
    "param_name_patterns_for_fp32_local_accumulation", "soap_precondition_frequency", "soap_shampoo_beta",
    "soap_use_kl_shampoo", "tensor_parallel_num_weight_shards", "use_layer_wise_distributed_optimizer", "use_mup",
    "use_transformer_engine_op_fuser",
))  # fmt: skip


def parsed_overrides(entries: Iterable[str], section: str, kind: type) -> dict[str, Any]:
    """The values of those `--override` entries that are of one section, converted to the types of their fields.

    Raises:
        ConfigError: lists all unknown fields, fields that a flag sets, fields of unsupported features, and values of a
            wrong type.
    """
    types = typing.get_type_hints(kind)
    fields = {field.name for field in dataclasses.fields(kind)}
    values: dict[str, Any] = {}
    problems: list[str] = []
    for entry in entries:
        path, _, text = entry.partition("=")
        owner, _, name = path.partition(".")
        if owner != section:
            continue
        known = name in fields or name in WITHOUT_EFFECT or name in FIELDS_OF_0_19
        reason = override_refusal(name) if known else None
        if reason is None and name not in fields:
            reason = unknown_field(kind, name)
        if reason is not None:
            problems.append(f"--override {entry}: {reason}")
            continue
        try:
            values[name] = parse_value(text, types[name])
        except ValueError:
            problems.append(f"--override {entry}: {text!r} is not of type {describe_type(types[name])}")
    if problems:
        raise ConfigError(problems)
    return values


def override_refusal(field: str) -> Optional[str]:
    """Why `--override` must not set a field, and which flag does; None if it may."""
    flag = FLAG_OF_FIELD.get(field) or next(
        ((setting.flags or setting.off)[0] for setting in all_settings() if setting.field in (field, f"use_{field}")),
        None,
    )
    if flag is not None:
        return f"{field} is set by {flag}: give that"
    if field in WITHOUT_EFFECT:
        return f"{field}: {WITHOUT_EFFECT[field]}"
    refused = next((flag for prefix, flag in REFUSED_PREFIXES if field.startswith(prefix)), None)
    return megatron_flags.refusal_reason(refused) if refused is not None else None


def unknown_field(kind: type, field: str) -> str:
    """The message for a field that a class of the installed megatron-core does not have."""
    text = f"megatron-core's {kind.__name__} has no field {field}"
    if field in FIELDS_OF_0_19:
        text += f": it was added in megatron-core 0.19, and {core_version()} is installed"
    return text


def fp4_weight_problems(entries: Iterable[str], fields: Mapping[str, Any], has_flat_shards: bool) -> list[str]:
    """Problems of FP4 weights, which two fields ask for: one of the model and one of the buffers.

    Args:
        entries: of `--override`.
        fields: of the model.
        has_flat_shards: the distributed optimizer divides a flat buffer over the ranks.
    """
    is_stored = fields.get("fp4_param", False)
    if is_installed("<0.19"):
        reason = f"its weights in FP4 were added in megatron-core 0.19, and {core_version()} is installed"
        return [f"--override transformer.fp4_param=True: {reason}"] if is_stored else []
    is_gathered = parsed_overrides(entries, "ddp", DistributedDataParallelConfig).get("fp4_param_gather", False)
    if is_stored == is_gathered and (not is_stored or has_flat_shards):
        return []
    together = "--override transformer.fp4_param=True ddp.fp4_param_gather=True --use-distributed-optimizer"
    return [f"weights in FP4: give {together}"]


def parse_value(text: str, target: Any) -> Any:
    """Parse a value of type `target`, such as `true`, `8`, `1e-5`, `none`, `[1, 2]`, `bf16` or `flash`.

    Raises:
        ValueError: the text is not of that type.
    """
    try:
        value: Any = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = {"true": True, "false": False, "none": None}.get(text.lower(), text)
    try:
        return convert_value(value, target)
    except ValueError:
        return convert_value(text, target)  # a string that looks like a number


def convert_value(value: Any, target: Any) -> Any:
    """Convert a Python value to an annotated type: integer to float, list to tuple, name to enum member or dtype.

    Raises:
        ValueError: the value cannot be converted.
    """
    origin, arguments = typing.get_origin(target), typing.get_args(target)
    if origin is typing.Union:
        for choice in arguments:
            with contextlib.suppress(ValueError):
                return convert_value(value, choice)
    elif origin is typing.Literal and value in arguments:
        return value
    elif origin in (list, tuple) and isinstance(value, (list, tuple)):
        kinds = arguments if origin is tuple else arguments * len(value)
        if len(kinds) == len(value):
            return origin(convert_value(item, kind) for item, kind in zip(value, kinds, strict=True))
    elif target is torch.dtype and str(value) in DTYPES:
        return DTYPES[value]
    elif isinstance(target, type) and issubclass(target, enum.Enum) and str(value) in target.__members__:
        return target[value]
    elif target is float and type(value) is int:
        return float(value)
    elif target in (int, float, bool, str, type(None)) and type(value) is target:
        return value
    raise ValueError(f"{value!r} is not of type {target}")


def describe_type(target: Any) -> str:
    """Name of a type for a message, with its values for dtypes and enums."""
    if target is torch.dtype:
        return f"dtype ({', '.join(DTYPES)})"
    if isinstance(target, type) and issubclass(target, enum.Enum):
        return f"{target.__name__} ({', '.join(target.__members__)})"
    return target.__name__ if isinstance(target, type) else str(target).replace("typing.", "")
