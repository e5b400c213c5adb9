"""Facts about the device that is verified."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Optional

import torch

from megafp8.device import capability, platform
from megafp8.training.device_verification.verify import Device

PACKAGES = ("megafp8", "torch", "megatron-core", "transformer-engine", "triton", "flash-attn")


def find_device(packages: Mapping[str, str], driver: Optional[str]) -> Device:
    """This machine's GPU, or its CPU.

    Args:
        packages: versions of installed packages by name.
        driver: version of the GPU's driver.
    """
    target = capability.detect_target()
    versions = {"Python": sys.version.split()[0]} | {name: packages[name] for name in PACKAGES if name in packages}
    is_gpu = target.kind == "cuda"
    if is_gpu:
        found = {"driver": driver, "CUDA": torch.version.cuda, "cuDNN": str(torch.backends.cudnn.version())}
        versions |= {name: value for name, value in found.items() if value is not None}
    return Device(
        name=torch.cuda.get_device_name() if is_gpu else platform.cpu_name(),
        kind=target.kind,
        compute_capability=target.compute_capability if is_gpu else None,
        versions=versions,
        native_recipes=tuple(capability.native_recipes(target)),
    )
