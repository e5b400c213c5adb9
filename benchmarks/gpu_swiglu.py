"""SwiGLU into FP8, rows and transpose: the kernels against the bytes they must move, and Transformer Engine's beside.

    python benchmarks/gpu_swiglu.py [--sweep]

Forward to E4M3 and backward to E5M2 by a given scale, at the shapes of `gpu_train.py`, one layer. `gpu_kernels.py` has
those by scales of the tensor itself and of its blocks.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks import timing  # noqa: E402
from benchmarks.gpu_adam import copy_bandwidth, seconds  # noqa: E402
from megafp8.model import swiglu_kernel  # noqa: E402

SHAPES = {"A": (16_384, 5632), "B": (8192, 14_336)}
BLOCKS = ((128, 64, 8), (64, 64, 4), (128, 32, 4), (64, 128, 8), (128, 128, 8), (256, 32, 8))


def measured(tokens: int, width: int) -> dict[str, tuple[float, float]]:
    """Milliseconds and TB/s of both ways."""
    inputs = torch.randn(tokens, 2 * width, device="cuda").bfloat16()
    gradients = torch.randn(tokens, width, device="cuda").bfloat16()
    scale, amax, scale_inv = torch.ones(3, 1, device="cuda")

    def results(columns: int, format: torch.dtype) -> tuple[torch.Tensor, ...]:
        rows = torch.empty(tokens, columns, device="cuda", dtype=format)
        return rows, torch.empty(columns, tokens, device="cuda", dtype=format), scale, amax, scale_inv

    forward, backward = results(width, torch.float8_e4m3fn), results(2 * width, torch.float8_e5m2)
    forward_s = seconds(lambda: swiglu_kernel.swiglu(inputs, *forward))
    backward_s = seconds(lambda: swiglu_kernel.swiglu_backward(gradients, inputs, *backward))
    moved = inputs.nbytes + 2 * forward[0].nbytes, gradients.nbytes + inputs.nbytes + 2 * backward[0].nbytes
    return {
        way: (time_s * 1e3, size / time_s / 1e12)
        for way, time_s, size in zip(("forward", "backward"), (forward_s, backward_s), moved, strict=True)
    }


def transformer_engine(tokens: int, width: int) -> dict[str, float]:
    """Milliseconds of its kernels for the same: SwiGLU into FP8, and the transpose."""
    import transformer_engine.pytorch as te
    import transformer_engine_torch as tex

    inputs = torch.randn(tokens, 2 * width, device="cuda").bfloat16()
    gradients = torch.randn(tokens, width, device="cuda").bfloat16()
    found = {}
    for way, format, call in (
        ("forward", tex.DType.kFloat8E4M3, lambda quantizer: tex.swiglu(inputs, quantizer)),
        ("backward", tex.DType.kFloat8E5M2, lambda quantizer: tex.dswiglu(gradients, inputs, quantizer)),
    ):
        scale, amax = torch.ones(2, 1, device="cuda")
        quantizer = te.Float8Quantizer(scale, amax, format)

        def both(call=call, quantizer=quantizer) -> None:
            call(quantizer).update_usage(columnwise_usage=True)

        found[way] = seconds(both) * 1e3
    return found


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweep", action="store_true", help="also other sizes of a program")
    blocks = BLOCKS if parser.parse_args(argv).sweep else BLOCKS[:1]
    cells = [("copy of 1 GiB", "", "", copy_bandwidth())]
    for name, shape in SHAPES.items():
        cells += [(f"{name} {way}, Transformer Engine", "", ms, "") for way, ms in transformer_engine(*shape).items()]
    for block in blocks:
        swiglu_kernel.TOKENS, swiglu_kernel.WIDTH, swiglu_kernel.NUM_WARPS = block
        for name, shape in SHAPES.items():
            cells += [(f"{name} {way}", "x".join(map(str, block)), *row) for way, row in measured(*shape).items()]
    print(timing.format_table(("what", "tokens x width x warps", "ms", "TB/s"), cells))
    return 0


if __name__ == "__main__":
    sys.exit(main())
