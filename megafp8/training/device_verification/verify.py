"""Everything that is compared on one device, and its verdict."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Optional

import torch

from megafp8.device import capability, platform
from megafp8.device.cuda_libraries import cuda_library_versions
from megafp8.recipes import registry
from megafp8.training.device_verification import comparisons
from megafp8.training.device_verification.attention import BACKENDS, AttentionTrial, try_backend
from megafp8.training.device_verification.comparisons import (
    CastComparison,
    LinearComparison,
    LinearSpeed,
    NativeLayers,
    failure_text,
)
from megafp8.training.device_verification.steps import StepComparison, compare_steps

MAX_RUNS = 6
PACKAGES = ("megafp8", "torch", "megatron-core", "transformer-engine", "triton", "flash-attn")


@dataclass(frozen=True, kw_only=True)
class Device:
    """What is verified.

    Attributes:
        name: of the GPU or the CPU.
        kind: "cuda" or "cpu".
        compute_capability: of a GPU.
        versions: of Python, the driver and the libraries, by name.
        native_recipes: those that Transformer Engine supports on it.
    """

    name: str
    kind: str
    compute_capability: Optional[tuple[int, int]] = None
    versions: dict[str, str]
    native_recipes: tuple[str, ...]


def find_device(packages: Mapping[str, str]) -> Device:
    """This machine's GPU, or its CPU.

    Args:
        packages: versions of installed packages by name.
    """
    target = capability.detect_target()
    versions = {"Python": sys.version.split()[0]} | {name: packages[name] for name in PACKAGES if name in packages}
    is_gpu = target.kind == "cuda"
    if is_gpu:
        found = {"CUDA": torch.version.cuda} | cuda_library_versions()
        versions |= {name: value for name, value in found.items() if value is not None}
    return Device(
        name=torch.cuda.get_device_name() if is_gpu else platform.cpu_name(),
        kind=target.kind,
        compute_capability=target.compute_capability if is_gpu else None,
        versions=versions,
        native_recipes=tuple(capability.native_recipes(target)),
    )


@dataclass(kw_only=True)
class Verification:
    """Results. A part that was not asked for, or that the device cannot run, is empty.

    Attributes:
        casts: of native recipes, against the emulation.
        emulation: of all recipes on the GPU, against the emulation on the CPU.
        not_run: why a part did not run, by its name.
        failures: a line for each part that an error ended.
    """

    device: Device
    casts: list[CastComparison] = field(default_factory=list)
    emulation: list[CastComparison] = field(default_factory=list)
    linears: list[LinearComparison] = field(default_factory=list)
    steps: list[StepComparison] = field(default_factory=list)
    speed: list[LinearSpeed] = field(default_factory=list)
    attention: list[AttentionTrial] = field(default_factory=list)
    not_run: dict[str, str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    @property
    def has_compared(self) -> bool:
        """Whether anything native was compared."""
        return bool(self.casts or self.linears or any(each.gap is not None for each in self.steps))

    @property
    def problems(self) -> list[str]:
        """A line for everything that is wrong; speed is no criterion."""
        return [
            *(each.problem() for each in self.casts if each.differing),
            *(each.problem(" between the emulation on GPU and CPU") for each in self.emulation if each.differing),
            *(each.problem() for each in self.linears if not each.bound_fraction <= 1),
            *(each.problem() for each in self.steps if not each.is_right),
            *self.failures,
            *(each.problem() for each in self.attention if not each.is_right),
        ]


def te_formats(recipe: str) -> tuple[str, ...]:
    """Number formats that Transformer Engine has for a recipe."""
    return tuple(each for each in registry.get(recipe).formats if each != "e5m2")


Report = Callable[[str], None]


def verify(
    device: Device, native: Optional[NativeLayers], recipes: Sequence[str], parts: Collection[str], script: Path,
    report_progress: Report,
) -> Verification:  # fmt: skip
    """Run the parts, for the recipes that the device supports natively and, emulated, for the others.

    Args:
        native: the device's own layers; None where there are none.
        script: `pretrain_gpt.py`.
        report_progress: called with a line before each comparison.
    """
    native_recipes = [name for name in recipes if native is not None and name in device.native_recipes]
    found = Verification(device=device)
    if native is not None and native_recipes:
        compare_native(native, native_recipes, parts, found, report_progress)
    else:
        reason = "no chosen recipe is native on this device"
        found.not_run |= {part: reason for part in ("casts", "linears", "speed") if part in parts}
    compare_emulated(native_recipes, recipes, parts, script, found, report_progress)
    if "attention" in parts and device.kind == "cuda":
        for backend in BACKENDS:
            report_progress(f"attention: {backend}")
            found.attention.append(try_backend(backend))
    elif "attention" in parts:
        found.not_run["attention"] = "Transformer Engine's attention needs a GPU"
    return found


def compare_native(
    native: NativeLayers, recipes: Sequence[str], parts: Collection[str], found: Verification, report_progress: Report
) -> None:
    """Casts and linears of the device against the emulation, and their speed."""
    for name in recipes:
        for number_format in te_formats(name):
            if "casts" in parts:
                report_progress(f"{name} {number_format}: casts")
                found.casts.append(comparisons.compare_casts(native, name, number_format))
            if "linears" in parts:
                report_progress(f"{name} {number_format}: linears")
                found.linears += comparisons.compare_linears(native, name, number_format)
    if "speed" in parts:
        report_progress("speed of linears")
        formats = {name: registry.get(name).default_format for name in recipes}
        try:
            found.speed += comparisons.measure_speed(native, formats)
        except Exception as error:
            found.failures.append(f"speed of linears: failed: {failure_text(error)}")


def compare_emulated(
    native_recipes: Sequence[str], recipes: Sequence[str], parts: Collection[str], script: Path, found: Verification,
    report_progress: Report,
) -> None:  # fmt: skip
    """Training steps in all recipes, and the emulation on the GPU against that on the CPU.

    Nothing is timed here, and most of a short run is its start: several train while the casts are compared.
    """
    formats = {name: registry.get(name).default_format for name in recipes}
    with ThreadPoolExecutor(max(1, min(MAX_RUNS, (os.cpu_count() or 1) // 2))) as pool:
        runs = {
            name: pool.submit(compare_steps, name, number_format, script, name in native_recipes)
            for name, number_format in formats.items()
            if "steps" in parts
        }
        for name, number_format in formats.items():
            if "casts" in parts and found.device.kind == "cuda":
                report_progress(f"{name} {number_format}: emulation on GPU and CPU")
                try:
                    found.emulation.append(comparisons.compare_devices(name, number_format, "cuda"))
                except Exception as error:
                    found.failures.append(f"{name} {number_format}: emulation on GPU: failed: {failure_text(error)}")
        for name, run in runs.items():
            report_progress(f"{name} {formats[name]}: training steps")
            found.steps.append(run.result())
