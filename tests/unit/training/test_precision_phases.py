"""The format that megatron-core's layers read in each phase of a precision schedule."""

from types import SimpleNamespace

import pytest
import torch

from megafp8.config.layer_backends import TRANSFORMER_ENGINE
from megafp8.config.schema import ModelConfig, PrecisionConfig, RunConfig
from megafp8.training import precision
from megafp8.training.precision import PrecisionPhases

SCHEDULE = "bf16:2,fp8:4,fp8[layers.1.*=bf16]"


def test_the_format_is_that_of_the_phase_whatever_the_model_was_in_before(monkeypatch: pytest.MonkeyPatch) -> None:
    entered = []
    runtime = SimpleNamespace(set_precision=lambda model, precision, chunks: entered.append(precision.precision_map))
    monkeypatch.setattr(precision, "layer_runtime", lambda implementation: runtime)
    config = RunConfig(
        model=ModelConfig(num_layers=2),
        precision=PrecisionConfig(bf16=True, fp8_format="hybrid", fp8_recipe="tensorwise", fp8_schedule=SCHEDULE),
    )
    core = SimpleNamespace(fp8="hybrid", fp4=None)
    phases = [PrecisionPhases(config, core, [torch.nn.Module()], TRANSFORMER_ENGINE) for _ in range(2)]  # type: ignore
    # The second object is that of a copy of the run, such as a trial makes.
    found = [(number, step, phases[number].enter(step), core.fp8) for number, step in ((0, 1), (0, 2), (1, 3), (1, 5))]
    assert found == [(0, 1, True, None), (0, 2, False, None), (1, 3, True, "hybrid"), (1, 5, True, "hybrid")]
    assert entered == [(), (), ("layers.1.*=bf16",)]


def test_without_a_schedule_nothing_changes() -> None:
    core = SimpleNamespace(fp8="hybrid", fp4=None)
    assert not PrecisionPhases(RunConfig(), core, [], TRANSFORMER_ENGINE).enter(1)  # type: ignore[arg-type]
    assert core.fp8 == "hybrid"
