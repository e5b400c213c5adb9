"""Linears that a run has changed: the next step is not replayed, and a resumed run changes them or is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_run import small_config

from megafp8.checkpoint.progress import SMOOTHED, HighPrecisionFallback
from megafp8.config.layer_backends import EMULATED, LAYER_BACKENDS
from megafp8.errors import CheckpointError
from megafp8.training import run as training_run
from megafp8.training.resume import change_linears
from megafp8.training.run import Run
from megafp8.training.step_parts import OverwrittenBuffers

FALLBACK = HighPrecisionFallback("layers.1.linear_fc2", 3, "reason")
SMOOTH = HighPrecisionFallback("layers.0.linear_fc2", 3, "reason", SMOOTHED)
DELAYED, TENSORWISE = (f"--bf16 --fp8-format hybrid --fp8-recipe {recipe}" for recipe in ("delayed", "tensorwise"))


@pytest.mark.parametrize("linears", [(), (FALLBACK,)])
def test_the_graph_of_a_step_is_dropped_with_a_change(linears: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(training_run, "fall_back", lambda *given: calls.append(given))
    graph = SimpleNamespace(reset=lambda: calls.append("graph"))
    run = SimpleNamespace(
        training_state=SimpleNamespace(chunks=[]),
        implementation=EMULATED,
        graph=graph,
        parts=[OverwrittenBuffers(SimpleNamespace(choose_weights=lambda: calls.append("overwrite")))],  # type: ignore[arg-type]
    )
    Run.change_linears(run, linears)  # type: ignore[arg-type]
    assert calls == ([([], linears, EMULATED), "overwrite", "graph"] if linears else [])


def resumed(
    fallbacks: tuple[HighPrecisionFallback, ...], flags: str, implementation: str
) -> tuple[tuple[str, ...], list[Any]]:
    """The notes of a run that resumes, and what it changes."""
    changed: list[Any] = []
    run = SimpleNamespace(
        config=small_config("llama", flags),
        implementation=LAYER_BACKENDS[implementation],
        change_linears=changed.append,
    )
    return change_linears(run, Path("folder"), fallbacks), changed  # type: ignore[arg-type]


@pytest.mark.parametrize("implementation", ["emulated", "transformer_engine"])
def test_a_resumed_run_moves_the_same_linears(implementation: str) -> None:
    notes, changed = resumed((FALLBACK,), DELAYED, implementation)
    assert notes == ("layers.1.linear_fc2 stays in high precision, since step 3",) and changed == [(FALLBACK,)]
    assert resumed((FALLBACK, SMOOTH), "--bf16", implementation) == ((), [])


@pytest.mark.parametrize(
    ("fallback", "flags", "implementation", "message"),
    [
        (SMOOTH, DELAYED, "emulated", "layers.0.linear_fc2 is smoothed, which delayed scaling does not support"),
        (SMOOTH, TENSORWISE, "local", "layers.0.linear_fc2 is smoothed, which megatron-core's own layers do not"),
        (SMOOTH, f"{TENSORWISE} --fp8-param-gather --use-distributed-optimizer", "emulated",
         "layers.0.linear_fc2 is smoothed, which FP8 weights do not support"),
        (FALLBACK, f"{TENSORWISE} --fp8-param-gather --use-distributed-optimizer", "emulated",
         "layers.1.linear_fc2 is in high precision, which FP8 weights do not support"),
    ],
)  # fmt: skip
def test_a_run_that_cannot_change_them_is_refused(
    fallback: HighPrecisionFallback, flags: str, implementation: str, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        resumed((fallback,), flags, implementation)
