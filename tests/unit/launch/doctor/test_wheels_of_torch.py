"""The NVIDIA wheels that torch requires, from the metadata of installed packages."""

from __future__ import annotations

import importlib.metadata

import pytest

from megafp8.launch.doctor import facts

REQUIREMENTS = {
    "torch": [
        "filelock", 'cuda-toolkit[cublas,cudart]==13.0.2; platform_system == "Linux"',
        'nvidia-cudnn-cu13==9.19.0.56; platform_system == "Linux"', "nvidia-nccl-cu13>=2.28", "triton==3.6.0",
    ],
    "cuda-toolkit": ["nvidia-cublas==13.1.0.3.*; (sys_platform == 'linux') and extra == 'cublas'",
        "nvidia-nvtx==13.0.85.*; extra == 'nvtx'"],
}  # fmt: skip


def test_pins_of_torch_and_of_the_toolkit_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "requires", REQUIREMENTS.__getitem__)
    assert facts.wheels_required_by("torch") == {
        "nvidia-cublas": "13.1.0.3", "nvidia-cudnn-cu13": "9.19.0.56"
    }  # fmt: skip


def test_a_missing_torch_requires_nothing() -> None:
    assert facts.wheels_required_by("no-such-package") == {}
