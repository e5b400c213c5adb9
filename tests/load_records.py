"""Steps of a small mixture with the record of its experts' load."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from small_run import Curve, train

from megafp8.metrics.expert_load import LayerLoad
from megafp8.training.extensions.expert_load import ExpertLoads
from megafp8.training.run import Run


def train_with_loads(run: Run, num_steps: int) -> tuple[Curve, dict[str, LayerLoad]]:
    """The curve, and the load of the experts in all steps, by layer."""
    written: list[Any] = []
    state: Any = SimpleNamespace(
        run=run, step=0, first_step=1, total_steps=num_steps, sinks=SimpleNamespace(write=written.append)
    )
    extension = ExpertLoads()
    extension.open(state)
    extension.before_step(state)
    curve = train(run, num_steps)
    extension.after_step(state, None)  # type: ignore[arg-type]  # not read
    return curve, written[0].layers
