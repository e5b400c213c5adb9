"""What is installed here and what the environment sets, without the run that needs it."""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Optional

import pytest
from device_targets import only_problem

from megafp8.config.layer_backends import EMULATED, TRANSFORMER_ENGINE
from megafp8.config.schema import LoggingConfig, PrecisionConfig, RunConfig
from megafp8.config.settings import with_values
from megafp8.device import capability
from megafp8.device.layer_support import (
    ATTENTION_SWITCHES,
    attention_switch_problems,
    offloading_problems,
    package_problems,
)


def test_a_missing_package_is_reported_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (problem,) = package_problems(LoggingConfig(wandb_project="mine"))
    assert problem.startswith("--wandb-project mine: the package wandb is not installed")
    assert package_problems(LoggingConfig()) == []


def test_offloading_needs_an_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NVTE_CPU_OFFLOAD_V1", raising=False)
    config = with_values(RunConfig(), {"training.fine_grained_activation_offloading": True})
    assert "NVTE_CPU_OFFLOAD_V1=1" in offloading_problems(config.training)[0]
    assert offloading_problems(RunConfig().training) == []
    monkeypatch.setenv("NVTE_CPU_OFFLOAD_V1", "1")
    assert offloading_problems(config.training) == []


def pretend_installed(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """A transformer-engine whose package is `folder`."""
    spec = importlib.machinery.ModuleSpec("transformer_engine", None, is_package=True)
    spec.submodule_search_locations = [str(folder)]
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.20.2")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)


def test_an_incomplete_installation_is_a_problem_with_its_fix(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With the bare package, every import of megatron-core fails."""
    package = tmp_path / "transformer_engine"
    package.mkdir()
    pretend_installed(monkeypatch, package)
    target = capability.detect_target()
    assert target.transformer_engine is None
    assert "pip uninstall transformer-engine" in only_problem(RunConfig(), target)


@pytest.mark.parametrize("folder", ["transformer_engine", "transformer_engine/wheel_lib", "."])
def test_a_complete_installation_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: str) -> None:
    package = tmp_path / "transformer_engine"
    (package / "wheel_lib").mkdir(parents=True)
    (tmp_path / folder / "transformer_engine_torch.cpython-311.so").touch()
    pretend_installed(monkeypatch, package)
    assert capability.transformer_engine_version() == ("2.20.2", None)


def test_a_missing_transformer_engine_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert capability.transformer_engine_version() == (None, None)


def test_environment_variables_that_change_the_recipe_give_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "1")
    monkeypatch.setenv("NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES", "0")
    blockwise = PrecisionConfig(fp8_format="e4m3", fp8_recipe="blockwise")
    (warning,) = capability.environment_warnings(blockwise, TRANSFORMER_ENGINE)
    assert warning.startswith("NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1 is set") and "scales are FP32" in warning
    assert capability.environment_warnings(blockwise, EMULATED) == []
    tensorwise = PrecisionConfig(fp8_format="e4m3", fp8_recipe="tensorwise")
    assert capability.environment_warnings(tensorwise, TRANSFORMER_ENGINE) == []
    monkeypatch.setenv("NVTE_FP8_DPA_BWD", "0")
    attention = [
        PrecisionConfig(fp8_format="hybrid", fp8_dot_product_attention=requested) for requested in (True, False)
    ]
    (warning,), nothing = (capability.environment_warnings(each, TRANSFORMER_ENGINE) for each in attention)
    assert "computes the backward pass of attention in BF16" in warning and nothing == []


@pytest.mark.parametrize(
    ("backend", "variables", "expected"),
    [
        ("auto", {"FLASH": "1"}, None),
        ("auto", {"FLASH": "1", "FUSED": "0"}, "choose with --attention-backend flash"),
        ("auto", {"FLASH": "0"}, "choose with --attention-backend fused"),
        ("flash", {"FLASH": "1", "FUSED": "0"}, None),
        ("fused", {"FLASH": "1"}, "NVTE_FLASH_ATTN=1 contradicts --attention-backend fused"),
    ],
)
def test_variables_that_contradict_the_attention_are_found_before_the_start(
    backend: str, variables: dict[str, str], expected: Optional[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ATTENTION_SWITCHES.values():
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(f"NVTE_{name}_ATTN", value)
    precision = PrecisionConfig(attention_backend=backend)
    problems = attention_switch_problems(precision, TRANSFORMER_ENGINE)
    assert problems == [] if expected is None else expected in problems[0]
    assert attention_switch_problems(precision, EMULATED) == []
