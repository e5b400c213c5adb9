"""Fits the constants of `megafp8/planning/planned_run.py` to the rows marked `fit`, each to the kernels it describes.

The speed of block-scaled GEMMs is fitted to published rows, because no GPU with such kernels was available.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable

from benchmarks.planner_measurements import COMMON, FIT, GROUPS, MEASUREMENTS, SHAPES, SMALL_LINEARS, Measurement
from benchmarks.planner_published import groups
from megafp8.config import iterations, model_shapes
from megafp8.planning import compute, step_time
from megafp8.planning.fit import linear_casts_s
from megafp8.planning.planned_run import Calibration, PlannedRun, layer_gemms
from megafp8.recipes.base import Gemm, Operand

DIGITS = 3
ROUNDS = 8


def fit() -> Calibration:
    """All constants, to three digits. Fractions of memory come first, since GEMMs may be bound by it."""
    found = dataclasses.replace(Calibration(), gemm_start_s=0.0, cast_start_s=0.0)
    for constant, group in (("memory_fraction", "passes"), ("optimizer_fraction", "optimizer")):
        ratio = ratio_of(found, group, [key for key in GROUPS if group in GROUPS[key]])
        found = with_values(found, **{constant: getattr(found, constant) * ratio})
    for _ in range(ROUNDS):  # large tensors give fractions, small ones what is left beside them
        for constant, group, recipes in (
            ("cast_fraction", "casts", ("delayed", "tensorwise")),
            ("blockwise_cast_fraction", "casts", ("blockwise",)),
            ("bf16_gemm_fraction", "linears", ("bf16",)),
            ("fp8_gemm_fraction", "linears", ("delayed", "tensorwise")),
            ("blockwise_gemm_fraction", "linears", ("blockwise",)),
        ):
            ratio = ratio_of(found, group, [key for key in GROUPS if key[1] in recipes])
            found = with_values(found, **{constant: getattr(found, constant) * ratio})
        found = with_values(found, **start_constants(found))
    found = with_values(found, **attention_constants(found))
    found = with_values(found, **host_constants(), busy_fraction=busy_fraction())
    found = with_values(found, nvlink_fraction=nvlink_fraction(found))
    return with_values(found, block_scaled_gemm_fraction=block_scaled_gemm_fraction(found))


def with_values(calibration: Calibration, **values: float) -> Calibration:
    """A copy with some constants changed, rounded."""
    rounded = {name: float(f"{value:.{DIGITS}g}") for name, value in values.items()}
    return dataclasses.replace(calibration, **rounded)


def rows(shape: str, recipe: str) -> Measurement:
    """The profiled row."""
    return next(row for row in MEASUREMENTS if row.name == f"mcore {shape} {recipe}")


def compute_ms(calibration: Calibration, shape: str, recipe: str, group: str) -> float:
    """Predicted milliseconds of a group of kernels in a step."""
    run = rows(shape, recipe).run(calibration)
    parts = step_time.step_time(run).parts
    if group != "passes":
        return 1e3 * parts[group]
    names = ("norms, activation, rotary", "loss")
    return 1e3 * sum(parts.get(name, 0.0) for name in names)


def ratio_of(calibration: Calibration, group: str, keys: list[tuple[str, str]]) -> float:
    """Predicted to measured time of a group of kernels over several profiles."""
    return statistics.geometric_mean(compute_ms(calibration, *key, group) / GROUPS[key][group] for key in keys)


def start_constants(calibration: Calibration) -> dict[str, float]:
    """What small GEMMs and casts take beside their FLOPs and bytes, in the middle of all that were measured."""
    predicted_us = small_linears_us(dataclasses.replace(calibration, gemm_start_s=0.0, cast_start_s=0.0))
    of_gemms, of_casts = [], []
    for (name, recipe), (gemms_us, casts_us) in SMALL_LINEARS.items():
        predicted_gemms_us, predicted_casts_us = predicted_us[name, recipe]
        of_gemms.append((gemms_us - predicted_gemms_us) / len(Gemm))
        if recipe != "bf16":
            of_casts.append((casts_us - predicted_casts_us) / len(Operand))
    return {"gemm_start_s": 1e-6 * statistics.median(of_gemms), "cast_start_s": 1e-6 * statistics.median(of_casts)}


def small_linears_us(calibration: Calibration) -> dict[tuple[str, str], tuple[float, float]]:
    """What SMALL_LINEARS would be by the model."""
    row = Measurement(name="C", flags=f"{COMMON} {SHAPES['C']} --vocab-size 50304", role=FIT)
    run = row.run(calibration)
    linears = {linear.name: linear for linear in model_shapes.gemm_dimensions(run.config)}
    found = {}
    for name, recipe in SMALL_LINEARS:
        products = [product for product in layer_gemms(run) if product.linear == name]
        gemms_s = sum(compute.gemm_s(run, recipe, *product.shape) for product in products)
        found[name, recipe] = 1e6 * gemms_s, 1e6 * linear_casts_s(run, recipe, linears[name])
    return found


def attention_constants(calibration: Calibration) -> dict[str, float]:
    """Two constants from attention at two lengths: 1 / fraction is linear in 1 / length."""
    inverse = {}
    for shape in ("A", "B"):
        run = rows(shape, "bf16").run(calibration)
        layers = len(run.sizes.layers[0])
        model_flops = layers * attention_flops(run)
        length = run.config.data.seq_length
        assert length is not None
        rate = model_flops / (GROUPS[shape, "bf16"]["attention"] * 1e-3)
        inverse[length] = run.gpu.peak.flops["bf16"] / rate
    (short, at_short), (long, at_long) = sorted(inverse.items())
    slope = (at_short - at_long) / (1 / short - 1 / long)
    at_infinity = at_long - slope / long
    return {"attention_fraction": 1 / at_infinity, "attention_half_tokens": slope / at_infinity}


def attention_flops(run: PlannedRun) -> float:
    """Of one layer, as the time model counts them."""
    plain = dataclasses.replace(run.calibration, attention_fraction=1.0, attention_half_tokens=0.0)
    return compute.attention_s(dataclasses.replace(run, calibration=plain)) * run.gpu.peak.flops["bf16"]


def busy_fraction() -> float:
    """Kernels of a profiled step over the time of a step that was not profiled."""
    whole = [key for key, groups in GROUPS.items() if "passes" in groups]
    return statistics.geometric_mean(sum(GROUPS[key].values()) / (rows(*key).step_ms or 0.0) for key in whole)


def host_constants() -> dict[str, float]:
    """A step that waits for the host, divided by the layers that it runs."""
    found = {}
    for name, recipe in (("bf16_host_layer_s", "bf16"), ("fp8_host_layer_s", "tensorwise")):
        row = next(row for row in MEASUREMENTS if row.name == f"megafp8 small {recipe}")
        assert row.step_ms is not None
        passes = iterations.num_microbatches(row.config, 1) * (row.config.model.num_layers or 0)
        found[name] = row.step_ms * 1e-3 / passes
    return found


def nvlink_fraction(calibration: Calibration) -> float:
    """The fraction with which the step on four tensor-parallel ranks takes as long as measured, by bisection."""
    (row,) = (row for row in MEASUREMENTS if row.role == FIT and row.num_gpus > 1)
    assert row.step_ms is not None

    def is_slow(fraction: float) -> bool:
        predicted = step_time.step_time(row.run(dataclasses.replace(calibration, nvlink_fraction=fraction)))
        return predicted.seconds * 1e3 > row.step_ms

    return bisected(is_slow)


def block_scaled_gemm_fraction(calibration: Calibration) -> float:
    """The fraction with which MXFP8's speed to tensorwise is as published, in the mean of the pairs, by bisection."""
    pairs = [{row.recipe: row for row in rows} for rows in groups() if rows[0].role == FIT]
    runs = [{recipe: row.search().layouts[0].run for recipe, row in pair.items()} for pair in pairs]
    published = [pair["mxfp8"].tokens_per_s / pair["tensorwise"].tokens_per_s for pair in pairs]

    def is_slow(fraction: float) -> bool:
        tried = dataclasses.replace(calibration, block_scaled_gemm_fraction=fraction)
        ratios = []
        for pair, wanted in zip(runs, published, strict=True):
            seconds = {
                recipe: step_time.step_time(dataclasses.replace(run, calibration=tried)).seconds
                for recipe, run in pair.items()
            }
            ratios.append(seconds["tensorwise"] / seconds["mxfp8"] / wanted)
        return statistics.geometric_mean(ratios) < 1

    return bisected(is_slow)


def bisected(is_slow: Callable[[float], bool]) -> float:
    """The fraction between too slow and too fast."""
    low, high = 0.05, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if is_slow(middle) else (low, middle)
    return middle
