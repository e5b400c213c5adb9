"""Other implementations, where they are installed: torchao's, and Transformer Engine's references in Python.

Corner cases in which they differ from Transformer Engine's kernels are left out and named.
"""

import numpy as np
import pytest
import torch
from te_references import reference_module

from megafp8.quantization import nvfp4
from megafp8.quantization.quantize import quantize
from megafp8.quantization.rounding import CODE_DTYPES, cast
from megafp8.recipes.base import OperandRule, ScaleRule
from megafp8.recipes.formats import E2M1, FORMATS

FP8 = ("e4m3", "e5m2")


def spread(rows: int, columns: int, deviation: float) -> torch.Tensor:
    """Numbers of very different size, with a block of zeros."""
    generator = torch.Generator().manual_seed(rows + columns)
    x = torch.randn(rows, columns, generator=generator)
    x *= torch.exp(deviation * torch.randn(rows, columns, generator=generator))
    x[32:64, :32] = 0
    return x


def every_finite_bf16() -> torch.Tensor:
    bits = torch.arange(1 << 16, dtype=torch.int32)
    return bits[(bits & 0x7FFF) < 0x7F80].to(torch.int16).view(torch.bfloat16)


# --- torchao ----------------------------------------------------------------------------------------------------------


def check_mxfp8_of_torchao(x: torch.Tensor, fmt: str) -> None:
    """Row blocks, and column blocks as the row blocks of the transposed tensor.

    Below its smallest scale, 2^-127, torchao multiplies by 1, Transformer Engine by 2^127. The codes differ there.
    """
    mx_tensor = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor", exc_type=ImportError)
    for block, given in (((1, 32), x), ((32, 1), x.t().contiguous())):
        ours = quantize(x, OperandRule(format=FORMATS[fmt], block=block, scale_rule=ScaleRule.E8M0))
        scales, codes = mx_tensor.to_mx(given, CODE_DTYPES[fmt], 32, mx_tensor.ScaleCalculationMode.RCEIL)
        our_codes, our_scales = (each.view(torch.uint8) for each in (ours.codes, ours.dequant_scale))
        if block == (32, 1):
            our_codes, our_scales = our_codes.t(), our_scales.t()
        np.testing.assert_array_equal(our_scales.numpy(), scales.view(torch.uint8).view(our_scales.shape).numpy())
        has_factor = (our_scales > 0).repeat_interleave(32, dim=1)
        np.testing.assert_array_equal(our_codes[has_factor].numpy(), codes.view(torch.uint8)[has_factor].numpy())


@pytest.mark.parametrize("fmt", FP8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp8_equals_torchao(fmt: str, dtype: torch.dtype) -> None:
    """Its NaN and infinity differ."""
    x = spread(96, 256, deviation=4)
    check_mxfp8_of_torchao(torch.cat([x, x[:16] * 1e-30, x[:16] * 1e30]).to(dtype), fmt)


@pytest.mark.parametrize("fmt", FP8)
def test_mxfp8_equals_torchao_for_every_bf16_amax(fmt: str) -> None:
    values = every_finite_bf16()
    fractions = torch.linspace(1, -1, 32)
    check_mxfp8_of_torchao((values.float()[:, None] * fractions).bfloat16(), fmt)


@pytest.mark.parametrize("fmt", FP8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [-1, 0], ids=["rows", "columns"])
def test_rowwise_equals_torchao(fmt: str, dtype: torch.dtype, dim: int) -> None:
    """Rows and columns that are not all zero: it divides by at least 1e-12."""
    utils = pytest.importorskip("torchao.float8.float8_utils", exc_type=ImportError)
    config = pytest.importorskip("torchao.float8.config", exc_type=ImportError)
    x = spread(96, 256, deviation=4).to(dtype)
    block = (1, None) if dim else (None, 1)
    ours = quantize(x, OperandRule(format=FORMATS[fmt], block=block, scale_rule=ScaleRule.POWER_OF_TWO))
    scale = utils.tensor_to_scale(
        x, CODE_DTYPES[fmt], scaling_granularity=config.ScalingGranularity.AXISWISE, axiswise_dim=dim,
        round_scales_to_power_of_2=True,
    )  # fmt: skip
    codes = utils.to_fp8_saturated(x.float() * scale, CODE_DTYPES[fmt])
    np.testing.assert_array_equal(ours.dequant_scale.numpy(), 1 / scale.numpy())
    np.testing.assert_array_equal(ours.codes.view(torch.uint8).numpy(), codes.view(torch.uint8).numpy())


def test_fp4_rounding_equals_torchao() -> None:
    kernels = pytest.importorskip("torchao.prototype.mx_formats.kernels", exc_type=ImportError)
    values = every_finite_bf16().float()
    np.testing.assert_array_equal(
        (nvfp4.unpack(cast(values.clone(), E2M1)) >> 4).numpy(), kernels.f32_to_f4_unpacked(values).numpy()
    )


# --- Transformer Engine's references ----------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", FP8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("power_of_two", [False, True], ids=["fp32", "power of two"])
def test_current_scaling_equals_te_reference(fmt: str, dtype: torch.dtype, power_of_two: bool) -> None:
    """Its infinities, its NaN and an overflowing scale differ from those of the kernels."""
    module = reference_module("reference_current_scaling")
    reference = module.CurrentScalingQuantizerRef(dtype=CODE_DTYPES[fmt], pow_2_scales=power_of_two)
    scale_rule = ScaleRule.POWER_OF_TWO if power_of_two else ScaleRule.FP32
    for x in (spread(96, 80, deviation=2), torch.zeros(16, 16), torch.full((16, 32), -1.7), spread(96, 80, 1) * 1e-3):
        x = x.to(dtype)
        ours, theirs = quantize(x, OperandRule(format=FORMATS[fmt], scale_rule=scale_rule)), reference.quantize(x)
        assert torch.equal(ours.codes.view(torch.uint8), theirs.data.view(torch.uint8))
        assert torch.equal(ours.codes.view(torch.uint8).t(), theirs.data_t.view(torch.uint8))
        assert ours.dequant_scale == theirs.scale.squeeze()


@pytest.mark.parametrize("block, transforms", [((1, 16), False), ((1, 16), True), ((16, 16), False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nvfp4_equals_te_reference(block: tuple[int, int], transforms: bool, dtype: torch.dtype) -> None:
    module, utils = reference_module("reference_nvfp4"), reference_module("reference_utils")
    x = spread(96, 160, deviation=2).to(dtype)
    reference = module.NVFP4QuantizerRef(
        dtype=utils.Fp4Formats.E2M1, rowwise=True, columnwise=True, quant_tile_shape=block, with_rht=transforms
    )
    theirs = reference.quantize(x)

    def rule(block: tuple[int, int], is_transformed: bool) -> OperandRule:
        return OperandRule(format=E2M1, block=block, scale_rule=ScaleRule.TWO_LEVEL, is_transformed=is_transformed)

    by_rows, by_columns = quantize(x, rule(block, False)), quantize(x, rule(block[::-1], transforms))
    assert torch.equal(by_rows.codes, theirs.data)
    rows_of_scales = theirs.scale.view(torch.uint8)[:: block[0]]  # squares repeat theirs on every row
    assert torch.equal(by_rows.dequant_scale.view(torch.uint8), rows_of_scales)
    assert torch.equal(nvfp4.unpack(by_columns.codes).t(), nvfp4.unpack(theirs.data_t))
    columns_of_scales = theirs.scale_t.view(torch.uint8)[:: block[0]]
    assert torch.equal(by_columns.dequant_scale.view(torch.uint8).t(), columns_of_scales)
    for ours, amax in ((by_rows, theirs.global_amax_row), (by_columns, theirs.global_amax_col)):
        assert ours.tensor_scale == amax / (6 * 448)
