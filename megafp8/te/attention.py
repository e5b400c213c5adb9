"""Self-attention on Transformer Engine: fused QKV split with RoPE, and FP8 attention with its scales in checkpoints."""

from __future__ import annotations

from typing import Any, Optional

import torch
from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from megafp8.kernels.rope import split_and_rotate
from megafp8.te.packed_sequences import Borders, attend_exchanged, attend_gathered, attend_packed


class RotarySelfAttention(SelfAttention):
    """megatron-core's self-attention with the QKV split and RoPE in one kernel (`kernels/rope.py`).

    For head dims that are powers of two, and rotary embeddings of the complete head.
    """

    angles: Optional[Tensor] = None
    records_amax = False  # of the gradient of `linear_qkv`'s output

    def forward(
        self, hidden_states: Tensor, *args: Any, rotary_pos_emb: Optional[Tensor] = None, **options: Any
    ) -> tuple[Tensor, Optional[Tensor]]:
        """megatron-core's forward pass without rotary embeddings, which the kernel applies."""
        self.angles = rotary_pos_emb
        return super().forward(hidden_states, *args, rotary_pos_emb=None, **options)

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, key_value_states: Optional[Tensor] = None, **options: Any
    ) -> tuple[Tensor, ...]:
        """Queries, keys and values [S, B, heads, D]."""
        num_gathered = self.world_size if self.config.sequence_parallel else 1  # ranks whose tokens the linear gathers
        assert self.angles is not None and self.angles.shape[0] == hidden_states.shape[0] * num_gathered
        joined, _ = self.linear_qkv(hidden_states)
        heads, groups = self.num_attention_heads_per_partition, self.num_query_groups_per_partition
        attention = self.core_attention
        is_packed = isinstance(attention, DocumentAttention) and attention.context_group.size() == 1
        return split_and_rotate(joined, self.angles, heads, groups, is_packed, self.records_amax)


class AmaxRotarySelfAttention(RotarySelfAttention):
    """For current scaling by our kernels: the gradient of `linear_qkv`'s output is annotated with its amax."""

    records_amax = True


class DocumentAttention(TEDotProductAttention):
    """megatron-core's attention with borders of documents, by Transformer Engine's kernels for packed sequences."""

    def __init__(
        self,
        *args: Any,
        cp_comm_type: Optional[str] = None,
        pg_collection: Optional[ProcessGroupCollection] = None,
        **options: Any,
    ):
        super().__init__(*args, cp_comm_type=cp_comm_type, pg_collection=pg_collection, **options)
        assert pg_collection is not None, "megatron-core's attention passes its groups"
        self.context_group, self.exchanges_heads = pg_collection.cp, cp_comm_type == "a2a"
        self.set_context_parallel_group(None, [], None)  # the kernels are those of one rank
        if self.exchanges_heads:
            self.num_gqa_groups_per_partition //= self.context_group.size()

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Optional[Tensor], *rest: Any, **options: Any
    ) -> Tensor:
        """Attention of query, key and value (S, B, heads, channels); returns (S, B, heads * channels).

        Args:
            attention_mask: the borders of documents (`models/loss.py`); None for one document.
        """
        ends, group = attention_mask, self.context_group
        if group.size() == 1:
            if ends is None:
                # Transformer Engine does not see the strides of packed sequences.
                query, key, value = (each.contiguous() for each in (query, key, value))
                return super().forward(query, key, value, None, *rest, **options)
            return attend_packed(self.attend, query, key, value, ends)
        if ends is None:
            length, batch_size = group.size() * query.shape[0], query.shape[1]
            ends = length * torch.arange(batch_size + 1, dtype=torch.int32, device=query.device)
        attend_split = attend_exchanged if self.exchanges_heads else attend_gathered
        return attend_split(self.attend, query, key, value, ends, group)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, of_queries: Borders, of_keys: Borders) -> Tensor:
        """Transformer Engine's kernels, without megatron-core's wrapper, which does not know the mask type."""
        is_cut = of_queries is not of_keys
        return super(TEDotProductAttention, self).forward(
            query, key, value, None, qkv_format="thd",
            cu_seqlens_q=of_queries.ends, max_seqlen_q=of_queries.longest,
            cu_seqlens_kv=of_keys.ends, max_seqlen_kv=of_keys.longest,
            attn_mask_type="padding_causal_bottom_right" if is_cut else "padding_causal",
        )  # fmt: skip


class FP8Attention(TEDotProductAttention):
    """megatron-core's attention, with the state of delayed scaling in checkpoints.

    megatron-core leaves out the scales of queries, keys, values, probabilities and output, and of their gradients.
    """

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: Optional[dict[str, Any]] = None,
    ) -> dict[str, Any]:
        """One object for this layer, as for a linear; it is the same on all ranks that share its scales."""
        assert metadata is not None
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, {"softmax_offset": 0}, sharded_offsets,
            tp_group=self._tp_group, dp_cp_group=metadata["dp_cp_group"],
        )  # fmt: skip
