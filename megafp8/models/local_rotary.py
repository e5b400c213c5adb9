"""Layers with rotary frequencies of their own, as those with a sliding window in Gemma 3."""

from __future__ import annotations

from typing import Any, Optional

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor


class LocalRotaryLayer(TransformerLayer):
    """megatron-core's layer with another base of the rotary embedding than the model, and no scaled frequencies.

    Args:
        rotary_base: of this layer.
        rotary_percent: rotated fraction of a head's channels.
    """

    def __init__(self, *args: Any, rotary_base: int, rotary_percent: float, **options: Any):
        super().__init__(*args, **options)
        self.local_rotary = RotaryEmbedding(
            kv_channels=self.config.kv_channels,
            rotary_percent=rotary_percent,
            rotary_interleaved=self.config.rotary_interleaved,
            rotary_base=rotary_base,
            use_cpu_initialization=self.config.use_cpu_initialization,
            cp_group=self.pg_collection.cp,
        )

    def forward(self, *args: Any, rotary_pos_emb: Tensor, **options: Any) -> tuple[Tensor, Optional[Tensor]]:
        """megatron-core's forward pass with the rotary embedding of this layer, for as many positions."""
        length = rotary_pos_emb.shape[0] * self.pg_collection.cp.size()
        return super().forward(*args, rotary_pos_emb=self.local_rotary(length), **options)
