"""Attention in the packed format equals attention with a mask of documents."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from megafp8.mcore import cpu_patches

cpu_patches.install()

from megatron.core.packed_seq_params import PackedSeqParams

from megafp8.models.attention import CausalAttention
from megafp8.te.packed_sequences import attend_packed

LENGTH, BATCH, HEADS, CHANNELS = 8, 3, 2, 4
BORDERS = (0, 5, 8, 9, 16, 24)


def each_document(query: Tensor, key: Tensor, value: Tensor, packed_seq_params: PackedSeqParams) -> Tensor:
    """Causal attention in the format thd, one document at a time. Returns (tokens, heads * channels)."""
    borders = packed_seq_params.cu_seqlens_q.tolist()
    parts = []
    for first, end in zip(borders[:-1], borders[1:], strict=True):
        document = [x[first:end].transpose(0, 1) for x in (query, key, value)]
        parts.append(F.scaled_dot_product_attention(*document, is_causal=True).transpose(0, 1).flatten(1))
    return torch.cat(parts)


def test_packed_equals_masked() -> None:
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(LENGTH, BATCH, HEADS, CHANNELS, generator=generator) for _ in range(3)]
    documents = PackedSeqParams(qkv_format="sbhd", cu_seqlens_q=torch.tensor(BORDERS))
    one = SimpleNamespace(size=lambda: 1)
    config = SimpleNamespace(
        kv_channels=CHANNELS, attention_dropout=0.0, sequence_parallel=False, window_size=None,
        window_attn_skip_freq=None, softmax_type="vanilla",
    )  # fmt: skip
    masked = CausalAttention(config, 1, pg_collection=SimpleNamespace(cp=one, tp=one))
    packed = attend_packed(each_document, *tensors, packed_seq_params=documents)
    assert packed.shape == (LENGTH, BATCH, HEADS * CHANNELS) and packed.is_contiguous()
    torch.testing.assert_close(packed, masked(*tensors, torch.tensor(BORDERS)), rtol=1e-6, atol=1e-6)
