"""Which precision a step has under `--fp8-schedule`, and how the model gets it.

Nothing is built anew when a stretch begins: weights, optimizer and the memory of recipes (delayed scaling's scales,
counts of random draws) stay where they are, and in high precision nobody looks at that memory. So it is in every
checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from megafp8.config.fp8_schedule import is_quantized_at
from megafp8.training.setup import Run


def precision_at(run: Run, step: int) -> AbstractContextManager[None]:
    """Within, the run computes as its schedule says for a step; the first is 1."""
    return nullcontext() if is_quantized_at(run.config.precision, max(1, step)) else high_precision(run)


@contextmanager
def high_precision(run: Run) -> Iterator[None]:
    """Within, no GEMM is quantized. megatron-core asks its configuration in each forward pass; linears with a recipe of
    their own, and emulated ones, heed `is_quantizing`."""
    config = run.transformer_config
    linears = [module for chunk in run.trainee.chunks for module in chunk.modules() if hasattr(module, "is_quantizing")]
    formats = config.fp8, config.fp4
    config.fp8 = config.fp4 = None
    for linear in linears:
        linear.is_quantizing = False
    try:
        yield
    finally:
        config.fp8, config.fp4 = formats
        for linear in linears:
            linear.is_quantizing = True
