"""Spec of multi-latent attention with emulated or plain linears (`mcore.latent_attention`)."""

from __future__ import annotations

from collections.abc import Callable

from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec

from megafp8.config import latent_attention
from megafp8.config.schema import ModelConfig
from megafp8.mcore.latent_attention import DownProjection, LatentAttention
from megafp8.models.emulated_layers import AmaxGroups, EmulatedLinearMixin
from megafp8.models.experts import Linear


class EmulatedDownProjection(EmulatedLinearMixin, DownProjection):
    """y = x w^T with the complete weight on every tensor-parallel rank, for the rank's part of the sequence.

    Shapes: weight [N, K], input [T/P, K], grad_output [T/P, N]. Arguments are those of both base classes.
    """

    splits_grad_output = True

    def amax_groups(self, sequence_parallel: bool) -> AmaxGroups:
        """With the reduction of Transformer Engine, which has no groups for such a linear, a rank uses its own amax."""
        if self.amax_reduction == "te":
            return AmaxGroups()
        group = self._activation_group(split_over_tensor=True)
        return AmaxGroups(input=group, grad_output=group)


DOWN = (DownProjection, EmulatedDownProjection)
"""The plain and the emulated class of a down projection."""


def latent_attention_spec(
    model: ModelConfig, linear: Callable[[str], Linear], norm: type, core_attention: ModuleSpec
) -> ModuleSpec:
    """Build the spec of multi-latent attention of one layer.

    Args:
        linear: returns the linear of a name.
        norm: of the compressed queries, and of the compressed keys and values.
    """
    names = latent_attention.linear_names(model)
    return ModuleSpec(
        module=LatentAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=MLASelfAttentionSubmodules(
            **{name: linear(name) for name in names},
            core_attention=core_attention,
            q_layernorm=norm if model.q_lora_rank is not None else IdentityOp,
            kv_layernorm=norm,
        ),
    )
