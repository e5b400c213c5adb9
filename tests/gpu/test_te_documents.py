"""Attention within documents by Transformer Engine's kernels: losses, and CUDA graphs."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from requirements import require_transformer_engine

pytestmark = pytest.mark.gpu
require_transformer_engine()

from gpu_runs import RECIPES, check_graph_equals_launched_kernels, gap_to_emulated, gpu_run
from packed_kernel import each_document
from small_run import DocumentSamples
from torch import Tensor

from megafp8.mcore.zigzag import to_ranks
from megafp8.models.loss import document_ends
from megafp8.te import packed_sequences
from megafp8.te.attention import DocumentAttention
from megafp8.te.packed_sequences import attend_gathered, attend_packed

STEPS = 6  # documents are short from the fourth on
DOCUMENTS = "--reset-attention-mask --eod-mask-loss"
LATENT = (
    "--multi-latent-attention --q-lora-rank 64 --kv-lora-rank 64 --qk-head-dim 64 --qk-pos-emb-head-dim 32 "
    "--v-head-dim 64"
)
GROUPED = "--group-query-attention --num-query-groups 2"
MODELS = {"plain": "", "grouped queries": GROUPED, "latent": LATENT, "windows": "--window-size 24,0"}
CLOSE = {"bf16": 2e-3, "tensorwise": 5e-3}  # as in test_te_attention_options.py


@pytest.mark.parametrize("recipe", CLOSE)
@pytest.mark.parametrize("name", MODELS)
def test_documents_train_as_with_emulated_layers(name: str, recipe: str) -> None:
    flags = f"{RECIPES[recipe]} {MODELS[name]} {DOCUMENTS}"
    assert gap_to_emulated(flags, STEPS) < CLOSE[recipe]


@pytest.mark.parametrize("extra", ["", RECIPES["delayed"], LATENT])
def test_a_graph_with_documents_equals_launched_kernels(extra: str) -> None:
    """In the fourth step, after the capture, there are more documents than the graph has room for: it is repeated."""
    check_graph_equals_launched_kernels(f"{extra} {DOCUMENTS}")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_kernels_of_packed_documents(size: int, name: str) -> None:
    """Each rank's queries with the keys of all ranks, forward and backward, on one GPU."""
    starts = torch.stack([DocumentSamples(256)[index]["document_starts"] for index in (0, 30)]).cuda()
    ends, window = document_ends(starts, 128), 24 if name == "windows" else None
    with gpu_run(f"{MODELS[name]} {DOCUMENTS} --micro-batch-size 2") as run:
        modules = run.training_state.chunks[0].modules()
        kernel = next(module for module in modules if isinstance(module, DocumentAttention))
        groups, heads = kernel.num_gqa_groups_per_partition, kernel.num_attention_heads
        channels, value_channels = kernel.hidden_size_per_attention_head_k, kernel.hidden_size_per_attention_head_v
        shapes = ((heads, channels), (groups, channels), (groups, value_channels), (heads * value_channels,))
        generator = torch.Generator("cuda").manual_seed(1)
        inputs = [torch.randn(256, 2, *shape, generator=generator, device="cuda").bfloat16() for shape in shapes]

        def result(attend: Any, dtype: torch.dtype) -> list[Tensor]:
            *leaves, weights = (x.to(dtype) for x in inputs)
            leaves = [leaf.requires_grad_() for leaf in leaves]
            if size == 1:
                output = attend_packed(attend, *leaves, ends)
            else:
                query, key, value = (to_ranks(leaf, size) for leaf in leaves)
                weights, outputs = to_ranks(weights, size).flatten(0, 1), []
                with patch.object(packed_sequences, "gathered", lambda group, tensor: tensor):
                    for rank in range(size):
                        group: Any = SimpleNamespace(size=lambda: size, rank=lambda rank=rank: rank)
                        keys, values = key.flatten(0, 1), value.flatten(0, 1)
                        outputs.append(attend_gathered(attend, query[rank], keys, values, ends, group))
                output = torch.cat(outputs)
            (output * weights).sum().backward()
            return [output.detach(), *(leaf.grad for leaf in leaves)]  # type: ignore[misc]

        scale = kernel.softmax_scale
        expected = result(functools.partial(each_document, scale=scale, window=window), torch.float32)
        found = result(kernel.attend, torch.bfloat16)
    errors = [
        ((a.float() - b).abs().max() / b.abs().max()).item() for a, b in zip(found, expected, strict=True)
    ]  # fmt: skip
    print(f"\n{name}, {size} ranks: output, queries, keys, values {errors}")
    assert all(error < 2e-2 for error in errors)
