"""Ranges of a profile around the GEMMs of Transformer Engine, whose linears compute dgrad and wgrad in one node of the
backward pass. This module imports nothing of it: without it there are none."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

PACKAGE = "transformer_engine.pytorch."
DEFINITIONS = f"{PACKAGE}cpp_extensions"
FUNCTIONS = ("general_gemm", "general_grouped_gemm", "general_grouped_gemm_for_grouped_tensor")
GEMMS = {"TN": "fprop", "NN": "dgrad", "NT": "wgrad"}
"""By the argument `layout`, which its modules give by name; the default is the first."""


@contextmanager
def gemm_ranges(new_range: Callable[[str], AbstractContextManager[Any]]) -> Iterator[None]:
    """Open `new_range("dgrad")` around each dgrad and so on, as long as the context lasts."""

    def with_range(multiply: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(multiply)
        def wrapped(*args: Any, layout: str = "TN", **options: Any) -> Any:
            with new_range(GEMMS[layout]):
                return multiply(*args, layout=layout, **options)

        return wrapped

    with ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            # Not where they are defined: a module that imports them in the meantime would keep the range for good.
            if name.startswith(PACKAGE) and not name.startswith(DEFINITIONS):
                for function in vars(module).keys() & FUNCTIONS:
                    plain = getattr(module, function)
                    stack.callback(setattr, module, function, plain)
                    setattr(module, function, with_range(plain))
        yield
