"""Builds the model chunks of one rank."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any, Optional

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from megafp8.config import multi_token
from megafp8.config.layer_backends import LayerBackend
from megafp8.config.model_plan import ModelPlan
from megafp8.config.mup import without_mup
from megafp8.device.layer_support import ignore_attention_switches
from megafp8.mcore.layer_runtime import LayerRuntime
from megafp8.mcore.modules import mark_expert_weights
from megafp8.mcore.multi_token import MultiTokenGPT
from megafp8.models.initialization import initialize_parameters
from megafp8.models.layer_runtime import layer_runtime
from megafp8.models.layer_specs import chunk_layers
from megafp8.models.saved_activations import pack_saved_activations


def build_model(
    plan: ModelPlan, transformer_config: TransformerConfig, implementation: LayerBackend, vocab_size: int
) -> list[torch.nn.Module]:
    """Build and initialize the model chunks of this pipeline rank; one chunk without the interleaved schedule.

    Args:
        implementation: the layers to build.
        vocab_size: padded size of the vocabulary.
    """
    num_chunks, precision = len(plan.stages[0]), plan.precision
    stages: list[Optional[int]] = [None] if num_chunks == 1 else list(range(num_chunks))
    runtime = layer_runtime(implementation)
    chunks = [build_chunk(plan, transformer_config, runtime, vocab_size, stage) for stage in stages]
    with runtime.writable_weights(chunks) if plan.stores_codes else nullcontext():
        initialize_parameters(chunks, transformer_config, plan.seed, plan.model.use_mup)
    if precision.gradient_accumulation_fusion:
        runtime.fuse_wgrad_accumulation(chunks)
    if precision.bf16 or precision.fp16:
        chunks = [Float16Module(transformer_config, chunk) for chunk in chunks]
    if plan.stores_codes:
        runtime.convert_weights(chunks)
    return chunks


def build_chunk(
    plan: ModelPlan, core: TransformerConfig, runtime: LayerRuntime, vocab_size: int, vp_stage: Optional[int]
) -> GPTModel:
    """Build one uninitialized chunk on this rank's device."""
    model = without_mup(plan.model)
    if core.attention_backend == AttnBackend.local:
        ignore_attention_switches()
    has_multi_token = multi_token.num_depths(model) > 0
    multi_token_spec = runtime.multi_token_spec(plan, core, vp_stage) if has_multi_token else None
    layers = chunk_layers(plan.stages, core, vp_stage)
    chunk = (GPTModel if multi_token_spec is None else MultiTokenGPT)(
        config=core,
        transformer_layer_spec=runtime.block_spec(plan, core, layers),
        vocab_size=vocab_size,
        max_sequence_length=plan.max_positions,
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
    if not core.use_cpu_initialization:
        for module in chunk.modules():
            if isinstance(module, torch.nn.Embedding):
                module.cuda()  # megatron-core builds learned position embeddings on the host
    mark_expert_weights(chunk)
    runtime.finish_chunk(plan, chunk)
    for name, parameter in chunk.named_parameters():
        if name.endswith("softmax_offset"):
            # megatron-core does not mark it, and would leave other ranks' heads out of the gradient norm.
            set_tensor_model_parallel_attributes(parameter, True, 0, 1)
    if chunk.post_process and model.output_logit_softcapping is not None:
        chunk.output_layer.register_forward_hook(partial(cap_logits, model.output_logit_softcapping))
    if chunk.post_process and model.logits_scaling != 1:
        chunk.output_layer.register_forward_hook(partial(divide_logits, model.logits_scaling))
    pack_saved_activations(chunk, plan.precision.fp8_saved_activations)
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
