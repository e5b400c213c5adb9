"""Compile the Triton kernels for a GPU on a machine without one, as their tests launch them.

    PYTHONPATH=tests python -m pytest -p compile_kernels tests/unit/kernels tests/conformance/test_triton.py

needs `pip install triton`. The interpreter (`interpreter.py`) runs kernels that the compiler refuses, for example with
branches that return different shapes. A test passes here if all that it launches compiles for Hopper: nothing runs, so
that a wrong result ends the test without a failure, and later launches of it are not compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import interpreter
import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

HOPPER = GPUTarget("cuda", 90, 32)


class CompilingDriver:
    """What Triton asks of a driver before it would load a kernel."""

    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)
    get_current_target = staticmethod(lambda: HOPPER)
    get_active_torch_device = staticmethod(lambda: torch.device("cpu"))


triton.runtime.driver.set_active(CompilingDriver())
launched = JITFunction.run
failures: list[Exception] = []


def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
    try:
        return launched(kernel, *args, grid=grid, warmup=True, **options)
    except Exception as error:
        failures.append(error)
        raise


JITFunction.run = compile_only
interpreter.IS_INTERPRETED = interpreter.HAS_KERNELS = True  # the tests' CPU tensors, and their sizes
interpreter.DEVICE = "cpu"
interpreter.make_exact = lambda monkeypatch: None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    failures.clear()
    with suppress(Exception, pytest.fail.Exception):  # of results that nothing computed
        yield
    if failures:
        raise failures[0]
