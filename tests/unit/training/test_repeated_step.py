"""A step whose passes a part declares useless is undone and repeated, and trains as one that was right at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from ranks import run_ranks
from small_run import Curve, SourceSamples, build_run, fingerprint, small_config, weights
from torch import Tensor

from megafp8.checkpoint.progress import Progress
from megafp8.config.settings import with_values
from megafp8.models.graph_room import GraphRoom
from megafp8.models.peer_exchange import load_room
from megafp8.training.cuda_graph import Batches, EagerPasses, StepHooks
from megafp8.training.evaluation import build_batches
from megafp8.training.run import Run
from megafp8.training.step import train_step
from megafp8.training.step_parts import AmaxHistories, RepeatedStep, state_parts

STEPS, REPEATED = 4, 2
DELAYED = (
    "--bf16 --transformer-impl emulated --fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 4 "
    "--fp8-amax-compute-algo max --max-skipped-steps 1"
)
BIASED = (
    "--transformer-impl local --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-token-dispatcher-type alltoall"
)


class ShortReplays(EagerPasses):
    """In place of a graph: the passes of one step see wrong tokens, as a replay with too few rows gives wrong sums."""

    has_graphs = True

    def __init__(self, room: GraphRoom) -> None:
        self.room, self.number, self.taken = room, 0, list[dict[str, Tensor]]()

    def run(self, forward_backward: Any, batches: Batches, num_microbatches: int, step_hooks: Any = ()) -> Any:
        assert batches is not None
        self.taken = [next(batches) for _ in range(num_microbatches)]
        self.number += 1
        if self.number != REPEATED:
            return forward_backward(iter(self.taken))
        self.room.overflows.add_(1)
        return forward_backward(iter([batch | {"tokens": torch.zeros_like(batch["tokens"])} for batch in self.taken]))

    def take_last_batches(self) -> Iterator[dict[str, Tensor]]:
        return iter(self.taken)


def trained(flags: str, is_short: bool) -> tuple[Curve, str]:
    run: Run = build_run(small_config("llama", flags))
    counted, restarts = torch.ones(2), list[str]()
    hooks = StepHooks(nullcontext, restart=lambda: restarts.append("statistics"))
    if is_short:
        room = load_room(torch.device("cpu"))
        part = RepeatedStep([room])
        part.counted.append(counted)
        run = dataclasses.replace(run, parts=(*run.parts, part), graph=ShortReplays(room))
    batch = run.global_batch_size
    batches = build_batches(run, SourceSamples(run.config.data.seq_length), 0, STEPS * batch, num_workers=0)
    progress = [Progress(step, step * batch) for step in range(STEPS)]
    results = [train_step(run, batches, each, step_hooks=[hooks]) for each in progress]
    assert not any(result.is_skipped for result in results)
    assert restarts == ["statistics"] * is_short and bool(counted.any()) != is_short
    return Curve([result.loss for result in results], [result.grad_norm for result in results]), fingerprint(
        weights(run)
    )


@pytest.mark.parametrize("flags", [DELAYED, BIASED], ids=["delayed scaling", "biases of experts"])
def test_a_repeated_step_leaves_no_trace(flags: str) -> None:
    assert run_ranks(1, trained, flags, True) == run_ranks(1, trained, flags, False)


def test_graphs_with_documents_may_be_repeated() -> None:
    def rooms(graph: str) -> list[bool]:
        run = build_run(
            small_config("llama", f"{DELAYED} --reset-attention-mask --eod-mask-loss --max-skipped-steps 0")
        )
        config = with_values(run.config, {"training.cuda_graph_impl": graph})
        state, room = run.training_state, run.documents_room
        parts = list(state_parts(config, state, run.implementation, torch.device("cpu"), True, room))
        (histories,) = (part for part in parts if isinstance(part, AmaxHistories))
        repeated = [part for part in parts if isinstance(part, RepeatedStep)]
        return [histories.can_skip, *(part.rooms == [room] for part in repeated)]

    assert run_ranks(1, rooms, "local") == [[True, True]]
    assert run_ranks(1, rooms, "none") == [[False]]


def test_a_graph_has_more_rows_than_any_load_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    room = load_room(torch.device("cpu"))
    needed = torch.tensor([1000], dtype=torch.int32)
    assert room.size(needed, worst=5000) == 1024  # complete tiles
    assert room.size(torch.tensor([0], dtype=torch.int32), worst=5000) == 128

    class OnDevice:
        is_cuda = True

        def __init__(self, load: int):
            self.load = torch.tensor([load])

        def __gt__(self, rows: int) -> Tensor:
            return self.load > rows

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for load, overflows in ((1200, 0), (1281, 1), (1280, 1)):
        assert room.size(OnDevice(load), worst=5000) == 1280  # type: ignore[arg-type]
        assert room.overflows.item() == overflows
    assert room.size(OnDevice(1), worst=640) == 640  # type: ignore[arg-type]
