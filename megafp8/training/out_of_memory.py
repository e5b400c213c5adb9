"""Errors for lack of memory: how they are recognized, and the flags that need less."""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import resource
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch

from megafp8.config import derived
from megafp8.config.schema import RunConfig
from megafp8.errors import Megafp8Error, OutOfMemory, causes

TEXTS = ("out of memory", "can't allocate memory", "Cannot allocate memory", "bad_alloc", "CUBLAS_STATUS_ALLOC_FAILED")
# Of Python's threads and of C++'s, in a RuntimeError: an OSError of a file has the second text, too.
THREAD_TEXTS = ("can't start new thread", "Resource temporarily unavailable")
LIMITS = {"-v": resource.RLIMIT_AS, "-d": resource.RLIMIT_DATA}  # by the flag of ulimit
# More than a rank starts: three for each of about 17 groups of gloo, and those of torch, loaders and saves.
NUM_THREADS = 64
# Of a thread where `ulimit -s` is unlimited.
DEFAULT_STACK_BYTES = 2 << 20
M_ARENA_MAX = -8  # of mallopt(3)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means lack of memory, so that a smaller size may fit."""
    texts = (*TEXTS, *THREAD_TEXTS) if isinstance(error, RuntimeError) else TEXTS
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(text in str(error) for text in texts)


def check_limits() -> None:
    """Check that the limits of this process leave memory for its threads. C++ libraries that cannot start one abort or
    wait forever.

    Raises:
        OutOfMemory: they do not.
    """
    if not (known := list(limits())):
        return
    ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)  # each thread would reserve 64 MiB of addresses for a heap of its own
    stack = resource.getrlimit(resource.RLIMIT_STACK)[0]
    num_bytes = NUM_THREADS * (DEFAULT_STACK_BYTES if stack == resource.RLIM_INFINITY else stack)
    try:
        mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except OSError:
        raise OutOfMemory(
            f"{' and '.join(known)} (KiB) limits the memory of this process: the stacks of {NUM_THREADS} threads, "
            f"{num_bytes >> 20} MiB, do not fit beside the libraries. Raise the limit, or lower that of a stack "
            "(ulimit -s)"
        ) from None


def limits() -> Iterator[str]:
    """The limits of the memory of this process, as commands of a shell."""
    for flag, kind in LIMITS.items():
        if (num_bytes := resource.getrlimit(kind)[0]) != resource.RLIM_INFINITY:
            yield f"ulimit {flag} {num_bytes >> 10}"


def end_process(error: OutOfMemory) -> NoReturn:
    """Report an error, and end the process and its children without the clean-up of the interpreter, which waits for
    threads: they may wait for one that did not start."""
    try:
        if error.__cause__ is not None:
            traceback.print_exception(error.__cause__)  # where it was
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        for child in multiprocessing.active_children():
            child.kill()
    finally:
        os._exit(error.exit_status)


@contextmanager
def advice_on_memory(config: RunConfig) -> Iterator[None]:
    """Raise `OutOfMemory`, which names the flags that need less, for an error that lack of memory causes.

    An error that already has its fix stays as it is.

    Args:
        config: of the run, with a value for each automatic setting.
    """
    try:
        yield
    except Exception as error:
        if line := cause(error):
            remedies = "".join(f"\n  - {remedy}" for remedy in less_memory(config))
            raise OutOfMemory(
                f"{line}\nThese need less memory:{remedies}\n--dry-run estimates the memory of a rank, and megafp8 "
                "plan searches for layouts"
            ) from error
        raise


def cause(error: BaseException) -> str:
    """The line that says that memory is lacking, of an error or of one that caused it; empty if there is none."""
    for each in causes(error):
        if isinstance(each, Megafp8Error):
            break
        if is_out_of_memory(each):
            lines = str(each).strip().splitlines() or [type(each).__name__]
            return next((line for line in lines if any(text in line for text in TEXTS)), lines[0])
        if each.__cause__ is None and each.__suppress_context__:
            break
    return ""


def less_memory(config: RunConfig) -> Iterator[str]:
    """Settings with which a run needs less memory."""
    training = config.training
    size = training.micro_batch_size
    if isinstance(size, int) and size > 1:
        yield f"a smaller --micro-batch-size than {size}, or auto: the fastest that fits"
    if derived.recompute_granularity(training) is None:
        yield (
            "--recompute-activations, or --recompute-granularity full --recompute-method uniform "
            "--recompute-num-layers 1"
        )
    if derived.uses_cuda_graph(config):
        yield "--cuda-graph-impl none: a graph keeps its memory"
    yield "more tensor- or pipeline-parallel ranks"
    for limit in limits():
        yield f"a higher limit of the process than {limit}"
