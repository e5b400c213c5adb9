"""Windows, borders of documents, softcapping and offsets of the softmax, compared with their definition in FP64."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, Optional

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor

from megafp8.mcore import cpu_patches

cpu_patches.install()

from megatron.core.transformer.enums import AttnMaskType

from megafp8.mcore.zigzag import zigzag_positions
from megafp8.models import attention_logits
from megafp8.models.attention import CausalAttention, document_numbers

LENGTH, BATCH, HEADS, GROUPS, CHANNELS = 16, 2, 4, 2, 8
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
BORDERS = (0, 5, 6, 16, 16 + 9, 32)  # of documents in two sequences of 16 tokens
OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"window_size": (3, 0)},
    "window of one token": {"window_size": (0, 0)},
    "window in other layers": {"window_size": (3, 0), "window_attn_skip_freq": [0, 1]},
    "off by one": {"softmax_type": "off-by-one"},
    "learnable": {"softmax_type": "learnable"},
    "capped": {"softcapping": 0.3},
    "capped window": {"softcapping": 0.3, "window_size": (3, 0)},
    "unfused": {"is_unfused": True},
    "unfused window": {"is_unfused": True, "window_size": (3, 0)},
    "learnable window": {"softmax_type": "learnable", "window_size": (3, 0), "window_attn_skip_freq": 2},
}
OFFSETS = [0.5, -1.0, 2.0, 0.0]


class Alone:
    """A process group of one."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def attention(
    group: Any = None, softcapping: Optional[float] = None, is_unfused: bool = False, **fields: Any
) -> CausalAttention:
    plain = {"window_size": None, "window_attn_skip_freq": None, "softmax_type": "vanilla"}
    config = SimpleNamespace(
        kv_channels=CHANNELS, num_attention_heads=HEADS, attention_dropout=0.0, sequence_parallel=False,
        use_cpu_initialization=True, params_dtype=torch.float32, **plain | fields,
    )  # fmt: skip
    groups = SimpleNamespace(cp=group or Alone(), tp=Alone())
    layer = CausalAttention(config, 1, pg_collection=groups, logit_softcapping=softcapping, is_unfused=is_unfused)
    if layer.softmax_offset is not None:
        layer.softmax_offset.data.copy_(torch.tensor(OFFSETS))
    return layer


def inputs() -> list[Tensor]:
    """Query, key, value: (S, B, heads, channels)."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(LENGTH, BATCH, heads, CHANNELS) for heads in (HEADS, GROUPS, GROUPS)]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def reference(
    tensors: list[Tensor], offsets: Tensor, borders: Optional[tuple[int, ...]] = None, **options: Any
) -> Tensor:
    """One head and one query at a time, in FP64. The largest scores of the heads go to `reference.logits`."""
    logits = torch.full((HEADS,), -torch.inf, dtype=torch.float64)
    query, key, value = (x.double() for x in tensors)
    window = options.get("window_size", (LENGTH, 0))[0]
    if options.get("window_attn_skip_freq") == [0, 1]:
        window = LENGTH
    output = []
    for token in range(LENGTH):
        for row in range(BATCH):
            for head in range(HEADS):
                first = max(0, token - window)
                if borders is not None:
                    start = max(border for border in borders if border <= row * LENGTH + token)
                    first = max(first, start - row * LENGTH)
                group = head // (HEADS // GROUPS)
                keys, values = key[first : token + 1, row, group], value[first : token + 1, row, group]
                scores = keys @ query[token, row, head] / math.sqrt(CHANNELS)
                logits[head] = max(logits[head], scores.max().detach())
                if (limit := options.get("softcapping")) is not None:
                    scores = limit * torch.tanh(scores / limit)
                terms = scores.exp()
                total = terms.sum()
                if options.get("softmax_type") == "off-by-one":
                    total = total + 1
                elif options.get("softmax_type") == "learnable":
                    total = total + offsets[head].exp()
                output.append((terms / total) @ values)
    reference.logits = logits
    return torch.stack(output).view(LENGTH, BATCH, -1)


def documents() -> torch.Tensor:
    return torch.tensor(BORDERS, dtype=torch.int32)


def weights() -> Tensor:
    return torch.randn(LENGTH, BATCH, HEADS * CHANNELS, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("name", ["plain", *OPTIONS])
def test_definition_and_gradients(name: str, has_documents: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_logits, "QUERIES_AT_ONCE", 5)  # the last block is shorter
    options = OPTIONS.get(name, {})
    ours, theirs = inputs(), inputs()
    layer, offsets = attention(**options), torch.tensor(OFFSETS, dtype=torch.float64, requires_grad=True)
    output = layer(*ours, documents() if has_documents else None)
    expected = reference(theirs, offsets, BORDERS if has_documents else None, **options)
    torch.testing.assert_close(output.double(), expected, **TOLERANCE)
    ends, largest = documents() if has_documents else None, torch.full((HEADS,), -torch.inf)
    positions = torch.arange(LENGTH)
    first_key = attention_logits.first_keys(positions, BATCH, LENGTH, layer.window, ends)
    query, key = (each.detach() for each in ours[:2])
    attention_logits.update_max_logits(largest, query, key, positions, first_key, layer.softmax_scale)
    torch.testing.assert_close(largest.double(), reference.logits, **TOLERANCE)
    (output * weights()).sum().backward()
    (expected * weights()).sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, **TOLERANCE)
    if layer.softmax_offset is not None:
        torch.testing.assert_close(layer.softmax_offset.grad.double(), offsets.grad, **TOLERANCE)


def test_unfused_attention_does_not_use_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.nn.functional, "scaled_dot_product_attention")
    attention(is_unfused=True)(*inputs())
    with pytest.raises(AttributeError, match="scaled_dot_product_attention"):
        attention()(*inputs())


@pytest.mark.parametrize("name", ["plain", *OPTIONS])
def test_the_token_after_a_key_value_cache(name: str) -> None:
    layer, (query, key, value) = attention(**OPTIONS.get(name, {})), inputs()
    complete = layer(query, key, value)[-1:]
    last = layer(query[-1:], key, value, attn_mask_type=AttnMaskType.no_mask)
    torch.testing.assert_close(last, complete, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", OPTIONS)
def test_context_parallel_ranks(name: str) -> None:
    def on_rank() -> Tensor:
        mine = zigzag_positions(dist.get_rank(), 2, LENGTH // 2, torch.device("cpu"))
        return attention(dist.group.WORLD, **OPTIONS[name])(*(x.detach()[mine] for x in inputs())).detach()

    complete = attention(**OPTIONS[name])(*inputs())
    for rank, output in enumerate(run_ranks(2, on_rank)):
        mine = zigzag_positions(rank, 2, LENGTH // 2, torch.device("cpu"))
        torch.testing.assert_close(output, complete[mine].detach(), rtol=1e-6, atol=1e-6)


def test_documents_are_numbered_through_the_microbatch() -> None:
    assert document_numbers(documents(), BATCH, LENGTH).tolist() == [
        [0] * 5 + [1] + [2] * 10,
        [3] * 9 + [4] * 7,
    ]


def test_half_precision_probabilities_are_in_fp32() -> None:
    """The result of BF16 inputs is that of FP32 arithmetic on them, rounded once."""
    tensors = [x.detach().bfloat16() for x in inputs()]
    output = attention(softcapping=0.3)(*tensors)
    expected = reference([x.float() for x in tensors], torch.zeros(HEADS), softcapping=0.3)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.double(), expected, rtol=2**-8, atol=1e-6)
