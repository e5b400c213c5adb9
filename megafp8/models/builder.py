"""Builds the model chunks of one rank, their gradient buffers, and the optimizer."""

from __future__ import annotations

from functools import partial
from typing import Any, Optional

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from megafp8.config import multi_token
from megafp8.config.layer_backends import LayerBackend
from megafp8.config.mixture import has_expert_ranks
from megafp8.config.mup import without_mup
from megafp8.config.schema import RunConfig
from megafp8.config.stages import virtual_pipeline_size
from megafp8.device.layer_support import ignore_attention_switches
from megafp8.fsdp.runtime import FsdpRuntime
from megafp8.mcore.config import build_ddp_config, build_optimizer_config
from megafp8.mcore.layer_runtime import LayerRuntime
from megafp8.mcore.mixture_patches import gather_weights_once
from megafp8.mcore.modules import mark_expert_weights
from megafp8.mcore.multi_token import MultiTokenGPT
from megafp8.models.initialization import initialize_parameters
from megafp8.models.layer_runtime import layer_runtime
from megafp8.models.layer_specs import chunk_layers
from megafp8.models.saved_activations import pack_saved_activations
from megafp8.optimizer.build import build
from megafp8.optimizer.data_parallel import DDP, runtime_of
from megafp8.quantization.fp8_parameter import quantize_assigned_weights


def build_model(
    config: RunConfig, transformer_config: TransformerConfig, implementation: LayerBackend, vocab_size: int
) -> list[torch.nn.Module]:
    """Build and initialize the model chunks of this pipeline rank; one chunk without the interleaved schedule.

    Args:
        implementation: the layers to build.
        vocab_size: padded size of the vocabulary.
    """
    if config.parallel.tp_comm_overlap:
        from megafp8.te import userbuffers  # needs Transformer Engine

        userbuffers.start(config, transformer_config.params_dtype)
    num_chunks = virtual_pipeline_size(config)
    stages: list[Optional[int]] = [None] if num_chunks is None else list(range(num_chunks))
    runtime = layer_runtime(implementation)
    chunks = [build_chunk(config, transformer_config, runtime, vocab_size, stage) for stage in stages]
    with runtime.writable_weights(config, chunks):
        initialize_parameters(chunks, transformer_config, config.training.seed, config.model.use_mup)
    if config.precision.gradient_accumulation_fusion:
        runtime.fuse_wgrad_accumulation(chunks)
    if config.precision.bf16 or config.precision.fp16:
        chunks = [Float16Module(transformer_config, chunk) for chunk in chunks]
    runtime.convert_weights(config, chunks)
    return chunks


def build_chunk(
    config: RunConfig,
    transformer_config: TransformerConfig,
    runtime: LayerRuntime,
    vocab_size: int,
    vp_stage: Optional[int],
) -> GPTModel:
    """Build one uninitialized chunk on this rank's device."""
    model = without_mup(config.model)
    positions = model.max_position_embeddings or config.data.seq_length
    assert positions is not None
    if transformer_config.attention_backend == AttnBackend.local:
        ignore_attention_switches()
    has_multi_token = multi_token.num_depths(model) > 0
    multi_token_spec = runtime.multi_token_spec(config, transformer_config, vp_stage) if has_multi_token else None
    layers = chunk_layers(config, transformer_config, vp_stage)
    chunk = (GPTModel if multi_token_spec is None else MultiTokenGPT)(
        config=transformer_config,
        transformer_layer_spec=runtime.block_spec(config, transformer_config, layers),
        vocab_size=vocab_size,
        max_sequence_length=positions,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        parallel_output=True,
        share_embeddings_and_output_weights=model.share_embeddings_and_output_weights,
        position_embedding_type=model.position_embedding_type,
        rotary_percent=model.rotary_percent,
        rotary_base=model.rotary_base,
        rope_scaling=model.use_rope_scaling,
        rope_scaling_factor=model.rope_scaling_factor,
        seq_len_interpolation_factor=model.rotary_seq_len_interpolation_factor,
        mtp_block_spec=multi_token_spec,
        vp_stage=vp_stage,
    )
    if hasattr(chunk, "embedding") and model.embedding_multiplier != 1:
        chunk.embedding.register_forward_hook(partial(multiply_embedding, model.embedding_multiplier))
    if not transformer_config.use_cpu_initialization:
        for module in chunk.modules():
            if isinstance(module, torch.nn.Embedding):
                module.cuda()  # megatron-core builds learned position embeddings on the host
    mark_expert_weights(chunk, has_expert_ranks(config))
    runtime.finish_chunk(config, chunk)
    for name, parameter in chunk.named_parameters():
        if name.endswith("softmax_offset"):
            # megatron-core does not mark it, and would leave other ranks' heads out of the gradient norm.
            set_tensor_model_parallel_attributes(parameter, True, 0, 1)
    if chunk.post_process and model.output_logit_softcapping is not None:
        chunk.output_layer.register_forward_hook(partial(cap_logits, model.output_logit_softcapping))
    if chunk.post_process and model.logits_scaling != 1:
        chunk.output_layer.register_forward_hook(partial(divide_logits, model.logits_scaling))
    pack_saved_activations(chunk, config.precision.fp8_saved_activations)
    return chunk


def cap_logits(
    limit: float, layer: torch.nn.Module, inputs: Any, output: tuple[torch.Tensor, Any]
) -> tuple[torch.Tensor, Any]:
    """Forward hook of the output layer: logits x become limit * tanh(x / limit), in their dtype."""
    logits, bias = output
    return limit * torch.tanh(logits / limit), bias


def multiply_embedding(factor: float, layer: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    """Forward hook of the embedding: its output times a factor, in its dtype."""
    return output * factor


def divide_logits(
    divisor: float, layer: torch.nn.Module, inputs: Any, output: tuple[torch.Tensor, Any]
) -> tuple[torch.Tensor, Any]:
    """Forward hook of the output layer: logits divided by a number, in their dtype."""
    logits, bias = output
    return logits / divisor, bias


def add_gradient_buffers(
    config: RunConfig,
    transformer_config: TransformerConfig,
    implementation: LayerBackend,
    chunks: list[torch.nn.Module],
) -> list[DistributedDataParallel]:
    """Wrap each chunk with its gradients and their data-parallel reduction."""
    runtime = FsdpRuntime() if config.parallel.shards_weights else DDP
    codes = partial(layer_runtime(implementation).codes_to_gather, config)
    return runtime.wrap(transformer_config, build_ddp_config(config), config.parallel, chunks, codes)


def build_optimizer(
    config: RunConfig,
    transformer_config: TransformerConfig,
    implementation: LayerBackend,
    chunks: list[DistributedDataParallel],
) -> MegatronOptimizer:
    """Build the optimizer, and set the functions that megatron-core's pipeline schedules call."""
    core_config = build_optimizer_config(config, implementation)
    optimizer = build(config, core_config, chunks)
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    gather_weights_once(parts)
    runtime_of(chunks[0]).finish_optimizers(parts)
    quantize_assigned_weights(chunks)  # after the master weights are copied
    transformer_config.grad_scale_func = optimizer.scale_loss
    transformer_config.finalize_model_grads_func = finalize_model_grads  # the fused Adam replaces it
    is_interleaved = len(chunks) > 1
    parallel = config.parallel
    transformer_config.no_sync_func = [chunk.no_sync for chunk in chunks] if is_interleaved else chunks[0].no_sync
    if is_interleaved and parallel.overlap_grad_reduce:
        transformer_config.grad_sync_func = [chunk.start_grad_sync for chunk in chunks]
    if is_interleaved and parallel.overlap_param_gather:
        transformer_config.param_sync_func = [chunk.start_param_sync for chunk in chunks]
    return optimizer
