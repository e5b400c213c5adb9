"""The largest attention logits of a step (`--log-max-attention-logit`, `--qk-clip`), beside attention of any kind.

Queries and keys are multiplied once more before each core attention, which is half of the products of its forward pass,
and more in latent attention, whose values are narrower. Context-parallel ranks gather the keys for it. Transformer
Engine's fused attention has the largest logits with cuDNN 9.21 and newer (its pull request 3091). PyTorch 2.11 brings
9.19, with which it finds no fused kernel.

With FP8 attention the logits are those of queries and keys before they are quantized.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Optional

import torch
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from megafp8.mcore.zigzag import gathered, to_sequence, zigzag_positions
from megafp8.models.attention import document_numbers

QUERIES_AT_ONCE = 1024


class LargestLogits:
    """Measures the passes of training of all attention layers of this rank.

    Attributes:
        attentions: megatron-core's layers.
        values: FP32 (heads of all layers), the largest scaled logits since `clear`, before softcapping. It stays where
            it is, so that a CUDA graph can write it.
    """

    def __init__(self, chunks: Sequence[Any], device: torch.device):
        modules = (module for chunk in chunks for module in chunk.modules())
        self.attentions = [module for module in modules if isinstance(module, Attention)]
        self.num_heads = [each.num_attention_heads_per_partition for each in self.attentions]
        self.values = torch.empty(sum(self.num_heads), device=device)
        self.clear()
        for attention, values in zip(self.attentions, self.by_layer(self.values), strict=True):
            hook = functools.partial(_measure, values, attention)
            attention.core_attention.register_forward_pre_hook(hook)

    def clear(self) -> None:
        """Forget all logits."""
        self.values.fill_(-torch.inf)

    def by_layer(self, values: Tensor) -> Sequence[Tensor]:
        """The parts of the layers of such values, (heads,) each."""
        return values.split(self.num_heads) if self.attentions else ()


@torch.no_grad()
def _measure(largest: Tensor, attention: Attention, core_attention: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
    """Before a core attention, whose inputs are query, key, value and the borders of documents or None."""
    if not core_attention.training:
        return
    (query, key), ends = inputs[:2], inputs[3]
    group, config = attention.pg_collection.cp, attention.config
    positions = torch.arange(query.shape[0], device=query.device)
    if group.size() > 1:
        positions = zigzag_positions(group.rank(), group.size(), query.shape[0], query.device)
        key = to_sequence(gathered(group, key), group.size())
    is_windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, attention.layer_number)
    window = config.window_size[0] if is_windowed else None
    first_key = first_keys(positions, query.shape[1], len(key), window, ends)
    update_max_logits(largest, query, key, positions, first_key, core_attention.softmax_scale)


def first_keys(
    positions: Tensor, batch_size: int, length: int, window: Optional[int], ends: Optional[Tensor]
) -> Optional[Tensor]:
    """The first key that each query attends to, int32 (B, queries); None if it is that of the sequence.

    Args:
        positions: (queries,), in the complete sequences.
        length: of these.
        window: number of tokens before its own that a query attends to.
        ends: cumulative lengths of the documents of all sequences, one after the other.
    """
    if window is None and ends is None:
        return None
    first = torch.zeros(batch_size, len(positions), dtype=torch.int64, device=positions.device)
    if ends is not None:
        starts_of_sequences = length * torch.arange(batch_size, device=positions.device)[:, None]
        first = ends[document_numbers(ends, batch_size, length)[:, positions]].long() - starts_of_sequences
    if window is not None:
        first = torch.maximum(first, positions - window)
    return first.int()


def update_max_logits(
    largest: Tensor, query: Tensor, key: Tensor, positions: Tensor, first_key: Optional[Tensor], scale: float
) -> None:
    """Raise `largest` to the largest scaled products of a query of each head and a key that it attends to.

    Products are added in FP32. Blocks of queries bound the memory.

    Args:
        largest: FP32 (heads,).
        query: (queries, B, heads, channels).
        key: (keys, B, groups, channels), in the order of the sequence.
        positions: (queries,), the last key that each query attends to.
        first_key: as `first_keys` returns it.
    """
    if query.is_cuda:
        from megafp8.kernels.attention_logits import update_max_logits as by_kernel  # needs Triton

        by_kernel(largest, query, key, positions.int(), first_key, scale)
        return
    repeats, columns = query.shape[2] // key.shape[2], torch.arange(len(key), device=key.device)
    keys = key.float().repeat_interleave(repeats, dim=2).permute(1, 2, 3, 0)
    for rows in torch.arange(len(query), device=query.device).split(QUERIES_AT_ONCE):
        logits = query[rows].float().permute(1, 2, 0, 3) @ keys * scale
        is_visible = columns <= positions[rows, None]
        if first_key is not None:
            is_visible = (is_visible & (columns >= first_key[:, rows, None]))[:, None]
        found = logits.masked_fill(~is_visible, -torch.inf).amax(dim=(0, 2, 3))
        torch.maximum(largest, found, out=largest)
