"""Everything that is compared on one device, and its verdict."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from megafp8.recipes import registry
from megafp8.training.device_verification.attention import BACKENDS, AttentionTrial, try_backend
from megafp8.training.device_verification.casts import CastComparison, compare_casts, compare_devices, failure_text
from megafp8.training.device_verification.linears import LinearComparison, compare_linears
from megafp8.training.device_verification.native import NativeLayers
from megafp8.training.device_verification.speed import LinearSpeed, measure_speed
from megafp8.training.device_verification.steps import StepComparison, compare_steps

MAX_RUNS = 6
PARTS = ("casts", "linears", "steps", "speed", "attention")


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


@dataclass(frozen=True, kw_only=True)
class Verification:
    """Results. A part that was not asked for, or that the device cannot run, is empty.

    Attributes:
        casts: of native recipes, against the emulation.
        emulation: of all recipes on the GPU, against the emulation on the CPU.
        not_run: why a part did not run, by its name.
        failures: a line for each part that an error ended.
    """

    device: Device
    casts: tuple[CastComparison, ...] = ()
    emulation: tuple[CastComparison, ...] = ()
    linears: tuple[LinearComparison, ...] = ()
    steps: tuple[StepComparison, ...] = ()
    speed: tuple[LinearSpeed, ...] = ()
    attention: tuple[AttentionTrial, ...] = ()
    not_run: dict[str, str] = field(default_factory=dict)
    failures: tuple[str, ...] = ()

    @property
    def has_compared(self) -> bool:
        """Whether anything native was compared."""
        return bool(self.casts or self.linears or any(each.gap is not None for each in self.steps))

    @property
    def problems(self) -> list[str]:
        """A line for everything that is wrong; speed is no criterion."""
        found = [
            f"{each.recipe} {each.format}: {len(each.differing)} of {each.compared} casts differ{where}; the first is "
            f"{each.differing[0]}"
            for casts, where in ((self.casts, ""), (self.emulation, " between the emulation on GPU and CPU"))
            for each in casts
            if each.differing
        ]
        found += [
            f"{each.recipe} {each.format}: {each.gemm} of {' x '.join(map(str, each.sizes))} "
            + (f"failed: {each.failure}" if each.failure else f"differs by {each.bound_fraction:.2f} times its bound")
            for each in self.linears
            if not each.bound_fraction <= 1
        ]
        found += [
            f"{each.recipe} {each.format}: training: {each.failure or f'losses differ by {each.gap}'}"
            for each in self.steps
            if not each.is_right
        ]
        found += self.failures
        wrong = [each for each in self.attention if not each.is_right]
        return found + [
            f"attention, {each.backend}: {each.wrong or f'differs by {each.error:.1e} from FP32'}" for each in wrong
        ]


def te_formats(recipe: str) -> tuple[str, ...]:
    """Number formats that Transformer Engine has for a recipe."""
    return tuple(each for each in registry.get(recipe).formats if each != "e5m2")


def verify(
    device: Device, native: Optional[NativeLayers], recipes: Sequence[str], parts: Iterable[str], script: Path,
    report_progress: Callable[[str], None],
) -> Verification:  # fmt: skip
    """Run the parts, for the recipes that the device supports natively and, emulated, for the others.

    Args:
        native: the device's own layers; None where there are none.
        script: `pretrain_gpt.py`.
        report_progress: called with a line before each comparison.
    """
    requested = set(parts)
    native_recipes = [name for name in recipes if native is not None and name in device.native_recipes]
    found = Findings(report_progress)
    not_run: dict[str, str] = {}
    if native is not None and native_recipes:
        compare_native(native, native_recipes, requested, found)
    else:
        not_run = {
            part: "no chosen recipe is native on this device"
            for part in ("casts", "linears", "speed")
            if part in requested
        }
    compare_emulated(device, native_recipes, recipes, requested, script, found)
    if "attention" in requested and device.kind == "cuda":
        for backend in BACKENDS:
            report_progress(f"attention: {backend}")
            found.results["attention"].append(try_backend(backend))
    elif "attention" in requested:
        not_run["attention"] = "Transformer Engine's attention needs a GPU"
    results = {name: tuple(each) for name, each in found.results.items()}
    return Verification(device=device, not_run=not_run, failures=tuple(found.failures), **results)


@dataclass
class Findings:
    """What a verification has found so far; see `Verification`."""

    report_progress: Callable[[str], None]
    results: dict[str, list[Any]] = field(default_factory=lambda: {part: [] for part in (*PARTS, "emulation")})
    failures: list[str] = field(default_factory=list)


def compare_native(native: NativeLayers, recipes: Sequence[str], requested: Collection[str], found: Findings) -> None:
    """Casts and linears of the device against the emulation, and their speed."""
    for name in recipes:
        for number_format in te_formats(name):
            if "casts" in requested:
                found.report_progress(f"{name} {number_format}: casts")
                found.results["casts"].append(compare_casts(native, name, number_format))
            if "linears" in requested:
                found.report_progress(f"{name} {number_format}: linears")
                found.results["linears"] += compare_linears(native, name, number_format)
    if "speed" in requested:
        found.report_progress("speed of linears")
        formats = {name: registry.get(name).default_format for name in recipes}
        try:
            found.results["speed"] = measure_speed(native, formats)
        except Exception as error:
            found.failures.append(f"speed of linears: failed: {failure_text(error)}")


def compare_emulated(
    device: Device, native_recipes: Sequence[str], recipes: Sequence[str], requested: Collection[str], script: Path,
    found: Findings,
) -> None:  # fmt: skip
    """Training steps in all recipes, and the emulation on the GPU against that on the CPU.

    Nothing is timed here, and most of a short run is its start: several train while the casts are compared.
    """
    formats = {name: registry.get(name).default_format for name in recipes}
    with ThreadPoolExecutor(max(1, min(MAX_RUNS, (os.cpu_count() or 1) // 2))) as pool:
        runs = {
            name: pool.submit(compare_steps, name, number_format, script, name in native_recipes)
            for name, number_format in formats.items()
            if "steps" in requested
        }
        for name, number_format in formats.items():
            if "casts" in requested and device.kind == "cuda":
                found.report_progress(f"{name} {number_format}: emulation on GPU and CPU")
                try:
                    found.results["emulation"].append(compare_devices(name, number_format, "cuda"))
                except Exception as error:
                    found.failures.append(f"{name} {number_format}: emulation on GPU: failed: {failure_text(error)}")
        for name, run in runs.items():
            found.report_progress(f"{name} {formats[name]}: training steps")
            found.results["steps"].append(run.result())
