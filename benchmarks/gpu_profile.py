"""Profile of a training step on one GPU: its kernels by group.

    python benchmarks/gpu_steps.py --shape A --rounds 1 --modes profiled=delayed --profile profiled

`gpu_steps.py` and `gpu_layouts.py` call `profiled`. The table is that of `megafp8 report profile`
(`megafp8/analysis/profile.py`), without floors.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import torch

from megafp8.analysis.profile import KernelEvent, Profile

PROFILED_STEPS = 2


def profiled(step: Callable[[], Any], folder: Optional[Path] = None, steps: int = PROFILED_STEPS) -> Profile:
    """Profile some calls of `step`; with a folder, all kernels are written there too, a line each."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    events = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    kernels = [KernelEvent(event.name, event.time_range.start, event.time_range.elapsed_us()) for event in events]
    result = Profile(kernels, steps)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        lines = [f"{ms:10.3f} {count:8.1f} {group:18} {name}" for group, name, ms, count in result.longest()]
        number = len(list(folder.glob("kernels*.txt")))
        (folder / f"kernels{number}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return result
