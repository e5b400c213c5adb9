"""Builds megatron-core's configuration objects from a `RunConfig`.

megatron-core adjusts some fields when it builds an object. Every field is compared with the requested value afterwards,
and a changed one is an error.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from typing import Any, Optional

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallelConfig, TorchFullyShardedDataParallelConfig
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.enums import AttnBackend, CudaGraphScope
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_config import TransformerConfig

from megafp8.config import attention_layers, derived, dimensions, mixture
from megafp8.config.activations import is_gated, is_plain_swiglu
from megafp8.config.layer_backends import LayerBackend
from megafp8.config.mup import without_mup
from megafp8.config.optimizers import has_flat_shards, updates_matrices
from megafp8.config.schema import ModelConfig, ParallelConfig, RunConfig
from megafp8.config.stages import virtual_pipeline_size
from megafp8.errors import ConfigError
from megafp8.mcore.latent_attention import config_class, latent_fields
from megafp8.mcore.multi_token import multi_token_fields
from megafp8.mcore.nccl_buffers import ddp_fields
from megafp8.mcore.overrides import DTYPES, fp4_weight_problems, parsed_overrides
from megafp8.mcore.patches import is_installed

# ---- Fields of megatron-core's configuration for mixture-of-experts layers ------------------------------------------

SAME_NAME_IN_MODEL = (
    "moe_shared_expert_intermediate_size", "moe_shared_expert_gate", "moe_router_topk", "moe_z_loss_coeff",
    "moe_input_jitter_eps", "moe_router_score_function", "moe_router_pre_softmax", "moe_router_topk_scaling_factor",
    "moe_router_enable_expert_bias", "moe_router_bias_update_rate", "moe_router_num_groups", "moe_router_group_topk",
    "moe_router_force_load_balancing", "moe_pad_expert_input_to_capacity",
    "moe_token_drop_policy", "moe_apply_probs_on_input",
)  # fmt: skip
SAME_NAME_IN_PARALLEL = (
    "expert_model_parallel_size", "moe_flex_dispatcher_backend", "moe_shared_expert_overlap",
)  # fmt: skip


def mixture_fields(config: RunConfig, implementation: LayerBackend) -> dict[str, Any]:
    """The fields of experts; empty for a dense model.

    Args:
        implementation: layers without fused kernels and grouped GEMMs have the same results.
    """
    model, parallel = config.model, config.parallel
    if not mixture.is_mixture(model):
        return {}
    has_fused_kernels = implementation.has_fused_kernels
    types, coefficients = mixture.balancing_fields(model)
    return {
        **{name: getattr(model, name) for name in SAME_NAME_IN_MODEL},
        **{name: getattr(parallel, name) for name in SAME_NAME_IN_PARALLEL},
        **_num_sms(parallel),
        "num_moe_experts": model.num_experts,
        "moe_expert_capacity_factor": model.moe_expert_capacity_factor if mixture.has_capacity(model) else None,
        "expert_tensor_parallel_size": mixture.expert_tensor_size(parallel),
        # `PeerMoELayer` has no dispatcher, but megatron-core's layer builds one.
        "moe_token_dispatcher_type": mixture.token_dispatcher(config).replace(mixture.PEER, "alltoall"),
        "moe_layer_freq": [int(has_experts) for has_experts in mixture.expert_layers(model)],
        "moe_ffn_hidden_size": mixture.moe_ffn_hidden_size(model),
        "moe_router_load_balancing_type": types,
        "moe_aux_loss_coeff": coefficients,
        "moe_router_dtype": mixture.router_dtype(model),
        "moe_grouped_gemm": has_fused_kernels and parallel.moe_grouped_gemm,
        "moe_permute_fusion": has_fused_kernels and parallel.moe_permute_fusion,
        "moe_router_fusion": has_fused_kernels and parallel.moe_router_fusion,
        "moe_router_padding_for_quantization": (
            not implementation.pads_expert_tokens and model.moe_router_padding_for_quantization
        ),
    }


def _num_sms(parallel: ParallelConfig) -> dict[str, int]:
    """The SMs of the flex dispatcher's library, if they are given."""
    if parallel.moe_flex_dispatcher_num_sms is None:
        return {}
    name = (
        f"moe_{parallel.moe_flex_dispatcher_backend}_num_sms"
        if is_installed("<0.19")
        else "moe_flex_dispatcher_num_sms"
    )
    return {name: parallel.moe_flex_dispatcher_num_sms}


# ---- Fields of megatron-core's configuration for activations that are recomputed or offloaded to the host -----------


def recompute_fields(config: RunConfig, implementation: LayerBackend) -> dict[str, Any]:
    """Fields of activation recomputation.

    Args:
        implementation: only experts with fused kernels recompute their activation; runs on other layers are refused
            with it.
    """
    training = config.training
    granularity = derived.recompute_granularity(training)
    if granularity is None:
        return {}
    fields: dict[str, Any] = {
        "recompute_granularity": granularity,
        "recompute_method": training.recompute_method,
        "recompute_num_layers": training.recompute_num_layers,
        "distribute_saved_activations": training.distribute_saved_activations,
    }
    if granularity == "selective":
        left_out = () if implementation.has_fused_kernels else ("moe_act",)
        fields["recompute_modules"] = [each for each in derived.recompute_modules(training) if each not in left_out]
    return fields


def offloading_fields(config: RunConfig) -> dict[str, Any]:
    """Fields of activation offloading, which megatron-core's layers and schedules do."""
    training = config.training
    if not training.fine_grained_activation_offloading:
        return {}
    return {
        "fine_grained_activation_offloading": True,
        "offload_modules": list(training.offload_modules),
        "min_offloaded_tensor_size": training.min_offloaded_tensor_size,
    }


# ---- Fields of megatron-core's `TransformerConfig` for attention and position embeddings ----------------------------


def attention_fields(model: ModelConfig) -> dict[str, Any]:
    """Fields for windows, softmax, query and key norms, and layers without rotary embedding."""
    windowed, without_rope = attention_layers.windowed_layers(model), attention_layers.layers_without_rope(model)
    has_pattern = any(windowed) and not all(windowed)
    return {
        "window_size": attention_layers.window_size(model) if any(windowed) else None,
        "window_attn_skip_freq": [int(each) for each in windowed] if has_pattern else None,
        "softmax_type": model.softmax_type,
        # With it megatron-core sums the gradients of these norms over the tensor-parallel ranks, which is wrong for a
        # weight that they share (`models/layer_specs.py`). It reads the field for nothing else.
        "qk_layernorm": model.qk_layernorm and not model.qk_layernorm_across_heads,
        "qk_l2_norm": model.qk_l2_norm,
        "no_rope_freq": [int(each) for each in without_rope] or None,
        "rotary_interleaved": model.rotary_interleaved,
    }


def yarn_attributes(model: ModelConfig) -> dict[str, Any]:
    """Attributes of a `TransformerConfig` that megatron-core reads for YaRN, although it declares no such fields."""
    if model.position_embedding_type != "yarn":
        return {}
    return {
        "yarn_rotary_scaling_factor": model.rotary_scaling_factor,
        "yarn_original_max_position_embeddings": model.yarn_original_max_position_embeddings,
        "yarn_beta_fast": model.yarn_beta_fast,
        "yarn_beta_slow": model.yarn_beta_slow,
        "yarn_mscale": model.mscale,
        "yarn_mscale_all_dim": model.mscale_all_dim,
        "yarn_correction_range_round_to_int": model.yarn_correction_range_round_to_int,
    }


# ----------------------------------------------------------------------------------------------------------------------

OVERRIDABLE_CONFIGS = {
    "transformer": TransformerConfig,
    "ddp": DistributedDataParallelConfig,
    "optimizer": OptimizerConfig,
}
"""The configuration classes that `--override` can set fields of, by section name."""


def leave_uninitialized(tensor: torch.Tensor) -> torch.Tensor:
    """An init method that does nothing: `models.initialization` fills all parameters."""
    return tensor


def build_transformer_config(config: RunConfig, implementation: LayerBackend, on_cuda: bool) -> TransformerConfig:
    """Build the model configuration of one rank.

    Args:
        implementation: the layers to build.
        on_cuda: selects fused kernels and the device of new parameters.

    Raises:
        ConfigError: megatron-core rejects or changes a value.
    """
    fields = {
        **shape_fields(config),
        **parallel_fields(config),
        **precision_fields(config, implementation),
        **kernel_fields(config, implementation, on_cuda),
        **recompute_fields(config, implementation),
        **offloading_fields(config),
        **mixture_fields(config, implementation),
        **latent_fields(config.model),
        **multi_token_fields(config.model),
    }
    # Layers read this when they are built. Delayed scaling needs it for one update of its scales per step.
    fields["calculate_per_token_loss"] = True
    fields |= parsed_overrides(config.overrides, "transformer", TransformerConfig)
    has_shards = has_flat_shards(config.optimizer, config.parallel)
    problems = unsafe_override_problems(fields) + fp4_weight_problems(config.overrides, fields, has_shards)
    if problems:
        raise ConfigError(problems)
    built: TransformerConfig = build_checked(config_class(config.model), fields)
    for name, value in yarn_attributes(config.model).items():
        setattr(built, name, value)
    return built


def unsafe_override_problems(fields: Mapping[str, Any]) -> list[str]:
    """Problems of combinations that only `--override` allows, and that train wrongly without an error."""
    chunks, stages = fields["virtual_pipeline_model_parallel_size"], fields["pipeline_model_parallel_size"]
    checks = (
        (
            chunks is not None and stages == 2 and fields["batch_p2p_comm"],
            "transformer.batch_p2p_comm=True with two interleaved stages: the messages between them are mixed up",
        ),
        (
            fields["overlap_p2p_comm"] and fields["deallocate_pipeline_outputs"],
            "transformer.deallocate_pipeline_outputs=True with overlapped messages: outputs are freed while being sent",
        ),
        (
            fields["batch_p2p_sync"] and full_iteration_graph_fields().items() <= fields.items(),
            "transformer.batch_p2p_sync=True with a CUDA graph: the host cannot wait during its capture",
        ),
        (
            not fields["perform_initialization"],
            "transformer.perform_initialization=False: split weights go unmarked, and the gradient norm is wrong",
        ),
    )
    return [f"--override {text}; leave it out" for is_wrong, text in checks if is_wrong]


def shape_fields(config: RunConfig) -> dict[str, Any]:
    """Fields of the model architecture."""
    model = without_mup(config.model)
    return {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": dimensions.ffn_hidden_size(model),
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": dimensions.num_query_groups(model),
        "kv_channels": dimensions.kv_channels(model),
        "normalization": model.normalization,
        "layernorm_epsilon": model.norm_epsilon,
        "layernorm_zero_centered_gamma": model.apply_layernorm_1p,
        "gated_linear_unit": is_gated(model),
        "activation_func": activation_function(model),
        "activation_func_clamp_value": model.activation_func_clamp_value,
        "glu_linear_offset": model.glu_linear_offset,
        "add_bias_linear": model.add_bias_linear,
        "add_qkv_bias": model.add_qkv_bias,
        **attention_fields(model),
        "attention_dropout": model.attention_dropout,
        "hidden_dropout": model.hidden_dropout,
        "softmax_scale": model.softmax_scale,
        "attention_softmax_in_fp32": derived.softmax_in_fp32(model),
        "apply_query_key_layer_scaling": model.apply_query_key_layer_scaling,
        "init_method_std": model.init_method_std,
        "embedding_init_method_std": model.embedding_init_method_std,
        "init_method": leave_uninitialized,
        "output_layer_init_method": leave_uninitialized,
        "embedding_init_method": leave_uninitialized,
        "perform_initialization": True,
    }


def activation_function(model: ModelConfig) -> Callable[[torch.Tensor], torch.Tensor]:
    """The activation of the MLP; with a gated unit that of the gate."""
    if model.swiglu:
        return F.silu
    if model.quick_geglu:
        return quick_gelu
    if model.squared_relu:
        return squared_relu
    return tanh_gelu if model.openai_gelu or model.geglu else F.gelu


def tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU with the tanh approximation, as the fused kernel computes it."""
    return F.gelu(x, approximate="tanh")


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """ReLU squared (So et al. 2021, Primer)."""
    return torch.pow(F.relu(x), 2)


def parallel_fields(config: RunConfig) -> dict[str, Any]:
    """Fields of model parallelism and pipeline communication."""
    parallel = config.parallel
    stages, chunks = parallel.pipeline_model_parallel_size, virtual_pipeline_size(config.model, parallel)
    overlap = chunks is not None and parallel.overlap_p2p_comm
    return {
        "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
        "pipeline_model_parallel_size": stages,
        "virtual_pipeline_model_parallel_size": chunks,
        "num_layers_in_first_pipeline_stage": parallel.decoder_first_pipeline_num_layers,
        "num_layers_in_last_pipeline_stage": parallel.decoder_last_pipeline_num_layers,
        "account_for_embedding_in_pipeline_split": parallel.account_for_embedding_in_pipeline_split,
        "account_for_loss_in_pipeline_split": parallel.account_for_loss_in_pipeline_split,
        "pipeline_model_parallel_layout": layer_layout(parallel),
        "microbatch_group_size_per_vp_stage": parallel.microbatch_group_size_per_virtual_pipeline_stage,
        "context_parallel_size": parallel.context_parallel_size,
        "cp_comm_type": dimensions.cp_exchange(config),
        "hierarchical_context_parallel_sizes": list(parallel.hierarchical_context_parallel_sizes) or None,
        # Example scripts always give the flag; with one tensor-parallel rank it has no effect.
        "sequence_parallel": parallel.sequence_parallel and parallel.tensor_model_parallel_size > 1,
        "overlap_p2p_comm": overlap,
        "overlap_p2p_comm_warmup_flush": parallel.overlap_p2p_comm_warmup_flush,
        # With two interleaved stages, both neighbours of a rank are the same peer. Batched messages to it are matched
        # in posting order, which mixes them up: the loss is wrong and the gradients explode without an error.
        "batch_p2p_comm": not overlap and not (chunks is not None and stages == 2),
        # After batched messages megatron-core waits on the host, for torch before 2.0; a capture cannot.
        "batch_p2p_sync": not derived.uses_cuda_graph(config),
        # megatron-core frees a stage's output right after the send starts. With overlapped sends the buffer is reused
        # before the send has finished, and the next stage gets wrong values (fixed upstream after 0.16).
        "deallocate_pipeline_outputs": not overlap,
        "tp_comm_overlap": parallel.tp_comm_overlap,
        "tp_comm_overlap_ag": parallel.tp_comm_overlap_ag,
        "tp_comm_overlap_rs": parallel.tp_comm_overlap_rs,
        "tp_comm_overlap_rs_dgrad": parallel.tp_comm_overlap_rs_dgrad,
        "tp_comm_bulk_dgrad": parallel.tp_comm_bulk_dgrad,
        "tp_comm_bulk_wgrad": parallel.tp_comm_bulk_wgrad,
    }


def layer_layout(parallel: ParallelConfig) -> Optional[PipelineParallelLayerLayout]:
    """megatron-core's reading of --pipeline-model-parallel-layout; None without it.

    Raises:
        ConfigError: megatron-core refuses it.
    """
    text = parallel.pipeline_model_parallel_layout
    if text is None:
        return None
    try:
        return PipelineParallelLayerLayout.from_str(text, parallel.pipeline_model_parallel_size)
    except AssertionError as error:
        raise ConfigError(f"megatron-core refuses --pipeline-model-parallel-layout {text}: {error}") from error


def precision_fields(config: RunConfig, implementation: LayerBackend) -> dict[str, Any]:
    """Fields of precision. Those of FP8 and FP4 are for Transformer Engine; emulated layers do not use them."""
    precision = config.precision
    dtype = DTYPES[derived.params_dtype(precision)]
    fields: dict[str, Any] = {
        "bf16": precision.bf16,
        "fp16": precision.fp16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "transformer_impl": implementation.megatron_impl,
    }
    if not implementation.is_quantized_by_megatron:
        return fields
    if precision.fp8_format is not None:
        fields |= {
            "fp8": precision.fp8_format,
            "fp8_recipe": precision.fp8_recipe,
            "fp8_margin": precision.fp8_margin,
            "fp8_amax_history_len": precision.fp8_amax_history_len,
            "fp8_amax_compute_algo": precision.fp8_amax_compute_algo,
            "tp_only_amax_red": precision.tp_only_amax_red,
            "fp8_param": precision.fp8_param_gather and not config.parallel.shards_weights,
            "fp8_dot_product_attention": precision.fp8_dot_product_attention,
        }
    if precision.fp4_format is not None:
        fields |= {"fp4": precision.fp4_format, "fp4_recipe": precision.fp4_recipe}
    if derived.quantization_recipe(precision) is not None:
        fields |= {
            "first_last_layers_bf16": precision.first_last_layers_bf16,
            "num_layers_at_start_in_bf16": precision.num_layers_at_start_in_bf16,
            "num_layers_at_end_in_bf16": precision.num_layers_at_end_in_bf16,
        }
    return fields


def kernel_fields(config: RunConfig, implementation: LayerBackend, on_cuda: bool) -> dict[str, Any]:
    """Fields that select kernels. Fusions that need a GPU are off on a CPU, with the same results."""
    precision, model = config.precision, config.model
    activation = activation_function(model)
    # As in Megatron-LM, GELU is only fused together with its bias. The fused SwiGLU has neither clamp nor offset.
    bias_activation = (is_plain_swiglu(model) and precision.bias_swiglu_fusion) or (
        activation is F.gelu and precision.bias_gelu_fusion and model.add_bias_linear
    )
    backend = "local" if implementation.has_torch_attention else precision.attention_backend
    fields: dict[str, Any] = {
        "use_cpu_initialization": not on_cuda,
        "attention_backend": AttnBackend[backend],
        "bias_activation_fusion": on_cuda and bias_activation,
        "bias_dropout_fusion": on_cuda and precision.bias_dropout_fusion,
        "masked_softmax_fusion": on_cuda and precision.masked_softmax_fusion,
        "apply_rope_fusion": (
            on_cuda
            and precision.apply_rope_fusion
            and model.position_embedding_type == "rope"
            and (implementation.has_fused_kernels or has_rope_kernel())
        ),
        "cross_entropy_loss_fusion": bool(precision.cross_entropy_loss_fusion),
        "cross_entropy_fusion_impl": precision.cross_entropy_fusion_impl or "native",
        # `models.builder` sets it on each layer that supports it; set here, the output layer would require Apex.
        "gradient_accumulation_fusion": False,
        "deterministic_mode": precision.deterministic_mode,
    }
    if derived.uses_cuda_graph(config):
        fields |= full_iteration_graph_fields()
    if activation is F.gelu and bias_activation and not on_cuda:
        fields["activation_func"] = tanh_gelu
    return fields


def full_iteration_graph_fields() -> dict[str, Any]:
    """Fields for a CUDA graph of the complete iteration, which megafp8 captures.

    megatron-core itself then only skips a gradient check of its loss that synchronizes.
    """
    if is_installed("<0.19"):
        return {"cuda_graph_scope": [CudaGraphScope.full_iteration]}
    return {"cuda_graph_impl": "full_iteration"}


def has_rope_kernel() -> bool:
    """Whether megatron-core found Transformer Engine's fused rotary embedding, which works with all layers."""
    from megatron.core.models.common.embeddings import rope_utils

    return rope_utils.fused_apply_rotary_pos_emb is not None


def build_ddp_config(config: RunConfig) -> DistributedDataParallelConfig:
    """Build the configuration of gradient buffers and their reduction."""
    parallel, precision = config.parallel, config.precision
    fields = {
        "grad_reduce_in_fp32": derived.grad_dtype(precision) == "fp32",
        "overlap_grad_reduce": bool(parallel.overlap_grad_reduce),
        "overlap_param_gather": bool(parallel.overlap_param_gather),
        "use_distributed_optimizer": has_flat_shards(config.optimizer, config.parallel),
        "bucket_size": parallel.ddp_bucket_size,
        **ddp_fields(parallel),
        "fp8_param_gather": precision.fp8_param_gather,
    }
    fields |= parsed_overrides(config.overrides, "ddp", DistributedDataParallelConfig)
    if parallel.shards_weights:
        fields["reshard_after_forward"] = not parallel.keeps_gathered
        return build_checked(TorchFullyShardedDataParallelConfig, fields)
    return build_checked(DistributedDataParallelConfig, fields)


def build_optimizer_config(config: RunConfig, implementation: LayerBackend) -> OptimizerConfig:
    """Build the optimizer configuration. Schedules are in `optimizer.schedules`."""
    optimizer, parallel, precision = config.optimizer, config.parallel, config.precision
    # With a recipe but no FP8 weights, it would keep FP32 master weights where 16-bit remainders suffice.
    has_fp8_weights = implementation.is_quantized_by_megatron and precision.fp8_param_gather
    fields = {
        # `optimizer.build` replaces the torch optimizer inside.
        "optimizer": "adam" if updates_matrices(optimizer) else optimizer.optimizer,
        "lr": optimizer.lr,
        "min_lr": optimizer.min_lr,
        "decoupled_lr": optimizer.decoupled_lr,
        "decoupled_min_lr": optimizer.decoupled_min_lr,
        "weight_decay": optimizer.weight_decay,
        "bf16": precision.bf16,
        "fp16": precision.fp16,
        "params_dtype": DTYPES[derived.params_dtype(precision)],
        "loss_scale": optimizer.loss_scale,
        "initial_loss_scale": optimizer.initial_loss_scale,
        "min_loss_scale": optimizer.min_loss_scale,
        "loss_scale_window": optimizer.loss_scale_window,
        "hysteresis": optimizer.hysteresis,
        "adam_beta1": optimizer.adam_beta1,
        "adam_beta2": optimizer.adam_beta2,
        "adam_eps": optimizer.adam_eps,
        "sgd_momentum": optimizer.sgd_momentum,
        "clip_grad": optimizer.clip_grad,
        "use_distributed_optimizer": has_flat_shards(config.optimizer, config.parallel),
        "overlap_param_gather": bool(parallel.overlap_param_gather),
        "log_num_zeros_in_grad": config.logging.log_num_zeros_in_grad,
        "fp8_recipe": precision.fp8_recipe if has_fp8_weights else None,
    }
    if implementation.has_low_precision_optimizer:  # else `optimizer.emulated_state` rounds the state
        fields |= {
            "use_precision_aware_optimizer": bool(optimizer.use_precision_aware_optimizer),
            "main_grads_dtype": DTYPES[optimizer.main_grads_dtype],
            "main_params_dtype": DTYPES[optimizer.main_params_dtype],
            "exp_avg_dtype": DTYPES[optimizer.exp_avg_dtype],
            "exp_avg_sq_dtype": DTYPES[optimizer.exp_avg_sq_dtype],
        }
        if has_fp8_weights:
            # An FP8 weight has no upper half of its master weight, which the 16-bit remainder would complete.
            fields["store_param_remainders"] = False
    return build_checked(OptimizerConfig, fields | parsed_overrides(config.overrides, "optimizer", OptimizerConfig))


def build_checked(kind: type, fields: Mapping[str, Any]) -> Any:
    """Build a megatron-core configuration and check that it kept all requested values.

    Raises:
        ConfigError: it rejects or changes a value.
    """
    try:
        built = kind(**fields)
    except (ValueError, AssertionError, TypeError, RuntimeError) as error:
        raise ConfigError(f"megatron-core's {kind.__name__} refuses the configuration: {fault_text(error)}") from error
    changed = [
        f"megatron-core's {kind.__name__} changed {name} from {requested!r} to {getattr(built, name)!r}"
        for name, requested in fields.items()
        if requested is not None and getattr(built, name) != requested
    ]
    if changed:
        raise ConfigError(changed)
    return built


def fault_text(error: Exception) -> str:
    """The message of an error; of an assertion without one, its source line."""
    if str(error):
        return str(error)
    line = traceback.extract_tb(error.__traceback__)[-1].line
    return f"{type(error).__name__} in {line!r}"


def override_problems(config: RunConfig) -> list[str]:
    """Problems of all `--override` entries: unknown fields, fields with a flag, and values of a wrong type."""
    problems: list[str] = []
    for section, kind in OVERRIDABLE_CONFIGS.items():
        try:
            parsed_overrides(config.overrides, section, kind)
        except ConfigError as error:
            problems += error.problems
    return problems
