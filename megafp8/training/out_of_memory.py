"""Errors for lack of memory: how they are recognized, and the flags that need less."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megafp8.config import derived
from megafp8.config.schema import RunConfig
from megafp8.errors import Megafp8Error, OutOfMemory, causes

TEXTS = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means lack of memory, so that a smaller size may fit."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(text in str(error) for text in TEXTS)


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
