"""Profile of a training step on one GPU: its kernels by group.

    python benchmarks/gpu_steps.py --shape A --rounds 1 --modes profiled=delayed --profile profiled

`gpu_steps.py` and `gpu_layouts.py` call `profiled`. The table has the milliseconds and the number of kernels of each
group, the idle time between kernels and its position, the time from the first kernel to the last, and the time in which
only communication ran. Kernels are identified by their names; kernels that match no pattern are `other` and are listed
by name below.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import torch

from benchmarks import timing

COMMUNICATION = "communication"
# The first pattern that a kernel's name contains decides.
GROUPS: tuple[tuple[str, str], ...] = (
    (COMMUNICATION, r"nccl"),
    ("attention", r"fmha|flash|sdpa|cudnn_generated|nvte_fused_attn|softmax_sum|dot_do_o|convert_dq"),
    ("optimizer", r"adam|multi_tensor(?!.*zerofunctor)|squared_sum|l2norm|lpnorm"),
    ("loss", r"cross_entropy|online_softmax|element_mul|log_softmax|nll_loss"),
    ("rope, QKV split", r"rope|rotary|rotate|qkv"),
    ("norm", r"rmsnorm|rms_norm|layernorm|layer_norm|ln_fwd|ln_bwd|_norm_"),
    ("SwiGLU", r"swiglu|silu|gated"),
    # Seen in profiles: cuBLAS's kernels on FP8 operands begin with a q (of FP8 results with an o), on BF16 with a t.
    ("GEMM FP8", r"gemm.*(e4m3|e5m2|fp8)|nvjet_(sm\d+_)?[qo]"),
    ("quantize", r"transpose|quantize|decode_|finish_product|random_full|transformer_engine.*cast|\bcast_kernel|amax"),
    ("quantize", r"block_scal|scale_inv|fp8"),
    ("GEMM BF16", r"gemm|nvjet|cutlass|xmma|splitk|cublas"),
    ("embedding", r"embedding|index_put|indexselect|gather|scatter|sort|radix"),
    ("fill", r"fill|memset|zerofunctor"),
    ("copy, cat, add", r"copy|cat|memcpy|add|mul|elementwise|reduce|vectorized"),
)
SHOWN_KERNELS = 12
PROFILED_STEPS = 2


@dataclass(frozen=True)
class Kernel:
    """One kernel of a profile; times in microseconds."""

    name: str
    start_us: float
    duration_us: float


@dataclass(frozen=True)
class Profile:
    """The kernels of some steps."""

    kernels: list[Kernel]
    steps: int

    def rows(self) -> list[tuple[str, float, float]]:
        """(group, ms a step, kernels a step), longest first."""
        found: dict[str, list[float]] = {}
        for kernel in self.kernels:
            found.setdefault(group_of(kernel.name), []).append(kernel.duration_us)
        rows = [(name, sum(t) / 1e3 / self.steps, len(t) / self.steps) for name, t in found.items()]
        return sorted(rows, key=lambda row: -row[1])

    def span_ms(self) -> float:
        """From the first kernel to the end of the last, a step."""
        ends = [kernel.start_us + kernel.duration_us for kernel in self.kernels]
        return (max(ends) - min(kernel.start_us for kernel in self.kernels)) / 1e3 / self.steps

    def busy_ms(self) -> float:
        """Time in which any kernel runs, a step."""
        return self.span_ms() - sum(ms for _, _, ms, _ in self.gaps())

    def exposed_ms(self) -> float:
        """Time in which communication runs and nothing else does, a step."""
        others = [kernel for kernel in self.kernels if group_of(kernel.name) != COMMUNICATION]
        return self.busy_ms() - (Profile(others, self.steps).busy_ms() if others else 0.0)

    def gaps(self) -> list[tuple[str, str, float, float]]:
        """(kernel before, kernel after, ms a step, times a step) of the time in which no kernel runs, longest first."""
        found: dict[tuple[str, str], list[float]] = {}
        ordered = sorted(self.kernels, key=lambda kernel: kernel.start_us)
        last = ordered[0]
        for kernel in ordered[1:]:
            gap = kernel.start_us - (last.start_us + last.duration_us)
            if gap > 0:
                found.setdefault((last.name, kernel.name), []).append(gap)
            if kernel.start_us + kernel.duration_us > last.start_us + last.duration_us:
                last = kernel
        rows = [(*names, sum(t) / 1e3 / self.steps, len(t) / self.steps) for names, t in found.items()]
        return sorted(rows, key=lambda row: -row[2])

    def longest(self) -> list[tuple[str, str, float, float]]:
        """(group, kernel, ms a step, kernels a step) of the kernels that take longest."""
        found: dict[str, list[float]] = {}
        for kernel in self.kernels:
            found.setdefault(kernel.name, []).append(kernel.duration_us)
        rows = [(group_of(name), name, sum(t) / 1e3 / self.steps, len(t) / self.steps) for name, t in found.items()]
        return sorted(rows, key=lambda row: -row[2])

    def table(self) -> str:
        """All of it for people."""
        span, busy = self.span_ms(), self.busy_ms()
        groups = timing.format_table(("group", "ms", "kernels"), self.rows())
        longest = [(group, name[:100], ms, count) for group, name, ms, count in self.longest()[:SHOWN_KERNELS]]
        kernels = timing.format_table(("group", "kernel", "ms", "calls"), longest)
        waits = [(before[:50], after[:50], ms, count) for before, after, ms, count in self.gaps()[:SHOWN_KERNELS]]
        gaps = timing.format_table(("idle after", "until", "ms", "times"), waits)
        spans = f"span {span:.1f} ms, busy {busy:.1f}, idle {span - busy:.1f}"
        exposed = f"only communication {self.exposed_ms():.1f}"
        return f"{groups}\n{spans}, {exposed}\n{gaps}\n{kernels}"


def group_of(name: str) -> str:
    """The group of a kernel, by its name."""
    text = name.lower()
    return next((group for group, pattern in GROUPS if re.search(pattern, text)), "other")


def profiled(step: Callable[[], Any], folder: Optional[Path] = None, steps: int = PROFILED_STEPS) -> Profile:
    """Profile some calls of `step`; with a folder, all kernels are written there too, a line each."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    events = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    kernels = [Kernel(event.name, event.time_range.start, event.time_range.elapsed_us()) for event in events]
    result = Profile(kernels, steps)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        lines = [f"{ms:10.3f} {count:8.1f} {group:18} {name}" for group, name, ms, count in result.longest()]
        number = len(list(folder.glob("kernels*.txt")))
        (folder / f"kernels{number}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return result
