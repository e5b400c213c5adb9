"""The planner for Python programs: layouts as flat objects."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Optional

from megafp8.config import flags
from megafp8.config.gpu_names import gpu_type
from megafp8.config.settings import settings_by_flag
from megafp8.device.gpus import GPUS
from megafp8.errors import ConfigError
from megafp8.planning.plan import make_plan
from megafp8.planning.report import GIB, layout_data


@dataclass(frozen=True, kw_only=True)
class LayoutSummary:
    """A layout that fits on the GPUs.

    Attributes:
        name: for example `TP 8 PP 4 DP 16, micro batch 1`.
        tensor, pipeline, chunks, context, data: parallel sizes; chunks are those of a pipeline stage.
        micro_batch_size: sequences.
        tokens_per_s_per_gpu, mfu_fraction, step_s: predicted speed.
        step_parts_s: seconds of a step by part.
        memory_bytes: of the GPU that needs the most.
        memory_parts_bytes: memory by part.
        sent_bytes: bytes that a GPU sends in a step, by process group.
        argv: flags of `megafp8 pretrain`.
    """

    name: str
    tensor: int
    pipeline: int
    chunks: int
    context: int
    data: int
    micro_batch_size: int
    tokens_per_s_per_gpu: float
    mfu_fraction: float
    step_s: float
    step_parts_s: dict[str, float]
    memory_bytes: int
    memory_parts_bytes: dict[str, int]
    sent_bytes: dict[str, float]
    argv: list[str]


def plan(
    model: str, gpus: int, gpu: str = "h200", recipe: Optional[str] = None, **settings: Any
) -> list[LayoutSummary]:
    """Find the layouts of a training run that fit on a number of GPUs. Neither a GPU nor torch is needed.

    Remarks on the plan, such as nearby numbers of GPUs that are faster, are Python warnings.
    `pandas.DataFrame(megafp8.plan(...))` is a table.

    Args:
        model: a model preset of `megafp8 pretrain --list-presets`.
        gpus: number of GPUs.
        gpu: kind of GPU, as of `megafp8 plan --gpu`.
        recipe: one of `megafp8.recipes.names()`; None is BF16.
        **settings: flags of `megafp8 pretrain`: `seq_length=4096`, `recompute_granularity="full"`. Layout and micro
            batch size are searched unless they are given.

    Returns:
        layouts, the fastest first.

    Raises:
        ConfigError: a wrong argument, or no layout fits.
    """
    try:
        kind = GPUS[gpu_type()(gpu)]
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"gpu {error}") from None
    if gpus < 1:
        raise ConfigError(f"gpus {gpus}: must be at least 1")
    argv = ["--model-preset", model]
    if recipe is not None:
        argv += ["--recipe", recipe]
    for name, value in settings.items():
        argv += _words(f"--{name.replace('_', '-')}", value)
    found = make_plan(flags.parse(argv), kind, gpus, ())
    for text in found.warnings:
        warnings.warn(text, stacklevel=2)
    if not found.search.layouts:
        needed = (found.search.smallest_bytes or 0) / GIB
        raise ConfigError(
            f"{model} does not fit on {gpus:,} x {gpu}: the smallest layout needs {needed:.1f} GiB of "
            f"{kind.memory_bytes / GIB:.1f} GiB per GPU; use more GPUs, or micro_batch_size=1"
        )
    return [LayoutSummary(**layout_data(layout)) for layout in found.search.layouts]


def _words(flag: str, value: Any) -> Iterator[str]:
    """A setting as words of a command line. What is wrong with it is said where they are parsed."""
    setting = settings_by_flag().get(flag)
    if value is False and setting is not None and setting.type is bool:
        yield from setting.off[:1]  # without such a flag, False is the default
        return
    yield flag
    if value is not True:
        yield from map(str, value) if isinstance(value, (list, tuple)) else (str(value),)
