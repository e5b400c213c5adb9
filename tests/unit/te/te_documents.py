"""A program of `test_te_without_cuda.py`: attention within documents gives Transformer Engine packed documents, and
none of its own context parallelism."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import te_without_cuda  # noqa: F401  (first)
import torch
import transformer_engine.pytorch as te
from megatron.core.transformer.enums import AttnMaskType
from packed_kernel import each_document
from torch import Tensor

from megafp8.config import flags
from megafp8.config.layer_backends import TRANSFORMER_ENGINE
from megafp8.mcore.config import build_transformer_config
from megafp8.mcore.zigzag import to_ranks
from megafp8.te import packed_sequences, patches
from megafp8.te.attention import DocumentAttention
from megafp8.te.packed_sequences import Borders

patches.install()
FLAGS = "--num-layers 1 --hidden-size 64 --num-attention-heads 4 --group-query-attention --num-query-groups 2 --bf16"
CONFIG = build_transformer_config(flags.parse(FLAGS.split()).config, TRANSFORMER_ENGINE, on_cuda=False)
LENGTH, BATCH = 16, 2
ENDS = torch.tensor([0, 5, 16, 20, 21, 32, 32], dtype=torch.int32)
calls: list[tuple[str, int, int]] = []


class Group:
    """Of a rank, without others."""

    def __init__(self, size: int, rank: int = 0):
        self.size, self.rank = (lambda: size), (lambda: rank)


def attention(size: int, comm_type: str, rank: int = 0) -> DocumentAttention:
    return DocumentAttention(
        config=CONFIG, layer_number=1, attn_mask_type=AttnMaskType.causal, attention_type="self",
        cp_comm_type=comm_type, pg_collection=SimpleNamespace(tp=Group(1), cp=Group(size, rank)),
    )  # fmt: skip


def kernel(self: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any) -> Tensor:
    """What Transformer Engine would check, and compute."""
    assert self.cp_group is None and attention_mask is None and options["qkv_format"] == "thd"
    assert key.shape[1] == self.num_gqa_groups_per_partition
    of_queries = Borders(options["cu_seqlens_q"], options["max_seqlen_q"])
    of_keys = Borders(options["cu_seqlens_kv"], options["max_seqlen_kv"])
    calls.append((options["attn_mask_type"], len(query), len(key)))
    return each_document(query, key, value, of_queries, of_keys)


generator = torch.Generator().manual_seed(1)
query, key, value = (torch.randn(LENGTH, BATCH, heads, 16, generator=generator) for heads in (4, 2, 2))
with patch.object(te.DotProductAttention, "forward", kernel):
    whole = attention(1, "p2p")(query, key, value, ENDS, attn_mask_type=AttnMaskType.causal)
    assert calls == [("padding_causal", 32, 32)]

    calls.clear()
    queries, (keys, values) = to_ranks(query, 2), (to_ranks(x, 2).flatten(0, 1) for x in (key, value))
    with patch.object(packed_sequences, "gathered", lambda group, tensor: tensor):
        for rank in range(2):
            found = attention(2, "p2p", rank)(queries[rank], keys, values, ENDS, attn_mask_type=AttnMaskType.causal)
            torch.testing.assert_close(found, to_ranks(whole, 2)[rank], rtol=1e-5, atol=1e-6)
    bottom_right = "padding_causal_bottom_right"
    assert calls == [(bottom_right, 8, 8), (bottom_right, 8, 32), (bottom_right, 8, 16), (bottom_right, 8, 24)]

    # Without borders each sequence is one document; with an all-to-all a rank has some of the heads.
    calls.clear()
    with patch.object(packed_sequences, "all_to_all", lambda group, parts: parts):
        assert attention(2, "a2a")(query, key, value, None).shape == whole.shape
    assert calls == [("padding_causal", 64, 64)]
