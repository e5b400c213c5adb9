"""A profile of training steps: the kernels of a trace by part, the time without any, and exposed communication.

Kernels are identified by their names; those that match no pattern are `other`. A trace without kernels of a GPU has the
operators of the CPU in their place: the outermost ones, so that each moment counts once.
"""

from __future__ import annotations

import bisect
import functools
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from megafp8.errors import DataError
from megafp8.utils.files import UnreadableFile, read_bytes
from megafp8.utils.strict_json import parse_json

COMMUNICATION, ATTENTION, OPTIMIZER, LOSS = "communication", "attention", "optimizer", "loss"
ROPE, NORM, ACTIVATION, QUANTIZE = "rope, QKV split", "norm", "SwiGLU", "quantize"
GEMM_FP8, GEMM_BF16, GEMM, EMBEDDING = "GEMM FP8", "GEMM BF16", "GEMM", "embedding"
FILL, COPY, OTHER = "fill", "copy, cat, add", "other"
Patterns = tuple[tuple[str, str], ...]
KERNELS: Patterns = (
    (COMMUNICATION, r"nccl"),
    (ATTENTION, r"fmha|flash|sdpa|cudnn_generated|nvte_fused_attn|softmax_sum|dot_do_o|convert_dq"),
    (OPTIMIZER, r"adam|multi_tensor(?!.*zerofunctor)|squared_sum|l2norm|lpnorm"),
    (LOSS, r"cross_entropy|online_softmax|element_mul|log_softmax|nll_loss"),
    (ROPE, r"rope|rotary|rotate|qkv"),
    (NORM, r"rmsnorm|rms_norm|layernorm|layer_norm|ln_fwd|ln_bwd|_norm_"),
    (ACTIVATION, r"swiglu|silu|gated"),
    # Seen in profiles: cuBLAS's kernels on FP8 operands begin with a q (of FP8 results with an o), on BF16 with a t.
    (GEMM_FP8, r"gemm.*(e4m3|e5m2|fp8)|nvjet_(sm\d+_)?[qo]"),
    (QUANTIZE, r"transpose|quantize|decode_|finish_product|random_full|transformer_engine.*cast|\bcast_kernel|amax"),
    (QUANTIZE, r"block_scal|scale_inv|fp8"),
    (GEMM_BF16, r"gemm|nvjet|cutlass|xmma|splitk|cublas"),
    (EMBEDDING, r"embedding|index_put|indexselect|gather|scatter|sort|radix"),
    (FILL, r"fill|memset|zerofunctor"),
    (COPY, r"copy|cat|memcpy|add|mul|elementwise|reduce|vectorized"),
)
"""Parts of kernels. The first pattern that a name contains decides, in small letters."""
OPERATORS: Patterns = (
    (COMMUNICATION, r"c10d|nccl|gloo"),
    (LOSS, r"cross_?entropy|log_?softmax|nll_?loss"),
    (ATTENTION, r"attention|softmax"),
    (OPTIMIZER, r"foreach|adam|lerp|addcdiv|addcmul|vector_norm"),
    (ROPE, r"rope|rotary|rotate"),
    (NORM, r"norm"),
    (ACTIVATION, r"swiglu|silu|gelu"),
    (QUANTIZE, r"quantize|cast"),
    (GEMM, r"linear|matmul|::(add|b|badd)?mm|mmbackward|gemm"),
    (EMBEDDING, r"embedding|index|gather|scatter"),
    (FILL, r"zero|fill|empty|ones"),
    (COPY, r"copy|cat|add|mul|div|sum|mean|pow|sqrt|slice|split|view|transpose|accumulategrad|::_?to$"),
)
"""Parts of the operators of a CPU."""
MAX_TRACE_BYTES = 1 << 31
GEMM_RANGE = re.compile(r".+ (fprop|dgrad|wgrad)")
GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
STEP = "ProfilerStep#"
"""What torch's profiler names a step with its number."""


@dataclass(frozen=True)
class KernelEvent:
    """One kernel of a profile; times in microseconds.

    Attributes:
        gemm: fprop, dgrad or wgrad, if it runs in such a range of a linear; else empty.
    """

    patterns: ClassVar[Patterns] = KERNELS

    name: str
    start_us: float
    duration_us: float
    gemm: str = ""

    @property
    def end_us(self) -> float:
        return self.start_us + self.duration_us

    @property
    def part(self) -> str:
        """The part of the step that it belongs to."""
        return part_of(self.name, self.patterns)


@dataclass(frozen=True)
class OperatorEvent(KernelEvent):
    """An operator of the CPU that no other operator called."""

    patterns: ClassVar[Patterns] = OPERATORS


@functools.cache
def part_of(name: str, patterns: Patterns = KERNELS) -> str:
    """The part of a kernel, by its name."""
    text = name.lower()
    return next((part for part, pattern in patterns if re.search(pattern, text)), OTHER)


@dataclass(frozen=True)
class Profile:
    """The kernels of some steps, at least one kernel; times per step."""

    kernels: list[KernelEvent]
    steps: int

    def rows(self) -> list[tuple[str, float, float]]:
        """(part, ms a step, kernels a step), longest first."""
        return self._rows(lambda kernel: kernel.part)

    def gemm_rows(self) -> list[tuple[str, float, float]]:
        """As `rows`, of GEMMs in a range that names theirs: `GEMM FP8 dgrad`."""
        gemms = (GEMM_FP8, GEMM_BF16)
        return self._rows(lambda kernel: f"{kernel.part} {kernel.gemm}" if kernel.gemm and kernel.part in gemms else "")

    def _rows(self, name_of: Callable[[KernelEvent], str]) -> list[tuple[str, float, float]]:
        found: dict[str, list[float]] = {}
        for kernel in self.kernels:
            found.setdefault(name_of(kernel), []).append(kernel.duration_us)
        rows = [(name, sum(t) / 1e3 / self.steps, len(t) / self.steps) for name, t in found.items() if name]
        return sorted(rows, key=lambda row: -row[1])

    def span_ms(self) -> float:
        """From the first kernel to the end of the last, a step."""
        first = min(kernel.start_us for kernel in self.kernels)
        return (max(kernel.end_us for kernel in self.kernels) - first) / 1e3 / self.steps

    def busy_ms(self) -> float:
        """Time in which any kernel runs, a step."""
        return self.span_ms() - sum(ms for _, _, ms, _ in self.gaps())

    def exposed_ms(self) -> float:
        """Time in which communication runs and nothing else does, a step."""
        others = [kernel for kernel in self.kernels if kernel.part != COMMUNICATION]
        return self.busy_ms() - (Profile(others, self.steps).busy_ms() if others else 0.0)

    def gaps(self) -> list[tuple[str, str, float, float]]:
        """(kernel before, kernel after, ms a step, times a step) of the time in which no kernel runs, longest first."""
        found: dict[tuple[str, str], list[float]] = {}
        ordered = sorted(self.kernels, key=lambda kernel: kernel.start_us)
        last = ordered[0]
        for kernel in ordered[1:]:
            gap = kernel.start_us - last.end_us
            if gap > 0:
                found.setdefault((last.name, kernel.name), []).append(gap)
            if kernel.end_us > last.end_us:
                last = kernel
        rows = [(*names, sum(t) / 1e3 / self.steps, len(t) / self.steps) for names, t in found.items()]
        return sorted(rows, key=lambda row: -row[2])

    def longest(self) -> list[tuple[str, str, float, float]]:
        """(part, kernel, ms a step, kernels a step) of the kernels that take longest."""
        found: dict[str, list[float]] = {}
        parts = {kernel.name: kernel.part for kernel in self.kernels}
        for kernel in self.kernels:
            found.setdefault(kernel.name, []).append(kernel.duration_us)
        rows = [(parts[name], name, sum(t) / 1e3 / self.steps, len(t) / self.steps) for name, t in found.items()]
        return sorted(rows, key=lambda row: -row[2])


# ---- traces of torch.profiler --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trace:
    """A trace that torch's profiler wrote.

    Attributes:
        profile: of its kernels, or of the CPU's operators where it has none.
        has_steps: whether it names steps; otherwise all of it counts as one.
    """

    profile: Profile
    has_kernels: bool
    has_steps: bool


def read_trace(path: Path) -> Trace:
    """Read a trace in Chrome's format, also compressed by gzip.

    Raises:
        DataError: it cannot be read, is no such trace, or has neither kernels nor operators.
    """
    try:
        content = read_bytes(path, MAX_TRACE_BYTES)
        tree = parse_json(_decompress(content, path) if content.startswith(b"\x1f\x8b") else content, path)
    except UnreadableFile as error:
        raise DataError(str(error)) from error
    try:
        events = [event for event in tree["traceEvents"] if event.get("ph") == "X"]
        ranges = map(_kernel, _of(events, "user_annotation"))
        steps = [(each.start_us, each.end_us) for each in ranges if each.name.startswith(STEP)]
        kernels = list(_kernels(events))
        calls = [] if kernels else list(_outermost(events))
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise DataError(
            f"{path}: not a trace of torch.profiler, or damaged: {type(error).__name__}: {error}"
        ) from error
    if steps:  # what runs between the profiled steps is in none
        calls = [each for each in calls if any(start <= each.start_us < end for start, end in steps)]
    if not kernels and not calls:
        raise DataError(f"{path}: the trace has no kernels of a GPU and no operators of a CPU in {len(steps)} steps")
    return Trace(Profile(kernels or calls, max(1, len(steps))), has_kernels=bool(kernels), has_steps=bool(steps))


def _decompress(content: bytes, path: Path) -> bytes:
    """Raises UnreadableFile: damaged, or larger than a trace may be."""
    stream = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)  # gzip
    try:
        found = stream.decompress(content, MAX_TRACE_BYTES)
    except zlib.error as error:
        raise UnreadableFile(f"not gzip: {error}", path) from error
    if not stream.eof:
        raise UnreadableFile(f"truncated, or has more than {MAX_TRACE_BYTES:,} bytes", path)
    return found


def _of(events: list[dict[str, Any]], *categories: str) -> list[dict[str, Any]]:
    return [event for event in events if event.get("cat") in categories]


def _kernel(event: dict[str, Any], kind: type[KernelEvent] = KernelEvent) -> KernelEvent:
    """Raises LookupError, TypeError and ValueError: damaged."""
    if not isinstance(event["name"], str):
        raise TypeError(f"name {event['name']!r}")
    return kind(event["name"], float(event["ts"]), float(event["dur"]))


def _kernels(events: list[dict[str, Any]]) -> Iterator[KernelEvent]:
    """The kernels of GPUs, with the GEMM in whose range they run."""
    ranges: dict[Any, list[tuple[float, float, str]]] = {}  # start, end and GEMM by stream; none overlaps another
    for event in _of(events, "gpu_user_annotation"):
        if found := GEMM_RANGE.fullmatch(event["name"]):
            each = _kernel(event)
            ranges.setdefault((event.get("pid"), event.get("tid")), []).append((each.start_us, each.end_us, found[1]))
    for of_stream in ranges.values():
        of_stream.sort()
    for event in _of(events, *GPU_CATEGORIES):
        kernel, of_stream = _kernel(event), ranges.get((event.get("pid"), event.get("tid")), [])
        before = bisect.bisect_right(of_stream, kernel.start_us, key=lambda each: each[0])
        if before and kernel.start_us < of_stream[before - 1][1]:
            kernel = replace(kernel, gemm=of_stream[before - 1][2])
        yield kernel


def _outermost(events: list[dict[str, Any]]) -> Iterator[KernelEvent]:
    """The operators that no other operator of their thread called."""
    ends: dict[Any, float] = {}
    for event in sorted(_of(events, "cpu_op"), key=lambda event: (float(event["ts"]), -float(event["dur"]))):
        operator, thread = _kernel(event, OperatorEvent), event.get("tid")
        if operator.start_us >= ends.get(thread, float("-inf")):
            ends[thread] = operator.end_us
            yield operator
