"""The loss of one microbatch, and which batches a chunk takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megafp8.mcore import cpu_patches

cpu_patches.install()

from megafp8.models.loss import DocumentRoom, build_forward_step, document_ends, token_loss

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
    model, forward_step = Model(), build_forward_step(CPU, 1, DocumentRoom(CPU, has_graph=False))
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
    build_forward_step(CPU, 1, DocumentRoom(CPU, has_graph=False))(None, model)
    assert model.calls == [(None, None, None, None)]


def test_batches_that_end_are_an_error() -> None:
    with pytest.raises(StopIteration):
        build_forward_step(CPU, 1, DocumentRoom(CPU, has_graph=False))(iter([]), Model())


def starts_of(*lengths: int) -> Tensor:
    positions = torch.cat([torch.arange(length) for length in lengths])
    return positions == 0


def test_borders_of_documents() -> None:
    starts = starts_of(3, 5, 1, 7).view(2, 8)
    assert document_ends(starts).tolist() == [0, 3, 8, 9, 16]
    assert document_ends(starts, 6).tolist() == [0, 3, 8, 9, 16, 16, 16], "empty ones follow"
    assert document_ends(starts, 3).tolist() == [0, 3, 8, 16], "too many: the caller counts them"
    assert document_ends(starts).dtype == torch.int32
    one = starts_of(4, 4).view(2, 4)
    assert document_ends(one).tolist() == [0, 4, 8]
    for seed in range(20):
        starts = torch.rand(3, 11, generator=torch.Generator().manual_seed(seed)) < 0.3
        starts[:, 0] = True
        assert document_ends(starts).tolist() == [*starts.flatten().nonzero().flatten().tolist(), 33]


def test_microbatches_have_borders_of_a_power_of_two() -> None:
    model, room = Model(), DocumentRoom(CPU, has_graph=False)
    forward_step = build_forward_step(CPU, 2, room)
    starts = torch.zeros(2, 40, dtype=torch.bool)
    starts[:, 0] = starts[1, 20:30] = True
    documents = batch(40) | {"document_starts": starts}
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr("megafp8.models.loss.split_over_context", lambda batch: batch)
        output, loss = forward_step(iter([documents]), model)
        forward_step(iter([batch(40) | {"document_starts": torch.ones(2, 40, dtype=torch.bool)}]), model)
    ends = model.calls[0][2]
    assert ends.tolist()[:13] == [0, *range(40, 41), *range(60, 70), 80] and set(ends.tolist()[13:]) == {80}
    assert len(ends) - 1 == 16 and len(model.calls[1][2]) - 1 == 80, "no more than tokens"
    squares = loss(output)[2]["document_squares"]
    assert squares.tolist() == [(40**2 + 20**2 + 9 + 11**2) / 2] and squares.dtype == torch.float64
    assert room.largest == 80


def test_a_graph_counts_documents_that_have_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnDevice(Tensor):
        is_cuda = True

    room = DocumentRoom(CPU, has_graph=True)
    sizes = [room.size(torch.tensor(number), worst=1000) for number in (1, 3, 16, 17, 2)]
    assert sizes == [2, 8, 32, 64, 64], "launched kernels have those of a graph, which must not be the first"
    with torch.no_grad():
        assert room.size(torch.tensor(500), worst=1000) == 512, "an evaluation leaves graphs as they are"
    room.size(torch.tensor(40), worst=1000)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for number, overflows in ((3, 0), (128, 0), (129, 1), (1000, 2)):
        needed = torch.tensor(number).as_subclass(OnDevice)
        assert room.size(needed, worst=1000) == 128, "twice as many as any microbatch had"
        assert room.overflows.item() == overflows
    assert room.size(torch.tensor(1000).as_subclass(OnDevice), worst=100) == 100
