"""Every rounding decision against the slow reference in `reference.py`."""

import numpy as np
import pytest
import reference
import torch

from megafp8.quantization.delayed_scaling import update_scales
from megafp8.quantization.quantize import dequantize, quantize
from megafp8.quantization.rounding import CODE_DTYPES, cast, decode
from megafp8.quantization.scaling import e8m0_scales, quant_scale_of
from megafp8.recipes.base import DelayedOptions, OperandRule, ScaleRule
from megafp8.recipes.formats import FORMATS

FP8 = ("e4m3", "e5m2")


def reference_codes(values: np.ndarray, fmt: str) -> np.ndarray:
    return np.array([reference.round_to_code(float(v), fmt) for v in values], dtype=np.uint8)


@pytest.mark.parametrize("fmt", FP8)
def test_cast_of_every_bf16_value(fmt: str) -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    codes = cast(every.clone(), FORMATS[fmt])
    np.testing.assert_array_equal(codes.view(torch.uint8).numpy(), reference_codes(every.numpy(), fmt))


@pytest.mark.parametrize("fmt", FP8)
def test_cast_at_every_fp32_boundary(fmt: str) -> None:
    """The midpoint of each two neighbouring magnitudes and its FP32 neighbours, where a second rounding would show."""
    magnitudes = np.array(reference.MAGNITUDES[fmt], dtype=np.float32)
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    values = np.concatenate([magnitudes, middles, np.nextafter(middles, 0), np.nextafter(middles, np.inf)])
    values = np.concatenate([values, -values]).astype(np.float32)
    codes = cast(torch.from_numpy(values.copy()), FORMATS[fmt])
    np.testing.assert_array_equal(codes.view(torch.uint8).numpy(), reference_codes(values, fmt))


@pytest.mark.parametrize("fmt", FP8)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("special", [False, True], ids=["finite", "with NaN and infinity"])
def test_decode_of_every_code(fmt: str, dtype: torch.dtype, special: bool) -> None:
    largest = reference.FORMATS[fmt]["largest_code"]
    codes = [code for code in range(256) if special or code & 0x7F <= largest]
    values = decode(torch.tensor(codes, dtype=torch.uint8).view(CODE_DTYPES[fmt]), FORMATS[fmt], dtype)
    assert values.dtype == dtype
    expected = np.array([reference.value(code, fmt) for code in codes])
    np.testing.assert_array_equal(values.double().numpy(), expected)
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(np.signbit(values.double().numpy())[finite], np.signbit(expected)[finite])


def adversarial() -> dict[str, torch.Tensor]:
    """Small tensors, one for each corner of the scale rules."""
    generator = torch.Generator().manual_seed(5)
    normal = torch.randn(7, 13, generator=generator)
    spoilt = normal.clone()
    spoilt[2, 3], spoilt[4, 5] = float("nan"), -float("nan")
    infinite = normal.clone()
    infinite[1, 1], infinite[6, 12] = float("inf"), -float("inf")
    outlier = normal.clone()
    outlier[3, 3] = 1e30
    return {
        "normal": normal, "nan": spoilt, "inf": infinite, "outlier": outlier, "nan and inf": spoilt + infinite,
        "zeros": torch.zeros(3, 5), "negative zeros": -torch.zeros(3, 5), "equal": torch.full((3, 5), -1.7),
        "denormals": normal * 1e-40, "scale overflows": normal * 1e-37, "huge": normal * 1e38,
        "all nan": torch.full((2, 2), float("nan")), "one negative": torch.tensor([[-3.0, 1.0]]),
    }  # fmt: skip


@pytest.mark.parametrize("case", adversarial())
@pytest.mark.parametrize("fmt", FP8)
@pytest.mark.parametrize("scale_rule", [ScaleRule.FP32, ScaleRule.POWER_OF_TWO])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tensorwise(case: str, fmt: str, scale_rule: ScaleRule, dtype: torch.dtype) -> None:
    x = adversarial()[case].to(dtype)
    ours = quantize(x, OperandRule(format=FORMATS[fmt], scale_rule=scale_rule))
    power_of_two = scale_rule is ScaleRule.POWER_OF_TWO
    codes, dequant_scale = reference.quantize_tensorwise(x.float().numpy(), fmt, power_of_two)
    np.testing.assert_array_equal(ours.codes.view(torch.uint8).numpy(), codes)
    assert ours.dequant_scale.numpy().tobytes() == dequant_scale.tobytes()

    values = np.array([reference.value(int(c), fmt) for c in codes.ravel()], dtype=np.float32).reshape(codes.shape)
    np.testing.assert_array_equal(dequantize(ours).numpy(), values * dequant_scale)


# Blocks short enough for a slow reference, in each orientation; 13 columns and 7 rows leave ragged edges.
BLOCKS = [(1, 4), (1, 13), (3, 1), (4, 4), (128, 128)]


@pytest.mark.parametrize("case", adversarial())
@pytest.mark.parametrize("fmt", FP8)
@pytest.mark.parametrize("scale_rule", [ScaleRule.FP32, ScaleRule.POWER_OF_TWO])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_blockwise(case: str, fmt: str, scale_rule: ScaleRule, dtype: torch.dtype) -> None:
    x = adversarial()[case].to(dtype)
    for block in BLOCKS:
        ours = quantize(x, OperandRule(format=FORMATS[fmt], block=block, scale_rule=scale_rule))
        power_of_two = scale_rule is ScaleRule.POWER_OF_TWO
        codes, scales = reference.quantize_blockwise(
            x.float().numpy(), block, fmt, power_of_two, torch.finfo(dtype).max
        )
        np.testing.assert_array_equal(ours.codes.view(torch.uint8).numpy(), codes)
        assert ours.dequant_scale.numpy().tobytes() == scales.tobytes()
        np.testing.assert_array_equal(dequantize(ours).numpy(), values_of(codes, scales, block, fmt))


def values_of(codes: np.ndarray, scales: np.ndarray, block: tuple[int, int], fmt: str) -> np.ndarray:
    """Each code's value times its block's scale, in FP32."""
    values = np.array([reference.value(int(c), fmt) for c in codes.ravel()], dtype=np.float32).reshape(codes.shape)
    rows, columns = (np.arange(size) // length for size, length in zip(codes.shape, block, strict=True))
    return values * scales[np.ix_(rows, columns)]


@pytest.mark.parametrize("block", [(1, 128), (128, 1), (128, 128)])
@pytest.mark.parametrize("shape", [(128, 256), (130, 129), (1, 300), (257, 1)])
def test_blocks_of_128(block: tuple[int, int], shape: tuple[int, int]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 6, shape[1])
    ours = quantize(x, OperandRule(format=FORMATS["e4m3"], block=block, scale_rule=ScaleRule.POWER_OF_TWO))
    codes, scales = reference.quantize_blockwise(x.numpy(), block, "e4m3", True, torch.finfo(x.dtype).max)
    np.testing.assert_array_equal(ours.codes.view(torch.uint8).numpy(), codes)
    np.testing.assert_array_equal(ours.dequant_scale.numpy(), scales)


@pytest.mark.parametrize("case", adversarial())
@pytest.mark.parametrize("fmt", FP8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_mxfp8(case: str, fmt: str, dtype: torch.dtype) -> None:
    x = adversarial()[case].to(dtype)
    for block in BLOCKS:
        ours = quantize(x, OperandRule(format=FORMATS[fmt], block=block, scale_rule=ScaleRule.E8M0))
        codes, exponents = reference.quantize_mxfp8(x.float().numpy(), block, fmt)
        np.testing.assert_array_equal(ours.codes.view(torch.uint8).numpy(), codes)
        np.testing.assert_array_equal(ours.dequant_scale.view(torch.uint8).numpy(), exponents)
        scales = (2.0 ** (exponents.astype(float) - 127)).astype(np.float32)
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(dequantize(ours).numpy(), values_of(codes, scales, block, fmt))


def exponent_boundaries() -> np.ndarray:
    """FP32 numbers around each change of a scale's exponent, random ones, and all of BF16."""
    mantissas = np.array([0, 1, 2, 0x5FFFFF, 0x600000, 0x600001, 0x600002, 0x7FFFFF], dtype=np.int64)
    bits = (np.arange(255, dtype=np.int64)[:, None] << 23) | mantissas
    random = np.random.default_rng(0).integers(0, 0x7F800000, 1000)
    every_bf16 = np.arange(0x7F80, dtype=np.int64) << 16
    return np.concatenate([bits.ravel(), random, every_bf16, [0x7F800000]]).astype(np.int32).view(np.float32)


@pytest.mark.parametrize("fmt", FP8)
def test_e8m0_of_every_exponent(fmt: str) -> None:
    largest = exponent_boundaries()
    with np.errstate(over="ignore"):
        expected = [reference.e8m0_round_up(x * np.float32(1 / reference.MAGNITUDES[fmt][-1])) for x in largest]
    ours = e8m0_scales(torch.from_numpy(largest), FORMATS[fmt])
    np.testing.assert_array_equal(ours.dequant.view(torch.uint8).numpy(), np.array(expected, dtype=np.uint8))
    assert (ours.quant.double() * ours.dequant.double() == 1).all()


@pytest.mark.parametrize("fmt", FP8)
def test_power_of_two_scales_agree(fmt: str) -> None:
    """Blockwise and MXFP8 give every amax the same exponent, except 0, infinity and one number of E8M0's rule."""
    largest = torch.from_numpy(exponent_boundaries())
    power = quant_scale_of(largest, FORMATS[fmt], ScaleRule.POWER_OF_TWO)
    differs = power != e8m0_scales(largest, FORMATS[fmt]).quant
    excepted = torch.tensor([0.0, FORMATS[fmt].max * 2.0**-127, torch.inf])
    excepted[1] = torch.nextafter(excepted[1], excepted[2])
    assert set(largest[differs].tolist()) == set(excepted.tolist())


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("history_len", [1, 2, 5])
@pytest.mark.parametrize("fmt, margin", [("e4m3", 0), ("e5m2", 2)])
def test_delayed_updates(algorithm: str, history_len: int, fmt: str, margin: int) -> None:
    amaxes = [0, 3, 0.1, 0, 0, 7, 1e-40, 1e30, np.inf, 2, 2, 2, 1e-30, 1e-30, 1e-30, 1e-30, 0.3, 5e-45, 1]
    history, scale = [np.float32(0)] * history_len, np.float32(1)
    our_history, our_scale = torch.zeros(history_len, 1), torch.ones(1)
    options = DelayedOptions(history_len=history_len, algorithm=algorithm, margin=margin)
    for amax in np.array(amaxes, dtype=np.float32):
        history, scale = reference.delayed_update(history, scale, amax, fmt, algorithm == "max", margin)
        update_scales(our_history, our_scale, torch.tensor([amax]), torch.tensor([FORMATS[fmt].max]), options)
        np.testing.assert_array_equal(our_history[:, 0].numpy(), history)
        assert our_scale.item() == scale
