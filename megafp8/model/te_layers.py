"""Transformer Engine's layers through megatron-core's own spec. One of two files that import Transformer Engine."""

from __future__ import annotations

from typing import Optional

import torch
import transformer_engine.pytorch as te
from megatron.core.extensions.transformer_engine import TENorm
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer.spec_utils import ModuleSpec

from megafp8.config.schema import RunConfig


def layer_spec(config: RunConfig) -> ModuleSpec:
    """One transformer layer on Transformer Engine; megatron-core enters the FP8 context around it."""
    return get_gpt_layer_with_transformer_engine_spec(
        qk_layernorm=config.model.qk_layernorm,
        use_te_op_fuser=config.precision.use_transformer_engine_op_fuser,
    )


def norm() -> type:
    """The final norm."""
    return TENorm


def accumulate_gradients_in_gemm(model: torch.nn.Module) -> int:
    """Let every Transformer Engine linear add its weight gradient to `main_grad` inside the GEMM. Returns how many."""
    modules = [m for m in model.modules() if isinstance(m, te.module.base.TransformerEngineBaseModule)]
    linears = [m for m in modules if hasattr(m, "fuse_wgrad_accumulation")]
    for linear in linears:
        linear.fuse_wgrad_accumulation = True
    return len(linears)


def delayed_scales(model: torch.nn.Module) -> list[torch.Tensor]:
    """The scales of delayed scaling, FP32, a tensor for each direction of each linear.

    There are none before the first forward pass, unless a checkpoint or FP8 weights brought some. Scales that nothing
    has used, such as those of outputs, stay 1.
    """
    modules = [m for m in model.modules() if isinstance(m, te.module.base.TransformerEngineBaseModule)]
    states = [m.fp8_meta.get(direction) for m in modules for direction in ("scaling_fwd", "scaling_bwd")]
    return [state.scale for state in states if hasattr(state, "amax_history")]


def selected_attention_backend() -> Optional[str]:
    """The attention kernels that Transformer Engine chose in the last forward pass; None before the first one."""
    from transformer_engine.pytorch.attention.dot_product_attention import dot_product_attention

    chosen = dot_product_attention._attention_backends
    if chosen.get("attention_params") is None:
        return None
    if chosen["use_flash_attention"]:
        return f"flash {chosen['flash_attention_backend']}"
    if chosen["use_fused_attention"]:
        return f"fused (cuDNN, sub-backend {int(chosen['fused_attention_backend'])})"
    return "unfused"
