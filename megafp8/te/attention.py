"""Transformer Engine's attention in FP8, with what delayed scaling remembers of it in checkpoints."""

from __future__ import annotations

from typing import Any, Optional

from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from megafp8.kernels.rope import split_and_rotate


class RotarySelfAttention(SelfAttention):
    """megatron-core's self-attention with these kernels; for heads whose D is a power of two, rotated whole."""

    angles: Optional[Tensor] = None
    notes_amax = False  # of the gradient that `linear_qkv` is given

    def forward(
        self, hidden_states: Tensor, *args: Any, rotary_pos_emb: Optional[Tensor] = None, **options: Any
    ) -> tuple[Tensor, Optional[Tensor]]:
        """As upstream, which is given no angles where the kernels take them."""
        self.angles = rotary_pos_emb
        return super().forward(hidden_states, *args, rotary_pos_emb=None, **options)

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, key_value_states: Optional[Tensor] = None, **options: Any
    ) -> tuple[Tensor, ...]:
        """Queries, keys and values [S, B, heads, D]."""
        assert self.angles is not None and self.angles.shape[0] == hidden_states.shape[0] * self.gathered_ranks()
        joined, _ = self.linear_qkv(hidden_states)
        heads, groups = self.num_attention_heads_per_partition, self.num_query_groups_per_partition
        return split_and_rotate(joined, self.angles, heads, groups, self.notes_amax)

    def gathered_ranks(self) -> int:
        """Ranks whose tokens the linear gathers."""
        return self.world_size if self.config.sequence_parallel else 1


class AmaxRotarySelfAttention(RotarySelfAttention):
    """Before it, a linear whose gradient our kernels cast by its amax."""

    notes_amax = True


class FP8Attention(TEDotProductAttention):
    """megatron-core's, which leaves the scales of queries, keys, values, probabilities and output, and of their
    gradients, out of checkpoints."""

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: Optional[dict[str, Any]] = None,
    ) -> dict[str, Any]:
        """As of a linear: one object of this layer, the same on all ranks that share its scales."""
        assert metadata is not None
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, {"softmax_offset": 0}, sharded_offsets,
            tp_group=self._tp_group, dp_cp_group=metadata["dp_cp_group"],
        )  # fmt: skip
