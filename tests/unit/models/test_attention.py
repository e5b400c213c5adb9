"""Causal attention compared with its definition, alone and with the sequence split over ranks."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, Optional

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor

from megafp8.mcore import cpu_patches, patches

cpu_patches.install()

from megatron.core.transformer.enums import AttnMaskType

from megafp8.mcore.process_groups import split_over_context
from megafp8.mcore.zigzag import zigzag_positions
from megafp8.models.attention import CausalAttention

LENGTH, BATCH, HEADS, CHANNELS = 16, 2, 4, 8
# Sums of a few dozen FP32 products in another order.
TOLERANCE = 2e-6


class Alone:
    """A context-parallel group of one."""

    def size(self) -> int:
        return 1


def attention(
    group: Any = None,
    dropout: float = 0.0,
    softmax_scale: Optional[float] = None,
    softcapping: Optional[float] = None,
    **fields: Any,
) -> CausalAttention:
    """Attention of layer 1, with other fields of megatron-core's configuration."""
    plain = {"window_size": None, "window_attn_skip_freq": None, "softmax_type": "vanilla"}
    config = SimpleNamespace(
        kv_channels=CHANNELS, num_attention_heads=HEADS, attention_dropout=dropout, sequence_parallel=False,
        use_cpu_initialization=True, params_dtype=torch.float32, **plain | fields,
    )  # fmt: skip
    groups = SimpleNamespace(cp=group or Alone(), tp=Alone())
    return CausalAttention(
        config, layer_number=1, softmax_scale=softmax_scale, pg_collection=groups, logit_softcapping=softcapping
    )


def inputs(num_groups: int = HEADS) -> list[Tensor]:
    """Query, key, value: (S, B, heads, channels)."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(LENGTH, BATCH, heads, CHANNELS) for heads in (HEADS, num_groups, num_groups)]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def reference(query: Tensor, key: Tensor, value: Tensor, scale: float = 1 / math.sqrt(CHANNELS)) -> Tensor:
    """softmax(Q K^T scale) V with the future masked, in FP64, head by head."""
    query, key, value = (x.double() for x in (query, key, value))
    repeats = query.shape[2] // key.shape[2]
    key, value = (x.repeat_interleave(repeats, dim=2) for x in (key, value))
    scores = torch.einsum("sbhc,tbhc->bhst", query, key) * scale
    future = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    probabilities = scores.masked_fill(future, -torch.inf).softmax(-1)
    return torch.einsum("bhst,tbhc->sbhc", probabilities, value).reshape(LENGTH, BATCH, -1)


@pytest.mark.parametrize("num_groups", [HEADS, 2, 1])
def test_definition_and_gradients(num_groups: int) -> None:
    ours, theirs = inputs(num_groups), inputs(num_groups)
    weights = torch.randn(LENGTH, BATCH, HEADS * CHANNELS, generator=torch.Generator().manual_seed(2))
    output, expected = attention()(*ours), reference(*theirs)
    assert output.shape == (LENGTH, BATCH, HEADS * CHANNELS)
    torch.testing.assert_close(output.double(), expected, rtol=TOLERANCE, atol=TOLERANCE)
    (output * weights).sum().backward()
    (expected * weights).sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-5)


def test_softmax_scale() -> None:
    query, key, value = inputs()
    output = attention(softmax_scale=0.1)(query, key, value)
    torch.testing.assert_close(output.double(), reference(query, key, value, 0.1), rtol=TOLERANCE, atol=TOLERANCE)


def test_attention_is_causal() -> None:
    query, key, value = (x.detach() for x in inputs())
    before = attention()(query, key, value)
    key[9:], value[9:] = 100.0, 100.0
    after = attention()(query, key, value)
    assert torch.equal(before[:9], after[:9])
    assert not torch.equal(before[9:], after[9:])


@pytest.mark.parametrize("num_groups", [HEADS, 1])
def test_one_query_without_a_mask_attends_to_all_keys(num_groups: int) -> None:
    query, key, value = inputs(num_groups)
    last = attention()(query[-1:], key, value, attn_mask_type=AttnMaskType.no_mask)
    expected = reference(query, key, value)[-1:]
    torch.testing.assert_close(last.double(), expected, rtol=TOLERANCE, atol=TOLERANCE)
    assert not torch.allclose(attention()(query[-1:], key, value).double(), expected, atol=1e-2)


def test_one_query_excludes_the_kernels_that_need_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN's attention builds a plan for each number of keys, which grows with every token after a key-value cache."""
    allowed, compute = [], torch.nn.functional.scaled_dot_product_attention

    def record(*args: Tensor, **options: object) -> Tensor:
        allowed.append(torch.backends.cuda.cudnn_sdp_enabled())
        return compute(*args, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", record)
    query, key, value = inputs()
    attention()(query, key, value)
    attention()(query[-1:], key, value, attn_mask_type=AttnMaskType.no_mask)
    assert allowed == [True, False]


def test_dropout_in_training_only() -> None:
    patches.import_core("tensor_parallel.random").model_parallel_cuda_manual_seed(
        3, force_reset_rng=True, tp_rank=0, ep_rank=0, etp_rank=0
    )
    layer, (query, key, value) = attention(dropout=0.5), inputs()
    exact = reference(query, key, value).float()
    assert not torch.allclose(layer(query, key, value), exact, atol=1e-2)
    layer.eval()
    torch.testing.assert_close(layer(query, key, value), exact, rtol=1e-5, atol=1e-5)


def test_zigzag_gives_every_rank_the_same_work() -> None:
    positions = [zigzag_positions(rank, 4, 4, torch.device("cpu")).tolist() for rank in range(4)]
    assert positions == [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]
    assert {sum(rank) for rank in positions} == {30}


@pytest.mark.parametrize("num_groups", [HEADS, 2])
@pytest.mark.parametrize("size", [2, 4])
def test_context_parallel_attention_equals_one_rank(size: int, num_groups: int) -> None:
    """Output and gradients of each rank's part, for queries, keys and values."""
    weights = torch.randn(LENGTH, BATCH, HEADS * CHANNELS, generator=torch.Generator().manual_seed(2))

    def on_rank() -> tuple[Tensor, list[Tensor]]:
        mine = zigzag_positions(dist.get_rank(), size, LENGTH // size, torch.device("cpu"))
        parts = [x.detach()[mine].requires_grad_() for x in inputs(num_groups)]
        output = attention(dist.group.WORLD)(*parts)
        (output * weights[mine]).sum().backward()
        return output.detach(), [part.grad for part in parts]

    whole = inputs(num_groups)
    expected = reference(*whole)
    (expected * weights).sum().backward()
    for rank, (output, gradients) in enumerate(run_ranks(size, on_rank)):
        mine = zigzag_positions(rank, size, LENGTH // size, torch.device("cpu"))
        torch.testing.assert_close(output.double(), expected[mine], rtol=TOLERANCE, atol=TOLERANCE)
        for gradient, x in zip(gradients, whole, strict=True):
            torch.testing.assert_close(gradient, x.grad[mine], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tensor_ranks", [1, 2])
def test_positions_follow_megatron_cores_split(tensor_ranks: int) -> None:
    """Tokens and positions are split by the same rule. Otherwise a rank would mask the wrong keys."""

    def on_rank() -> list[int]:
        patches.import_core("parallel_state").initialize_model_parallel(tensor_ranks, context_parallel_size=2)
        return split_over_context({"tokens": torch.arange(LENGTH)[None]})["tokens"][0].tolist()

    found = run_ranks(2 * tensor_ranks, on_rank)
    expected = [zigzag_positions(rank, 2, LENGTH // 2, torch.device("cpu")).tolist() for rank in range(2)]
    assert found == [positions for positions in expected for _ in range(tensor_ranks)]
