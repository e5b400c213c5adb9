"""Record a GPU's results of FP8 products: `python record_products.py FILE.npz` where Transformer Engine is.

For each case: the codes of a few rows of both operands, their scales, and the corner of the product that they
determine, in FP32 and, with a bias, in BF16. Keys are `product/CASE/NAME`.
"""

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformer_engine.pytorch  # noqa: F401 - loads the extension module that comes next
import transformer_engine_torch as tex
from transformer_engine.pytorch.cpp_extensions import general_gemm
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

from megafp8.quantization.te_layout import stored

M, N = 256, 384
FORMATS = {"e4m3": tex.DType.kFloat8E4M3, "e5m2": tex.DType.kFloat8E5M2}


def numbers(rows: int, length: int, distribution: str, generator: torch.Generator) -> torch.Tensor:
    """BF16 [rows, length]."""
    normal = torch.randn(rows, length, generator=generator)
    factor = {
        "normal": torch.tensor(1.0),
        "columns": torch.exp2(8 * torch.rand(length, generator=generator) - 4),
        "wide": torch.exp2(torch.randint(-12, 8, (rows, length), generator=generator).float()),
        "subnormal": torch.tensor(2.0**-9),
        "sparse": (torch.rand(rows, length, generator=generator) < 0.05).float(),
    }[distribution]
    return (normal * factor).bfloat16()


# Distributions of both operands where they differ. An exponent of the smallest normal would cut more of these.
FAINT = ("wide", "subnormal")


def cases() -> Iterator[tuple[str, int, str, str, bool, str]]:
    """Name, length of the sums, both formats, split accumulator or not, distribution."""
    distributions = ("normal", "columns", "wide", "subnormal", "sparse")
    for fmt, split, distribution in itertools.product(("e4m3", "e5m2"), (False, True), distributions):
        yield f"tensor-{fmt}-{'split' if split else 'fast'}-{distribution}-512", 512, fmt, "e4m3", split, distribution
    for length, split in itertools.product((48, 208, 2048), (False, True)):
        yield f"tensor-e4m3-{'split' if split else 'fast'}-normal-{length}", length, "e4m3", "e4m3", split, "normal"
    for rule, fmt, distribution in itertools.product(("pow2", "fp32"), ("e4m3", "e5m2"), ("normal", "columns", "wide")):
        yield f"block-{rule}-{fmt}-{distribution}-512", 512, fmt, "e4m3", True, distribution
    yield "block-pow2-e4m3-normal-2048", 2048, "e4m3", "e4m3", True, "normal"
    yield "tensor-e5m2-fast-faint-512", 512, "e5m2", "e4m3", False, "faint"


def quantized(x: torch.Tensor, fmt: str, name: str, scale: float, is_square: bool) -> Any:
    """By a given scale, or in blocks."""
    if name.startswith("block"):
        quantizer = Float8BlockQuantizer(
            FORMATS[fmt], rowwise=True, columnwise=False, force_pow_2_scales="pow2" in name,
            block_scaling_dim=2 if is_square else 1,
        )  # fmt: skip
        return quantizer(x)
    scales = torch.full((1,), scale, device="cuda"), torch.zeros(1, device="cuda")
    return Float8Quantizer(*scales, FORMATS[fmt], rowwise=True, columnwise=False)(x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--rows", type=int, default=24, help="of each operand, spread evenly (default 24)")
    arguments = parser.parse_args()
    selected: dict[str, np.ndarray] = {}
    rows, columns = (torch.linspace(0, size - 1, arguments.rows).long() for size in (M, N))
    for index, (name, length, fmt_a, fmt_b, split, distribution) in enumerate(cases()):
        generator = torch.Generator().manual_seed(index)
        distributions = FAINT if distribution == "faint" else (distribution, distribution)
        a, b = (
            numbers(size, length, each, generator).cuda() for size, each in zip((M, N), distributions, strict=True)
        )  # fmt: skip
        bias = torch.randn(N, generator=generator).bfloat16().cuda()
        # Neither a power of two nor one that hides the codes' subnormals.
        a, b = quantized(a, fmt_a, name, 1.3, is_square=False), quantized(b, fmt_b, name, 0.7, is_square=True)
        options = {"layout": "TN", "use_split_accumulator": split}
        sums = general_gemm(b, a, out_dtype=torch.float32, **options)[0]
        results = general_gemm(b, a, out_dtype=torch.bfloat16, bias=bias, **options)[0]
        for side, tensor, chosen in (("a", a, rows), ("b", b, columns)):
            codes, scale_inv, _ = stored(tensor, "row")
            selected[f"product/{name}/{side}"] = codes[chosen].numpy()
            if scale_inv.ndim == 2:  # [blocks, rows], or squares
                scale_inv = scale_inv[:, :M].t() if side == "a" else scale_inv.repeat_interleave(128, dim=0)
                scale_inv = scale_inv[chosen, : -(-length // 128)]
            selected[f"product/{name}/{side}_scale_inv"] = scale_inv.numpy()
        selected[f"product/{name}/bias"] = bias.cpu()[columns].float().numpy()
        selected[f"product/{name}/sums"] = sums.cpu()[rows][:, columns].numpy()
        selected[f"product/{name}/results"] = results.cpu()[rows][:, columns].float().numpy()
    np.savez_compressed(arguments.file, **selected)
    print(f"{arguments.file}: {len(selected)} arrays, {arguments.file.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
