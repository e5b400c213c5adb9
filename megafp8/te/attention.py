"""Self-attention on Transformer Engine: fused QKV split with RoPE, and FP8 attention with its scales in checkpoints."""

from __future__ import annotations

from typing import Any, Optional

from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from megafp8.kernels.rope import split_and_rotate
from megafp8.te.packed_sequences import attend_packed


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
        return split_and_rotate(joined, self.angles, heads, groups, self.records_amax)


class AmaxRotarySelfAttention(RotarySelfAttention):
    """For current scaling by our kernels: the gradient of `linear_qkv`'s output is annotated with its amax."""

    records_amax = True


class DocumentAttention(TEDotProductAttention):
    """megatron-core's attention with borders of documents, by Transformer Engine's kernels for packed sequences.

    The packed format is thd. Only attention uses it, so the shapes of all other layers, and of messages between
    pipeline stages, stay those of sequences.
    """

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Optional[Tensor], *rest: Any, **options: Any
    ) -> Tensor:
        """Attention of query, key and value (S, B, heads, channels); returns (S, B, heads * channels).

        Args:
            attention_mask: the borders of documents (`models/loss.py`); None for one document.
        """
        if attention_mask is None:
            return super().forward(query, key, value, None, *rest, **options)
        # The maximum length is that of a sequence, so that kernels are planned once.
        ends, length = attention_mask, query.shape[0]
        packed = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=length, max_seqlen_kv=length
        )
        return attend_packed(super().forward, query, key, value, None, *rest, **options | {"packed_seq_params": packed})


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
