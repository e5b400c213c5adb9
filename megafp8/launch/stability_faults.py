"""The runs of the stability suite with planted faults: each fault without a repair, and with each repair.

The names of the arms are those that `analysis/stability_faults.py` reads.
"""

from __future__ import annotations

import math

from megafp8.config import derived
from megafp8.config.planted_faults import (
    ALIGNED_SWIGLU,
    GRADUAL_FAULTS,
    INFINITE_ACTIVATION,
    INFLATED_QK,
    OUTLIER_CHANNEL,
    SPIKE_BATCH,
)
from megafp8.config.rules.planted_faults import unsupported_in_model
from megafp8.config.schema import ModelConfig, RunConfig
from megafp8.config.settings import settings_by_flag
from megafp8.launch.study import Option

CLEAN, REPAIR = "clean", "_with_"
FIRST_FRACTION = 0.25  # of the run, before the fault
FIRST_UPDATE = 34  # spikes are compared with 32 updates
LARGEST_FACTOR = 27  # octaves by which a channel has grown at the end of the run
MAX_GROWTH = 0.14  # octaves in a step
WARN = "--fp8-guard warn"
SPIKES = "--spike-policy skip --max-skipped-steps 3"
ARMS = {
    CLEAN: f"{SPIKES} {WARN}",
    OUTLIER_CHANNEL: WARN,
    f"{OUTLIER_CHANNEL}{REPAIR}bf16-layer": f"{SPIKES} --fp8-guard bf16-layer",
    ALIGNED_SWIGLU: WARN,
    f"{ALIGNED_SWIGLU}{REPAIR}bf16-layer": f"{SPIKES} --fp8-guard bf16-layer",
    f"{ALIGNED_SWIGLU}{REPAIR}smooth-swiglu": f"{SPIKES} --fp8-guard smooth-swiglu",
    INFLATED_QK: WARN,
    SPIKE_BATCH: WARN,
    f"{SPIKE_BATCH}{REPAIR}skip": f"{SPIKES} {WARN}",
    INFINITE_ACTIVATION: WARN,
    f"{INFINITE_ACTIVATION}{REPAIR}skip": f"{SPIKES} {WARN} --on-nonfinite-activation skip",
    f"{INFINITE_ACTIVATION}{REPAIR}bf16": f"{SPIKES} {WARN} --on-nonfinite-activation bf16",
}
"""Name of an arm to its flags, but for those of the fault. Without a repair no step is skipped: a skip is a repair."""
FAULT_SETTINGS = {"precision.transformer_impl", "training.fp8_guard_interval"} | {
    settings_by_flag()[word].name for flags in ARMS.values() for word in flags.split() if word.startswith("--")
}
"""Settings of the arms, which the user cannot give."""


def fault_step(train_iters: int) -> int:
    """The first step with the fault."""
    return max(FIRST_UPDATE, round(FIRST_FRACTION * train_iters))


def left_out_faults(model: ModelConfig) -> list[str]:
    """Why a model cannot have some of the faults; their arms are left out."""
    faults = dict.fromkeys(name.partition(REPAIR)[0] for name in ARMS)
    return [problem for fault in faults for problem in unsupported_in_model(fault, model)]


def fault_arms(config: RunConfig) -> tuple[Option, ...]:
    """The arms of a recipe, without those of faults that its model cannot have.

    Args:
        config: of the recipe's runs. Smoothing needs a recipe without amax history.
    """
    assert config.training.train_iters is not None
    num_steps = config.training.train_iters
    first = fault_step(num_steps)
    octaves = min(MAX_GROWTH, LARGEST_FACTOR / max(1, num_steps - first))
    arms = []
    for name, flags in ARMS.items():
        fault, _, repair = name.partition(REPAIR)
        if repair == "smooth-swiglu" and derived.is_stateful(config.precision):
            continue
        if any(unsupported_in_model(fault, config.model)):
            continue
        words = ["--transformer-impl", "emulated", *flags.split(), "--fp8-guard-interval", "10"]
        if fault != CLEAN:
            words += ["--planted-fault", fault, "--planted-fault-step", str(first)]
        if fault in GRADUAL_FAULTS:
            words += ["--planted-fault-growth", f"{2**octaves:.5g}"]
        arms.append(Option(name=name, flags=tuple(words)))
    return tuple(arms)


def length_problems(config: RunConfig) -> list[str]:
    """Why a run is too short for faults; empty if it is not."""
    num_steps, needed = config.training.train_iters, math.ceil(FIRST_UPDATE + LARGEST_FACTOR / MAX_GROWTH)
    if num_steps is not None and num_steps >= needed:
        return []
    return [f"--train-iters {num_steps} is too short for faults to grow: give at least --train-iters {needed}"]
