"""Lack of memory: how its errors are recognized, and how a process ends with one.

The command imports this module before everything that takes memory. It therefore imports little.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import sys
import traceback
from collections.abc import Iterator
from typing import NoReturn, Optional

from megafp8.errors import Megafp8Error, OutOfMemory, causes

TEXTS = ("out of memory", "can't allocate memory", "Cannot allocate memory", "bad_alloc", "CUBLAS_STATUS_ALLOC_FAILED")
# Of Python's threads and of C++'s, in a RuntimeError: an OSError of a file has the second text, too.
THREAD_TEXTS = ("can't start new thread", "Resource temporarily unavailable")
# Where this process has a limit. Without one, the system's says that nothing may be executed from a folder, and
# oneDNN's that it has no such product.
TEXTS_WITH_A_LIMIT = {ImportError: "failed to map segment from shared object", RuntimeError: "could not create a"}
LIMITS = {"-v": resource.RLIMIT_AS, "-d": resource.RLIMIT_DATA}  # by the flag of ulimit


def limits() -> Iterator[str]:
    """The limits of the memory of this process, as commands of a shell."""
    for flag, kind in LIMITS.items():
        if (num_bytes := resource.getrlimit(kind)[0]) != resource.RLIM_INFINITY:
            yield f"ulimit {flag} {num_bytes >> 10}"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means lack of memory, so that a smaller size may fit."""
    if TEXTS_WITH_A_LIMIT.get(type(error), "\0") in str(error):
        return any(limits())
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    texts = (*TEXTS, *THREAD_TEXTS) if isinstance(error, RuntimeError) else TEXTS
    return any(text in str(error) for text in texts)


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


def without_settings(error: Exception) -> Optional[OutOfMemory]:
    """The error to report for one that lack of memory causes where no setting of a run needs less; None for others."""
    if not (line := cause(error)):
        return None
    known = " and ".join(limits())
    suggestion = f"{known} (KiB) limits the memory of this process: raise it" if known else "end other processes"
    return OutOfMemory(f"{line}: no memory is left beside the libraries; {suggestion}")


def end_process(error: OutOfMemory) -> NoReturn:
    """Report an error, and end the process and its children without the clean-up of the interpreter, which waits for
    threads: they may wait for one that did not start."""
    try:
        with contextlib.suppress(MemoryError):
            if error.__cause__ is not None:
                traceback.print_exception(error.__cause__)  # where it was
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        if multiprocessing := sys.modules.get("multiprocessing"):
            for child in multiprocessing.active_children():
                child.kill()
    finally:
        os._exit(error.exit_status)
