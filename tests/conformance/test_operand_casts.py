"""Every operand in every GEMM, by the recipes that the flags build, compared with the reference.

The block, format and scale of each use are written down here independently.
"""

import functools

import numpy as np
import pytest
import reference
import torch

from megafp8.config.precision_map import build_recipe
from megafp8.config.schema import PrecisionConfig
from megafp8.quantization import nvfp4
from megafp8.quantization.delayed_scaling import DelayedScale
from megafp8.quantization.quantize import quantize
from megafp8.quantization.quantized_tensor import Quantized
from megafp8.recipes.base import Gemm, Operand

# Whether the GEMM sums over the columns of the operand, or over its rows.
USES = {
    (Operand.INPUT, Gemm.FPROP): "columns",
    (Operand.WEIGHT, Gemm.FPROP): "columns",
    (Operand.GRAD_OUTPUT, Gemm.DGRAD): "columns",
    (Operand.WEIGHT, Gemm.DGRAD): "rows",
    (Operand.GRAD_OUTPUT, Gemm.WGRAD): "rows",
    (Operand.INPUT, Gemm.WGRAD): "rows",
}
FORMATS = {"e4m3": ("e4m3", "e4m3"), "hybrid": ("e4m3", "e5m2"), "e5m2": ("e5m2", "e5m2")}  # forward, backward
RECIPES = {
    "tensorwise": {}, "tensorwise, powers of two": {"fp8_power_2_scale": True},
    "delayed": {}, "blockwise": {}, "blockwise, FP32": {"fp8_block_scaling_fp32_scales": True}, "mxfp8": {},
    "rowwise": {},
}  # fmt: skip
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPE = (144, 200)  # not a multiple of 128 or 32, in both dims
DELAYED_SCALE = np.float32(3.7)


@functools.lru_cache
def tensor(dtype: torch.dtype, has_blocks: bool) -> torch.Tensor:
    """Special values in blocks of their own, normal values elsewhere. Values that would spoil a per-tensor scale are
    for blocks only."""
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(SHAPE, generator=generator) * torch.logspace(-3, 3, SHAPE[1])
    x[:32, 128:160] = 0
    x[32:64, 160:] *= 1e-42
    x[64:96, 128:160] *= 1e-38
    x[5, 5], x[130:, :20] = torch.nan, -1.7
    if has_blocks:
        x[100, 7], x[101, 190], x[6, 40] = torch.inf, -torch.inf, 1e30
    return x.to(dtype)


def block_of(recipe: str, operand: Operand, gemm: Gemm) -> tuple[int, int] | None:
    """Rows and columns that share a scale; None is all."""
    if recipe in ("tensorwise", "delayed"):
        return None
    if recipe == "rowwise":
        return (1, SHAPE[1]) if USES[operand, gemm] == "columns" else (SHAPE[0], 1)
    length = {"blockwise": 128, "mxfp8": 32, "nvfp4": 16}[recipe]
    if operand is Operand.WEIGHT and recipe != "mxfp8":
        return (length, length)
    return (1, length) if USES[operand, gemm] == "columns" else (length, 1)


@functools.lru_cache
def expected(name: str, fmt: str, block: tuple[int, int] | None, dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Codes and dequantization scales of the reference."""
    x = tensor(dtype, block is not None).float().numpy()
    if name == "delayed":
        return reference.codes_of(x, DELAYED_SCALE, fmt), np.float32(1) / DELAYED_SCALE
    if name == "mxfp8":
        return reference.quantize_mxfp8(x, block, fmt)
    if name.startswith("tensorwise"):
        return reference.quantize_tensorwise(x, fmt, name.endswith("powers of two"))
    return reference.quantize_blockwise(x, block, fmt, name in ("blockwise", "rowwise"), torch.finfo(dtype).max)


def check(ours: Quantized, codes: np.ndarray, scales: np.ndarray) -> None:
    np.testing.assert_array_equal(ours.codes.view(torch.uint8).numpy(), codes)
    our_scales = ours.dequant_scale.view(torch.uint8) if scales.dtype == np.uint8 else ours.dequant_scale
    assert our_scales.shape == scales.shape
    assert our_scales.numpy().tobytes() == scales.tobytes()


@pytest.mark.parametrize("operand, gemm", USES, ids=lambda part: part.value)
@pytest.mark.parametrize("fp8_format", FORMATS)
@pytest.mark.parametrize("name", RECIPES)
def test_fp8(name: str, fp8_format: str, operand: Operand, gemm: Gemm) -> None:
    recipe_name = name.split(",")[0]
    recipe = build_recipe(PrecisionConfig(fp8_format=fp8_format, fp8_recipe=recipe_name, **RECIPES[name]))
    fmt = FORMATS[fp8_format][operand is Operand.GRAD_OUTPUT]
    block = block_of(recipe_name, operand, gemm)
    for dtype in DTYPES:
        x, noted = tensor(dtype, block is not None), torch.zeros(())
        delayed = DelayedScale(torch.tensor(DELAYED_SCALE), noted) if name == "delayed" else None
        check(quantize(x, recipe.rule(operand, gemm), delayed=delayed), *expected(name, fmt, block, dtype))
        assert noted == (reference.amax(x.float().numpy()) if name == "delayed" else 0)


@pytest.mark.parametrize("operand, gemm", USES, ids=lambda part: part.value)
def test_nvfp4(operand: Operand, gemm: Gemm) -> None:
    """In BF16, as the transform requires, with gradients rounded to nearest."""
    recipe = build_recipe(PrecisionConfig(fp4_format="e2m1", fp4_stochastic_rounding=False))
    generator = torch.Generator().manual_seed(12)
    x = (torch.randn(80, 72, generator=generator) * torch.logspace(-2, 2, 72)).bfloat16()
    transformed = torch.from_numpy(reference.hadamard_columns(x.float().numpy())).float().bfloat16()
    given = transformed if gemm is Gemm.WGRAD else x
    codes, scales, amax = reference.quantize_nvfp4(given.float().numpy(), block_of("nvfp4", operand, gemm))
    ours = quantize(x, recipe.rule(operand, gemm))
    np.testing.assert_array_equal((nvfp4.unpack(ours.codes) >> 4).numpy(), codes)
    np.testing.assert_array_equal(ours.dequant_scale.view(torch.uint8).numpy(), scales)
    assert ours.tensor_scale.item() == amax / np.float32(448 * 6)
