"""Lack of memory in a run: the check of its limits, what has the memory, and the flags that need less."""

from __future__ import annotations

import ctypes
import mmap
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Optional

from megafp8.config import derived
from megafp8.config.schema import RunConfig
from megafp8.errors import OutOfMemory
from megafp8.resources.savings import Saving
from megafp8.training.memory_report import MemoryReport
from megafp8.utils.best_effort import reason_of, warn
from megafp8.utils.memory import cause, limits

# More than a rank starts: three for each of about 17 groups of gloo, and those of torch, loaders and saves.
NUM_THREADS = 64
# Of a thread where `ulimit -s` is unlimited.
DEFAULT_STACK_BYTES = 2 << 20
# What libraries take beside them. oneDNN crashes where it cannot map memory for the code that it generates.
WORKING_BYTES = 256 << 20
# With more, there is memory for a heap of each thread, which is faster than one for all.
SMALL_HEADROOM_BYTES = 8 << 30
M_ARENA_MAX = -8  # of mallopt(3)


def check_limits() -> None:
    """Check that the limits of this process leave memory for its threads. C++ libraries that cannot start one abort or
    wait forever.

    Raises:
        OutOfMemory: they do not.
    """
    if not (known := list(limits())):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # of glibc only
    if mallopt is not None and not fits(SMALL_HEADROOM_BYTES):
        mallopt(M_ARENA_MAX, 1)  # each thread would reserve 64 MiB of addresses for a heap of its own
    stack = resource.getrlimit(resource.RLIMIT_STACK)[0]
    is_unlimited = stack == resource.RLIM_INFINITY
    num_bytes = NUM_THREADS * (DEFAULT_STACK_BYTES if is_unlimited else stack)
    if not fits(num_bytes + WORKING_BYTES):
        raise OutOfMemory(
            f"{' and '.join(known)} (KiB) limits the memory of this process: the stacks of {NUM_THREADS} threads, "
            f"{num_bytes >> 20} MiB, and {WORKING_BYTES >> 20} MiB of working memory do not fit beside the libraries. "
            f"Raise the limit, or lower that of a stack, ulimit -s {'unlimited' if is_unlimited else stack >> 10}"
        )


def fits(num_bytes: int) -> bool:
    """Whether this process may take so much more memory."""
    try:
        mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except (OSError, MemoryError):
        return False
    return True


@contextmanager
def suggestions_on_memory(config: RunConfig, report: Optional[MemoryReport] = None) -> Iterator[None]:
    """Raise `OutOfMemory`, which says what has the memory and names the flags that need less, for an error that lack of
    memory causes.

    An error that already has its fix stays as it is.

    Args:
        config: of the run, with a value for each automatic setting.
        report: on the memory of this rank.
    """
    try:
        yield
    except Exception as error:
        if line := cause(error):
            parts, found = "", list[Saving]()
            if report is not None and report.concerns(line):
                try:
                    parts = report.describe(line)
                    found = report.savings()
                except Exception as failure:  # as of the host's memory: what is reported stays the first error
                    warn(f"no report on the memory: {reason_of(failure)}")
            suggestions = "".join(f"\n  - {suggestion}" for suggestion in less_memory(config, found))
            raise OutOfMemory(
                f"{line}\n{parts}These need less memory:{suggestions}\n--dry-run estimates the memory of a rank, and "
                "megafp8 plan searches for layouts"
            ) from error
        raise
    finally:
        if report is not None:
            report.run = None  # torch keeps the report for good


def less_memory(config: RunConfig, found: Sequence[Saving] = ()) -> Iterator[str]:
    """Settings with which a run needs less memory.

    Args:
        found: by the memory model, which knows them better than this list; empty while the run is built.
    """
    training = config.training
    size = training.micro_batch_size
    for saving in found:
        yield f"{saving.flags}: {saving.num_bytes / (1 << 30):.2f} GiB less on this rank, by the memory model"
    if not found and isinstance(size, int) and size > 1:
        yield f"a smaller --micro-batch-size than {size}, or auto: the fastest that fits"
    if not found and derived.recompute_granularity(training) is None:
        yield (
            "--recompute-activations, or --recompute-granularity full --recompute-method uniform "
            "--recompute-num-layers 1"
        )
    if derived.uses_cuda_graph(config):
        yield "--cuda-graph-impl none: a graph keeps its memory"
    yield "more tensor- or pipeline-parallel ranks"
    for limit in limits():
        yield f"a higher limit of the process than {limit}"
