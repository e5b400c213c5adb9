"""Records of the experts' load: of steps of a small mixture, or made from loads."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from small_run import Curve, train

from megafp8.metrics.expert_load import ExpertRecord, LayerLoad, layer_load
from megafp8.metrics.sinks import Sinks
from megafp8.training.extensions.expert_load import ExpertLoads
from megafp8.training.run import Run

MANY = 1000


def records_of(*steps: Sequence[float], topk: int = 1, num_remaining: float = MANY) -> list[ExpertRecord]:
    """A record of layer 3 for the tokens of each expert in each step."""
    loads = [layer_load(counts, topk, sum(counts) / topk, 1.0, num_remaining, None) for counts in steps]
    return [ExpertRecord(step=step, layers={"3": load}) for step, load in enumerate(loads)]


def train_with_loads(run: Run, num_steps: int) -> tuple[Curve, dict[str, LayerLoad]]:
    """The curve, and on rank 0 the load of the experts in all steps, by layer; empty on others."""
    written: list[Any] = []
    sinks = Sinks([SimpleNamespace(write=written.append, close=lambda: None)])
    state: Any = SimpleNamespace(run=run, step=0, first_step=1, total_steps=num_steps, sinks=sinks)
    extension = ExpertLoads()
    extension.open(state)
    extension.before_step(state)
    curve = train(run, num_steps)
    extension.after_step(state, None)  # type: ignore[arg-type]  # not read
    sinks.flush()
    return curve, written[0].layers if written else {}
