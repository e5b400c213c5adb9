"""Transformer Engine layers through megatron-core's spec, and access to their FP8 state and wgrad fusion."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Optional

import torch
import transformer_engine.pytorch as te
from megatron.core.extensions.transformer_engine import TENorm
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.cpp_extensions import general_gemm
from transformer_engine.pytorch.tensor import QuantizedTensor
from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

from megafp8.config.model_plan import ModelPlan
from megafp8.mcore import patches as mcore_wgrad
from megafp8.mcore.grouped_state import divide_and_join_tensors
from megafp8.mcore.latent_attention import GivenNorms
from megafp8.mcore.modules import mlp_spec, mlp_submodules
from megafp8.te import patches
from megafp8.te.attention import AmaxRotarySelfAttention, DocumentAttention, FP8Attention, RotarySelfAttention
from megafp8.te.fused_mlp import FusedMLP, ResidualLayer, SwiGLUFusedMLP

FP8_SUB_BACKEND = 2  # NVTE_FP8 among Transformer Engine's fused attentions


def layer_spec(plan: ModelPlan, has_experts: bool = False) -> ModuleSpec:
    """Spec of a transformer layer on Transformer Engine; megatron-core enters the FP8 autocast around it.

    Args:
        has_experts: the layer has experts in place of an MLP: one grouped linear for all experts of a rank with
            --moe-grouped-gemm, else an MLP for each.
    """
    model, kernels = plan.model, plan.kernels
    patches.install()
    if has_experts:
        divide_and_join_tensors(patches.serialize_tensors, patches.deserialize_tensors)
    patches.cast_by_kernels(kernels.cast_recipes)
    is_fused = kernels.has_op_fuser and not has_experts
    experts: dict[str, Any] = {}
    if has_experts:
        experts = {"num_experts": model.num_experts, "moe_grouped_gemm": plan.experts.has_grouped_linear}
    spec = get_gpt_layer_with_transformer_engine_spec(
        qk_layernorm=model.qk_layernorm,
        qk_l2_norm=model.qk_l2_norm,
        use_te_op_fuser=is_fused,
        multi_latent_attention=model.multi_latent_attention,
        **experts,
    )
    if model.multi_latent_attention:
        spec.submodules.self_attention.module = GivenNorms
    if kernels.splits_rope:
        attention = AmaxRotarySelfAttention if kernels.casts_need_amax_pass else RotarySelfAttention
        spec.submodules.self_attention.module = attention
    if plan.separates_documents:
        spec.submodules.self_attention.submodules.core_attention = DocumentAttention
    if plan.precision.fp8_dot_product_attention:
        spec.submodules.self_attention.submodules.core_attention = FP8Attention
    if is_fused:
        mlp = SwiGLUFusedMLP if kernels.quantizes_in_swiglu else FusedMLP
        adds_residual = plan.precision.residual_norm_fusion
        spec.submodules.mlp = mlp_spec(mlp, mlp_submodules(spec.submodules.mlp), returns_input=adds_residual)
        if adds_residual:
            spec.module = ResidualLayer
    return spec


def norm() -> type:
    """The final norm."""
    return TENorm


def fuse_wgrad_accumulation(model: torch.nn.Module) -> None:
    """Let every linear, the output layer too, add its weight gradient to `main_grad` inside the wgrad GEMM."""
    for linear in fusing_linears(model):
        linear.fuse_wgrad_accumulation = True
    mcore_wgrad.provide_wgrad_gemm(add_weight_gradient)
    for layer in output_layers(model):
        layer.gradient_accumulation_fusion = True


def add_weight_gradient(inputs: torch.Tensor, gradients: torch.Tensor, main_grad: torch.Tensor) -> None:
    """main_grad [N, K] += gradients^T [N, T] . inputs [T, K], in one GEMM with FP32 sums.

    With `main_grad.is_overwritten` the product overwrites `main_grad` (wgrad overwrite).
    """
    general_gemm(
        inputs, gradients, out_dtype=main_grad.dtype, layout="NT", out=main_grad, grad=True,
        accumulate=not getattr(main_grad, "is_overwritten", False),
    )  # fmt: skip


def output_layers(model: torch.nn.Module) -> list[ColumnParallelLinear]:
    """The output layer, megatron-core's own linear, if this pipeline stage has it and its weight is not shared.

    The gradient of a weight that is shared with the embedding comes from autograd.
    """
    linears = [module for module in model.modules() if type(module) is ColumnParallelLinear]
    return [
        linear for linear in linears
        if linear.weight is not None and not hasattr(linear.weight, "shared_embedding")
    ]  # fmt: skip


def delayed_scales(model: torch.nn.Module) -> list[torch.Tensor]:
    """The scales of delayed scaling, FP32, one tensor for each direction of each linear.

    Before the first forward pass there are none, unless a checkpoint or FP8 weights created them. Unused scales, such
    as those of outputs, stay 1.
    """
    states = [
        linear.fp8_meta.get(direction)
        for linear in fusing_linears(model)
        for direction in ("scaling_fwd", "scaling_bwd")
    ]
    # The states of other recipes have no history.
    return [state.scale for state in states if hasattr(state, "amax_history")]


def delayed_scale(linear: torch.nn.Module, operand: str) -> Optional[torch.Tensor]:
    """A copy of the quantization scale of an operand under delayed scaling; None if it has none yet."""
    # Transformer Engine's order: input, weight, output; then gradients of the output and of the input.
    direction, index = {"input": ("fwd", 0), "weight": ("fwd", 1), "grad_output": ("bwd", 0)}[operand]
    state = linear.fp8_meta.get(f"scaling_{direction}")
    return state.scale[index].clone() if hasattr(state, "amax_history") else None


def delayed_state(model: torch.nn.Module) -> list[torch.Tensor]:
    """The scales and amax histories of delayed scaling, not copied; empty before the first forward pass.

    BF16 attention also has scales once it has run. Nothing uses or saves them: they are left out.
    """
    modules = [*fusing_linears(model), *fp8_attentions(model)]
    metas = [m.fp8_meta for m in modules if isinstance(m.fp8_meta.get("recipe"), DelayedScaling)]
    return [tensor for meta in metas for tensor in patches.delayed_tensors(meta).values()]


def lacks_scales_of_attention(model: torch.nn.Module) -> bool:
    """Whether some FP8 attention has no scales: it has not run, and no checkpoint had them, as it may for linears."""
    return any("scaling_fwd" not in attention.fp8_meta for attention in fp8_attentions(model))


def fp8_attentions(model: torch.nn.Module) -> list[FP8Attention]:
    """All FP8 attention modules."""
    return [module for module in model.modules() if isinstance(module, FP8Attention)]


def fusing_linears(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The linears that can add their weight gradient to `main_grad` inside the wgrad GEMM."""
    modules = [m for m in model.modules() if isinstance(m, te.module.base.TransformerEngineBaseModule)]
    return [m for m in modules if hasattr(m, "fuse_wgrad_accumulation")]


def weights_with_fused_gradients(chunks: list[torch.nn.Module]) -> list[torch.nn.Parameter]:
    """Weights whose linears fuse wgrad accumulation, and support `overwrite_main_grad`."""
    linears = [linear for chunk in chunks for linear in fusing_linears(chunk) if linear.fuse_wgrad_accumulation]
    outputs = [layer for chunk in chunks for layer in output_layers(chunk) if layer.gradient_accumulation_fusion]
    # Grouped linears have a weight for each expert, which are added to.
    return [linear.weight for linear in [*linears, *outputs] if hasattr(linear, "weight")]


@contextmanager
def high_precision_weights(chunks: list[torch.nn.Module]) -> Iterator[None]:
    """Within, the model has high-precision parameters in place of its FP8 weights, which are quantized from them after.

    The FP8 weights keep the high-precision values until the optimizer has made its master weights from them.
    """
    quantized = [
        (module, name, weight)
        for chunk in chunks
        for module in chunk.modules()
        for name, weight in module._parameters.items()
        if isinstance(weight, QuantizedTensor)
    ]
    for module, name, weight in quantized:
        # Uninitialized: it is filled within the context, and the FP8 weight is quantized from it afterwards.
        plain = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
        module._parameters[name] = torch.nn.Parameter(plain)
    yield
    for module, name, weight in quantized:
        plain = module._parameters[name].detach()
        module._parameters[name] = weight
        if isinstance(weight._quantizer, Float8Quantizer):
            weight._quantizer.amax.zero_()  # it is the amax of uninitialized memory, and would enter the amax history
        with torch.no_grad():
            weight.quantize_(plain)
        weight._high_precision_init_val = plain


def selected_attention_backend() -> Optional[str]:
    """The attention backend that Transformer Engine selected in the last forward pass; None before the first one."""
    from transformer_engine.pytorch.attention.dot_product_attention import dot_product_attention

    chosen = dot_product_attention._attention_backends
    if chosen.get("attention_params") is None:
        return None
    if chosen["use_flash_attention"]:
        return f"flash {chosen['flash_attention_backend']}"
    if chosen["use_fused_attention"]:
        kind = int(chosen["fused_attention_backend"])
        return f"fused (cuDNN, sub-backend {kind}{', FP8' if kind == FP8_SUB_BACKEND else ''})"
    return "unfused"
