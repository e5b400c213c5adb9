"""Casts and SwiGLU into FP8, delayed, tensorwise and blockwise, by our kernels and by Transformer Engine's.

    python benchmarks/gpu_kernels.py [--shape A B]

At the shapes of `gpu_train.py`, one layer. Formats are E4M3, and E5M2 for gradients but in blocks. What ours write is
first compared with what Transformer Engine writes: casts and tensorwise SwiGLU are equal, and of other SwiGLU at most 1
byte in 1,000 differs, where the last bit of an exponential decides. More is told of in a table of its own, and with
status 1 after all times were taken. Bytes are those that have to be moved: what is given and what results, once each.
Tensorwise, whose scale is known only after all of its tensor, reads it once more (unless who wrote it noted its amax:
ours alone know such notes), and SwiGLU has to write it before. Ours leave most inputs of SwiGLU's gradients out of it,
by what the forward pass noted at them, and so move less than is counted.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch

from benchmarks import timing
from benchmarks.gpu_adam import copy_bandwidth, seconds

SHAPES = {"A": (16_384, 5632), "B": (8192, 14_336)}  # tokens, and half of SwiGLU's input
PARTS = {
    "delayed": ("_data", "_transpose", "_scale_inv"),
    "blockwise": ("_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv"),
    "tensorwise": ("_data", "_transpose", "_scale_inv"),
}
LARGEST_SHARE = {"delayed": 1e-3, "blockwise": 1e-3, "tensorwise": 0.0}  # of bytes that may differ in SwiGLU
CALLS = 16  # whose launches are timed on the host together
AHEAD = 200_000_000  # cycles, about 0.1 s: the GPU is busy for as long as that takes


class Work(NamedTuple):
    """The same work by several kernels.

    Attributes:
        name: for the table.
        recipe: whose parts the results have.
        calls: by whom; Transformer Engine's first.
        moved: bytes.
        share: of bytes or scales that may differ from the first's.
    """

    name: str
    recipe: str
    calls: dict[str, Callable[[], Any]]
    moved: int
    share: float


def works(tokens: int, width: int) -> Iterator[Work]:
    """What is timed at one shape."""
    import transformer_engine.pytorch as te
    import transformer_engine_torch as tex

    from megafp8.kernels.annotations import annotate
    from megafp8.te import quantizers
    from megafp8.te.fused_mlp import QuantizingSwiGLU

    inputs = torch.randn(tokens, 2 * width, device="cuda").bfloat16()
    gradients = torch.randn(tokens, width, device="cuda").bfloat16()
    noted = inputs.clone()
    annotate(noted, "amax", noted.abs().amax().float().reshape(1))
    e4m3, e5m2 = tex.DType.kFloat8E4M3, tex.DType.kFloat8E5M2
    blocks = te.Float8BlockQuantizer(e4m3, rowwise=True, columnwise=True, block_scaling_dim=1)
    whole, whole_gradients = (te.Float8CurrentScalingQuantizer(kind, torch.device("cuda")) for kind in (e4m3, e5m2))
    scaled, scaled_gradients = (
        te.Float8Quantizer(*torch.tensor([[16.0], [0.0]], device="cuda"), kind) for kind in (e4m3, e5m2)
    )
    ours = QuantizingSwiGLU()
    for recipe, how, how_gradients in (
        ("delayed", scaled, scaled_gradients), ("blockwise", blocks, blocks), ("tensorwise", whole, whole_gradients),
    ):  # fmt: skip
        is_twice = recipe == "tensorwise"
        kernels = quantizers.kernels_for(how, inputs.shape)
        calls = {
            "Transformer Engine": lambda how=how: tex.quantize(inputs, how),
            "ours": lambda how=how, kernels=kernels: quantizers.cast(inputs, how, kernels),
        }
        yield Work("cast", recipe, calls, inputs.nbytes * (2 + is_twice), 0.0)
        if is_twice:
            calls = {
                "Transformer Engine": lambda how=how: tex.quantize(noted, how),
                "ours": lambda how=how, kernels=kernels: quantizers.cast(noted, how, kernels),
            }
            yield Work("cast, amax noted", recipe, calls, noted.nbytes * 2, 0.0)
        calls = {
            "Transformer Engine": lambda how=how: with_columns(tex.swiglu(inputs, how)),
            "ours": lambda how=how: ours._tex_swiglu_forward(inputs, how),
        }
        result_bytes = gradients.nbytes
        yield Work("SwiGLU", recipe, calls, inputs.nbytes + result_bytes * (1 + 2 * is_twice), LARGEST_SHARE[recipe])
        calls = {
            "Transformer Engine": lambda how=how_gradients: with_columns(tex.dswiglu(gradients, inputs, how)),
            "ours": lambda how=how_gradients: ours._tex_swiglu_backward(gradients, inputs, how),
        }
        moved = gradients.nbytes + inputs.nbytes * (2 + 2 * is_twice)
        yield Work("SwiGLU backward", recipe, calls, moved, LARGEST_SHARE[recipe])


def with_columns(result: Any) -> Any:
    """The result with its transpose, which Transformer Engine's SwiGLU leaves out under delayed scaling."""
    result.update_usage(columnwise_usage=True)
    return result


def differences(work: Work) -> Iterator[tuple[str, str, str, float]]:
    """Work, whose, part and share of its bytes, where more of a result than may be is not Transformer Engine's."""
    theirs, *others = (call() for call in work.calls.values())
    for whose, result in zip(list(work.calls)[1:], others, strict=True):
        for name in PARTS[work.recipe]:
            one, other = (getattr(each, name).view(torch.uint8) for each in (result, theirs))
            share = (one != other).float().mean().item()
            if share > work.share:
                yield f"{work.recipe} {work.name}", whose, name, share * 100


def host_seconds(call: Callable[[], Any]) -> float:
    """Of the host for a call, while the GPU is busy with other things."""
    torch.cuda.synchronize()
    torch.cuda._sleep(AHEAD)
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    found = (time.perf_counter() - start) / CALLS
    torch.cuda.synchronize()
    return found


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Print the table, and what differs.

    Returns:
        1 where something does.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES))
    shapes = parser.parse_args(argv).shape
    cells, different = [("copy of 1 GiB", "", "", copy_bandwidth(), "")], []
    for shape in shapes:
        for work in works(*SHAPES[shape]):
            different += [(f"{shape} {what}", *rest) for what, *rest in differences(work)]
            for whose, call in work.calls.items():
                time_s = seconds(call)
                cells.append((
                    f"{shape} {work.recipe} {work.name}", whose, time_s * 1e3, work.moved / time_s / 1e12,
                    host_seconds(call) * 1e6,
                ))  # fmt: skip
    print(timing.format_table(("what", "whose", "ms", "TB/s", "host us"), cells))
    if different:
        print("not Transformer Engine's")
        print(timing.format_table(("what", "whose", "part", "% of bytes"), different))
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
