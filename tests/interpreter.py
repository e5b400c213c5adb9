"""Triton's interpreter with fixes. Where there is no GPU, kernels run in it with TRITON_INTERPRET=1."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

IS_INTERPRETED = not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") == "1"
HAS_KERNELS = importlib.util.find_spec("triton") is not None and (torch.cuda.is_available() or IS_INTERPRETED)
NO_KERNELS = "needs a CUDA device, or Triton and TRITON_INTERPRET=1"
DEVICE = "cpu" if IS_INTERPRETED else "cuda"
"""Of tensors that kernels take."""


def skip_without_kernels() -> None:
    """Skip the importing test module where no kernel can run, before it imports Triton."""
    if not HAS_KERNELS:
        pytest.skip(NO_KERNELS, allow_module_level=True)


def make_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let interpreted kernels compute as a GPU does."""
    exact_bf16(monkeypatch)
    constants_before_tensors(monkeypatch)


def exact_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter truncates FP32 where a GPU rounds it to BF16, loses BF16's subnormals, and treats BF16 as
    integers in products."""
    import numpy
    from triton.language import bfloat16 as bf16
    from triton.language import float32 as fp32
    from triton.runtime import interpreter

    plain_convert = interpreter._convert_float

    def convert(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source.name, target.name) == ("bf16", "fp32"):
            return (values.view(numpy.uint16).astype(numpy.uint32) << 16).reshape(values.shape)
        if (source.name, target.name) == ("fp32", "bf16"):
            rounded = torch.from_numpy(numpy.ascontiguousarray(values)).bfloat16().view(torch.int16)
            return rounded.numpy().view(numpy.uint16)
        return plain_convert(values, source, target, rounding)

    plain_dot = interpreter.InterpreterBuilder.create_dot

    def dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        if a.dtype.scalar.name != "bf16":
            return plain_dot(self, a, b, *others)
        wide = [interpreter.TensorHandle(convert(x.data, bf16, fp32, None).view(numpy.float32), fp32) for x in (a, b)]
        return plain_dot(self, *wide, *others)

    monkeypatch.setattr(interpreter, "_convert_float", convert)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


def constants_before_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """`constant - tensor` is a tensor for the compiler. The interpreter of Triton 3.9 makes it a constant, which its
    functions then refuse."""
    from triton.language import constexpr, tensor

    for name in ("__add__", "__sub__", "__mul__"):
        plain = getattr(constexpr, name)

        def combine(self: constexpr, other: Any, plain: Callable[[constexpr, Any], constexpr] = plain) -> Any:
            result = plain(self, other)
            return result.value if isinstance(result.value, tensor) else result

        monkeypatch.setattr(constexpr, name, combine)
