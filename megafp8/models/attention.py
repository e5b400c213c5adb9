"""Causal attention with torch's SDPA and context parallelism, for layers without Transformer Engine.

Context parallelism splits each sequence of S tokens into 2N pieces. Rank r of N holds pieces r and 2N-1-r, the zigzag
order of megatron-core's `get_batch_on_this_cp_rank`, which balances causal attention over the ranks. Queries stay
local. Keys and values are all-gathered, and their gradients are reduce-scattered. The gather takes
2 x S x kv-heads x channels elements per rank and layer, which is little compared with the activations.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Optional

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


def zigzag_positions(rank: int, size: int, local_length: int, device: torch.device) -> Tensor:
    """Sequence positions of context-parallel rank `rank` of `size`. Shape (local_length,), int64."""
    piece_length = local_length // 2
    offsets = torch.arange(piece_length, device=device)
    return torch.cat((rank * piece_length + offsets, (2 * size - 1 - rank) * piece_length + offsets))


WITHOUT_PLANS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class CausalAttention(torch.nn.Module):
    """softmax(Q K^T / sqrt(channels) + causal mask) V.

    Shapes: query (S, B, heads, channels), key and value (S, B, kv-heads, channels), output (S, B, heads * channels),
    where S counts the tokens of this context-parallel rank and heads those of this tensor-parallel rank.
    Numerics: those of the SDPA kernel, with FP32 probabilities.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any = None,
        attention_type: str = "self",
        attention_dropout: Optional[float] = None,
        softmax_scale: Optional[float] = None,
        cp_comm_type: Optional[str] = None,
        pg_collection: Optional[ProcessGroupCollection] = None,
    ):
        super().__init__()
        assert pg_collection is not None, "megatron-core's attention passes its groups"
        self.context_group = pg_collection.cp
        self.softmax_scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5
        self.is_sequence_parallel = config.sequence_parallel
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Optional[Tensor] = None,
        attn_mask_type: Any = None,
        attention_bias: Optional[Tensor] = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Compute causal attention. `attention_mask` is ignored: megafp8's data loader builds none.

        Args:
            attn_mask_type: with `no_mask` every query attends to all keys. megatron-core passes it for the one token
                that follows a key-value cache (`training/key_value_cache.py`).
        """
        assert attention_bias is None and packed_seq_params is None, "not passed by this project's models"
        mask, is_causal = None, attn_mask_type is not AttnMaskType.no_mask
        if self.context_group.size() > 1:
            assert is_causal, "a key-value cache is for one rank"
            key, value, mask = self.gather_key_value(query, key, value)
        probability = self.dropout if self.training else 0.0
        # Tensor-parallel ranks drop probabilities of different heads, so they use the tensor-parallel random state.
        # With sequence parallelism the transformer block has forked into it already; forking again would rewind it.
        forks = probability > 0 and not self.is_sequence_parallel
        fork = tensor_parallel.get_cuda_rng_tracker().fork() if forks else nullcontext()
        # cuDNN builds a plan for each number of keys, which takes 0.1 s for every token after a key-value cache.
        kernels = nullcontext() if is_causal else sdpa_kernel(WITHOUT_PLANS)
        with fork, kernels:
            output = F.scaled_dot_product_attention(
                query.permute(1, 2, 0, 3),
                key.permute(1, 2, 0, 3),
                value.permute(1, 2, 0, 3),
                attn_mask=mask,
                is_causal=is_causal and mask is None,
                dropout_p=probability,
                scale=self.softmax_scale,
                enable_gqa=key.shape[2] != query.shape[2],
            )
        return output.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)

    def gather_key_value(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values of all ranks, and a boolean mask (S local, S) of those that each local query attends to."""
        group, local_length = self.context_group, query.shape[0]
        gathered = [
            tensor_parallel.gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True, group=group)
            for x in (key, value)
        ]
        positions = [zigzag_positions(r, group.size(), local_length, query.device) for r in range(group.size())]
        mask = positions[group.rank()][:, None] >= torch.cat(positions)[None, :]
        return gathered[0], gathered[1], mask
