"""megatron-core's multi-latent attention without Transformer Engine, and its configuration.

megatron-core accepts only certain classes as down projections. On Transformer Engine they are linears that every
tensor-parallel rank has completely. Its local layers split them, gather the outputs, and lose a part of the gradient of
the rotated keys: each rank computes it for its own heads, and nothing sums it. `LatentAttention` therefore has complete
down projections on all layers, whose weights then also have the checkpoint keys and shapes of Transformer Engine's.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any, Optional
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from megafp8.config import latent_attention
from megafp8.config.latent_attention import DOWN_PROJECTIONS
from megafp8.config.schema import ModelConfig
from megafp8.mcore.patches import import_core

BUILT_LATER = (*DOWN_PROJECTIONS, "linear_proj")
MODULE = "transformer.multi_latent_attention"
DOWN_PROJECTION_EVIDENCE = (
    ("transformer/multi_latent_attention.py", 'raise ValueError(f"Unsupported linear_q_down_proj'),
    ("transformer/multi_latent_attention.py", "and isinstance(self.linear_proj, TELinear)"),
    ("transformer/multi_latent_attention.py", "kv_combined = gather_from_tensor_model_parallel_region(kv_combined)"),
)
NORMS_EVIDENCE = (("transformer/mla_qk_norm_config.py", 'self.submodules.linear_q_proj, "linear_q_proj"'),)
"""The code of megatron-core 0.19 that makes `GivenNorms` necessary. A test fails when the text is gone."""


def config_class(model: ModelConfig) -> type[TransformerConfig]:
    """The class of megatron-core's model configuration."""
    return MLATransformerConfig if latent_attention.is_latent(model) else TransformerConfig


def latent_fields(model: ModelConfig) -> dict[str, Any]:
    """Fields of `MLATransformerConfig`; empty without multi-latent attention."""
    if not latent_attention.is_latent(model):
        return {}
    original = model.yarn_original_max_position_embeddings
    return {
        "multi_latent_attention": True,
        "q_lora_rank": model.q_lora_rank,
        "kv_lora_rank": model.kv_lora_rank,
        "qk_head_dim": model.qk_head_dim,
        "qk_pos_emb_head_dim": model.qk_pos_emb_head_dim,
        "v_head_dim": model.v_head_dim,
        "rope_type": "yarn" if latent_attention.uses_yarn(model) else "rope",
        "rotary_base": model.rotary_base,
        "rotary_scaling_factor": model.rotary_scaling_factor,
        "original_max_position_embeddings": (
            latent_attention.DEFAULT_ORIGINAL_POSITIONS if original is None else original
        ),
        "beta_fast": model.yarn_beta_fast,
        "beta_slow": model.yarn_beta_slow,
        "mscale": model.mscale,
        "mscale_all_dim": model.mscale_all_dim,
        # Its fused kernel needs megatron-core's experimental mode, which is off.
        "apply_rope_fusion": False,
    }


class OneRank:
    """Stands for the process group of a linear that is not split."""

    def size(self) -> int:
        """1."""
        return 1

    def rank(self) -> int:
        """0."""
        return 0


class DownProjection(ColumnParallelLinear):
    """y = x w^T with the complete weight on every tensor-parallel rank, for the rank's part of the sequence.

    Shapes: input [S/P, B, K], weight [N, K], output [S/P, B, N]. megatron-core sums the gradient of the weight over the
    tensor-parallel ranks, because the weight is marked `sequence_parallel`.

    Args:
        tp_group: the tensor-parallel ranks. megatron-core's linear is built for one rank, and reduces no gradient.
    """

    def __init__(self, *args: Any, tp_group: dist.ProcessGroup, **options: Any):
        with warnings.catch_warnings():  # megatron-core's, that one rank needs no sequence parallelism
            warnings.simplefilter("ignore")
            super().__init__(*args, tp_group=OneRank(), disable_grad_reduce=True, **options)
        self.tp_group = tp_group
        self.weight.tensor_model_parallel = False
        self.weight.sequence_parallel = self.config.sequence_parallel

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: Optional[dict[str, Any]] = None
    ) -> dict[str, Any]:
        """The complete weight, of which other tensor-parallel ranks have copies."""
        assert metadata is not None
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, {}, sharded_offsets,
            tp_group=self.tp_group, dp_cp_group=metadata["dp_cp_group"],
        )  # fmt: skip


class Placeholder(torch.nn.Module):
    """Takes the place of a linear until it is built, and keeps what to build it with."""

    def __init__(self, *sizes: int, **options: Any):
        super().__init__()
        self.sizes, self.options = sizes, options


class GivenNorms(MLASelfAttention):
    """megatron-core's multi-latent attention with the norms and projections of its spec.

    megatron-core 0.19 replaces them: with `qk_layernorm` and queries that are not compressed it normalizes the input of
    their projection a second time, or fails where the layers have no projection with a norm.
    """

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, Any]:
        return vars(submodules)


class LatentAttention(GivenNorms):
    """megatron-core's multi-latent attention, with any class as down projections.

    megatron-core builds linear_proj twice, of which the first is dropped. Delayed scaling would wait for it.
    """

    def __init__(
        self, config: MLATransformerConfig, submodules: MLASelfAttentionSubmodules, *args: Any, **options: Any
    ):
        placeholders = dataclasses.replace(submodules, **dict.fromkeys(BUILT_LATER, Placeholder))
        # Without Transformer Engine the module takes it for installed, and asks for instances of what is not a class.
        with patch.multiple(import_core(MODULE), Linear=Placeholder, HAVE_TE=False):
            super().__init__(config, placeholders, *args, **options)
        for name in BUILT_LATER:
            placeholder = getattr(self, name, None)
            if placeholder is not None:
                built = build_module(getattr(submodules, name), *placeholder.sizes, **placeholder.options)
                setattr(self, name, built)
