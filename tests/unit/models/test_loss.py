"""The loss of one microbatch, and which batches a chunk takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megafp8.mcore import cpu_patches

cpu_patches.install()

from megafp8.models.loss import build_forward_step, token_loss

CPU = torch.device("cpu")


def batch(length: int = 4) -> dict[str, Tensor]:
    tokens = torch.arange(2 * length).view(2, length)
    return {
        "tokens": tokens,
        "labels": tokens + 1,
        "loss_mask": torch.ones(2, length),
        "position_ids": torch.arange(length).expand(2, -1),
    }


class Model:
    """Records its arguments; its "losses" are the labels."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __call__(self, tokens: Any, positions: Any, mask: Any, labels: Any = None, **_: Any) -> Tensor:
        self.calls.append((tokens, positions, mask, labels))
        return torch.zeros(1) if labels is None else labels.float()


def test_three_values_sum_tokens_and_report() -> None:
    """With two, megatron-core would multiply the gradients by the context-parallel size."""
    losses = torch.tensor([[1.0, 2.0], [4.0, 8.0]], requires_grad=True)
    total, num_tokens, report = token_loss(torch.tensor([[1.0, 0.0], [1.0, 1.0]]), losses)
    assert total.item() == 13.0
    assert (num_tokens.item(), num_tokens.dtype) == (3, torch.int32)
    assert report["loss"].tolist() == [13.0, 3.0]
    assert not report["loss"].requires_grad
    total.backward()
    assert losses.grad.tolist() == [[1.0, 0.0], [1.0, 1.0]], "a masked token moves nothing, and no mean is taken"


def test_a_batch_without_counted_tokens() -> None:
    total, num_tokens, report = token_loss(torch.zeros(1, 3), torch.ones(1, 3))
    assert (total.item(), num_tokens.item(), report["loss"].tolist()) == (0.0, 0, [0.0, 0.0])


def test_sums_are_fp32_under_bf16() -> None:
    losses = torch.full((1, 4096), 2.0, dtype=torch.bfloat16)
    assert token_loss(torch.ones(1, 4096, dtype=torch.bfloat16), losses)[0].item() == 8192.0


def test_a_chunk_with_batches() -> None:
    model, forward_step = Model(), build_forward_step(CPU, context_parallel_size=1)
    batches = iter([batch(), batch()])
    output, loss = forward_step(batches, model)
    tokens, positions, mask, labels = model.calls[0]
    assert torch.equal(tokens, batch()["tokens"])
    assert torch.equal(positions, batch()["position_ids"])
    assert torch.equal(labels, batch()["labels"])
    assert mask is None, "attention is causal by construction"
    assert loss(output)[0].item() == batch()["labels"].sum().item()
    assert len(list(batches)) == 1, "one microbatch was taken"


def test_a_middle_chunk_takes_no_batches() -> None:
    model = Model()
    build_forward_step(CPU, context_parallel_size=1)(None, model)
    assert model.calls == [(None, None, None, None)]


def test_batches_that_end_are_an_error() -> None:
    with pytest.raises(StopIteration):
        build_forward_step(CPU, context_parallel_size=1)(iter([]), Model())
