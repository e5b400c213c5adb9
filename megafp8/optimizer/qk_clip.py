"""QK-clip (`--qk-clip`): weights of queries and keys shrink where attention logits grow (Kimi K2, arXiv:2507.20534).

After an update, with S the largest logit that a group of heads with one key had in the passes before it, over all data:

    eta = min(1, threshold / S)        W_q = eta^alpha W_q        W_k = eta^(1 - alpha) W_k

Their logits on the same tokens are then at most the threshold. Multi-latent attention has an eta for each head. The
rotary part of its key is the same for all heads and stays; that of a query is multiplied by eta, so that both parts of
a logit shrink alike. Biases of queries and keys are multiplied, too.

megatron-core's own takes each master weight for a complete matrix, but those of the distributed optimizer are flat
shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megafp8.optimizer.weight_shards import build_shards, share_weights

OWN_EVIDENCE = (("transformer/attention.py", "self.linear_qkv.weight.main_param.data.copy_("),)
"""The code of megatron-core that expects a complete master weight. A test fails when the text is gone."""


class QkClip:
    """Clips the attention layers of this rank.

    Args:
        optimizer: the run's.
        chunks: the model.
        alpha: the share of queries, from 0 to 1.
    """

    def __init__(self, optimizer: Any, chunks: Sequence[Any], threshold: float, alpha: float):
        self.optimizer, self.chunks, self.threshold, self.alpha = optimizer, chunks, threshold, alpha
        self.shards = {shard.weight: shard for shard in build_shards(optimizer)}
        self.is_overlapped = any(chunk.ddp_config.overlap_param_gather for chunk in chunks)

    @torch.no_grad()
    def clip(self, attentions: Sequence[Any], logits: Sequence[Tensor], device: torch.device) -> Tensor:
        """Multiply the weights of this rank. If any rank has one above the threshold, all call `share` afterwards.

        Args:
            attentions: megatron-core's attention layers of this rank.
            logits: FP32 (heads,), the largest of each layer, reduced over the ranks that have other data.
            device: of the result.

        Returns:
            The number of groups of heads that were clipped on this rank, int64.
        """
        num_clipped = torch.zeros((), dtype=torch.int64, device=device)
        for attention, largest in zip(attentions, logits, strict=True):
            of_keys = largest.view(num_keys(attention), -1).amax(dim=1)
            eta = torch.where(of_keys > self.threshold, self.threshold / of_keys, 1.0)
            num_clipped += (eta < 1).sum()
            for weight, factors in row_factors(attention, eta, self.alpha):
                shard = self.shards.get(weight)
                if shard is None:  # other ranks update it
                    continue
                master, _ = shard.master()
                rows = factors.repeat_interleave(weight.numel() // len(factors))
                master.mul_(rows[shard.first : shard.first + len(master)])
                stored = shard.stored()
                if stored is not None and stored.data_ptr() != master.data_ptr():
                    stored.copy_(master)
        return num_clipped

    def share(self) -> None:
        """Let every rank have the weights that the others have clipped."""
        share_weights(self.optimizer, self.chunks, {}, is_overlapped=self.is_overlapped)


def data_group() -> dist.ProcessGroup:
    """The ranks that have the same heads and other data."""
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def num_keys(attention: Any) -> int:
    """The groups of heads on this rank that share a key."""
    is_latent = hasattr(attention, "linear_kv_up_proj")
    return int(attention.num_attention_heads_per_partition if is_latent else attention.num_query_groups_per_partition)


def row_factors(attention: Any, eta: Tensor, alpha: float) -> Iterator[tuple[Tensor, Tensor]]:
    """The parameters that make queries and keys, with a factor for each of their rows."""
    queries, keys, ones = eta**alpha, eta ** (1 - alpha), torch.ones_like(eta)
    if hasattr(attention, "linear_kv_up_proj"):
        config = attention.config
        of_query = getattr(attention, "linear_q_proj", None) or attention.linear_q_up_proj
        parts = [
            (of_query, [(queries, config.qk_head_dim), (eta, config.qk_pos_emb_head_dim)]),
            (attention.linear_kv_up_proj, [(keys, config.qk_head_dim), (ones, config.v_head_dim)]),
        ]
    else:
        channels = attention.hidden_size_per_attention_head
        heads = attention.num_attention_heads_per_partition // attention.num_query_groups_per_partition
        parts = [(attention.linear_qkv, [(queries, heads * channels), (keys, channels), (ones, channels)])]
    for linear, blocks in parts:
        factors = torch.cat([factor[:, None].expand(-1, num_rows) for factor, num_rows in blocks], dim=1).reshape(-1)
        yield from ((each, factors) for each in (linear.weight, getattr(linear, "bias", None)) if each is not None)
