"""Errors for lack of memory: how they are recognized, and the flags that need less."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Optional

import torch

from megafp8.config import derived
from megafp8.config.schema import RunConfig
from megafp8.errors import Megafp8Error, OutOfMemory

TEXTS = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means lack of memory, so that a smaller size may fit."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(text in str(error) for text in TEXTS)


def explain_out_of_memory(error: BaseException, config: RunConfig) -> BaseException:
    """The error to report: one with the flags that need less memory, if lack of it is the cause, else the error itself.

    An error that already has its fix stays as it is.
    """
    link: Optional[BaseException] = error
    while link is not None and not isinstance(link, Megafp8Error):
        if is_out_of_memory(link):
            first_line = (str(link).strip() or type(link).__name__).splitlines()[0]
            return OutOfMemory(
                f"{first_line}\nUse {' or '.join(less_memory(config))}. --dry-run estimates the memory of a rank, and "
                "megafp8 plan searches for layouts"
            )
        link = link.__cause__ or link.__context__
    return error


def less_memory(config: RunConfig) -> Iterator[str]:
    """Flags with which a run needs less memory."""
    training = config.training
    size = training.micro_batch_size
    if isinstance(size, int) and size > 1:
        yield f"a smaller --micro-batch-size than {size}, or auto, which finds the largest that fits"
    if training.recompute_granularity is None and not training.recompute_activations:
        yield "--recompute-granularity selective or full"
    if derived.uses_cuda_graph(config):
        yield "--cuda-graph-impl none, since a graph keeps its memory"
    yield "more model-parallel ranks"
