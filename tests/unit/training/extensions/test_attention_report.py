"""The attention kernels that ran are recorded, and slow ones that were not requested end the run."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from megafp8.config.layer_backends import TRANSFORMER_ENGINE
from megafp8.mcore import cpu_patches

cpu_patches.install()

from megafp8.config.schema import DataConfig, PrecisionConfig, RunConfig
from megafp8.errors import CapabilityError
from megafp8.training.extensions.attention_report import report_attention


def report(chosen: str, monkeypatch: pytest.MonkeyPatch, has_borders: bool = False, **precision: Any) -> list[str]:
    """The record of the attention backend that Transformer Engine chose."""
    layers: Any = ModuleType("megafp8.te.layers")
    layers.selected_attention_backend = lambda: chosen
    monkeypatch.setitem(sys.modules, layers.__name__, layers)
    monkeypatch.setitem(sys.modules, "megafp8.te.runtime", layers)
    del sys.modules["megafp8.te.runtime"]  # imported with the stand-in, and forgotten afterwards
    written: list[Any] = []
    config = RunConfig(precision=PrecisionConfig(**precision), data=DataConfig(reset_attention_mask=has_borders))
    run = SimpleNamespace(config=config, implementation=TRANSFORMER_ENGINE)
    try:
        report_attention(run, SimpleNamespace(write=written.append), 1)  # type: ignore[arg-type]
    finally:
        details = [record.detail for record in written]
    return details


def test_the_backend_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert report("fused (cuDNN, sub-backend 1)", monkeypatch) == ["Transformer Engine fused (cuDNN, sub-backend 1)"]


def test_unfused_attention_ends_a_run_that_did_not_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CapabilityError, match="fell back to unfused attention") as caught:
        report("unfused", monkeypatch, bf16=True)
    assert f"CUDNN_HOME={Path(torch.__file__).parents[1]}/nvidia/cudnn" in str(caught.value)
    assert report("unfused", monkeypatch, bf16=True, attention_backend="unfused") == ["Transformer Engine unfused"]


def test_deterministic_attention_of_documents_may_be_unfused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CapabilityError, match="remove --deterministic-mode"):
        report("unfused", monkeypatch, has_borders=True, bf16=True, deterministic_mode=True)


def test_fp32_has_unfused_attention_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert report("unfused", monkeypatch) == ["Transformer Engine unfused"]


def test_attention_in_high_precision_ends_a_run_that_asked_for_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    requested = {"fp8_format": "hybrid", "fp8_dot_product_attention": True}
    with pytest.raises(CapabilityError, match="Transformer Engine uses fused"):
        report("fused (cuDNN, sub-backend 1)", monkeypatch, **requested)
    assert report("fused (cuDNN, sub-backend 2, FP8)", monkeypatch, **requested)
