"""NVFP4 against the slow reference in `reference.py`.

It needs compute capability 10.0, so there are no golden vectors.
"""

import numpy as np
import pytest
import reference
import torch
from test_reference import adversarial

from megafp8.quantization import nvfp4
from megafp8.quantization.nvfp4 import RoundingNoise, hadamard_matrix, hadamard_transform, random_bytes
from megafp8.quantization.quantize import dequantize, quantize
from megafp8.quantization.quantized_tensor import Quantized
from megafp8.quantization.rounding import cast, decode
from megafp8.recipes.base import OperandRule, ScaleRule
from megafp8.recipes.formats import E2M1

BLOCKS = [(1, 16), (16, 1), (16, 16)]


def rule(block: tuple[int, int], **options: bool) -> OperandRule:
    return OperandRule(format=E2M1, block=block, scale_rule=ScaleRule.TWO_LEVEL, **options)


def codes_of(quantized: Quantized) -> np.ndarray:
    """One code per byte."""
    return (nvfp4.unpack(quantized.codes) >> 4).numpy()


# --- the format -------------------------------------------------------------------------------------------------------


def test_cast_of_every_bf16_value() -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    codes = nvfp4.unpack(cast(every.clone(), E2M1)) >> 4
    expected = [reference.round_to_code(float(value), "e2m1") for value in every]
    np.testing.assert_array_equal(codes.numpy(), np.array(expected, dtype=np.uint8))


def test_cast_at_every_fp32_boundary() -> None:
    """Ties and values, and their FP32 neighbours, where a second rounding would show."""
    magnitudes = np.array(reference.MAGNITUDES["e2m1"], dtype=np.float32)
    points = np.concatenate([magnitudes, (magnitudes[1:] + magnitudes[:-1]) / 2])
    points = np.concatenate([points, np.nextafter(points, np.float32(-1)), np.nextafter(points, np.float32(9))])
    points = np.concatenate([points, -points, np.float32([1e-45, 3e38, -3e38])]).astype(np.float32)
    points = points[: len(points) // 2 * 2]
    codes = nvfp4.unpack(cast(torch.from_numpy(points.copy()), E2M1)) >> 4
    expected = [reference.round_to_code(float(value), "e2m1") for value in points]
    np.testing.assert_array_equal(codes.numpy(), np.array(expected, dtype=np.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_decode_of_every_byte(dtype: torch.dtype) -> None:
    """The even element is in the lower four bits."""
    values = decode(torch.arange(256, dtype=torch.int32).to(torch.uint8), E2M1, dtype)
    expected = [reference.value(half, "e2m1") for byte in range(256) for half in (byte & 15, byte >> 4)]
    assert values.tolist() == expected
    assert torch.equal(cast(values.float(), E2M1), torch.arange(256, dtype=torch.int32).to(torch.uint8))


# --- scales and codes -------------------------------------------------------------------------------------------------


def check_against_reference(x: torch.Tensor, block: tuple[int, int]) -> None:
    ours = quantize(x, rule(block))
    codes, scales, tensor_amax = reference.quantize_nvfp4(x.float().numpy(), block)
    np.testing.assert_array_equal(codes_of(ours)[:, : codes.shape[1]], codes)
    np.testing.assert_array_equal(ours.dequant_scale.view(torch.uint8).numpy(), scales)
    assert ours.tensor_scale.item() == np.float32(tensor_amax / np.float32(448 * 6))
    if np.isfinite(tensor_amax) and tensor_amax > 1e-30:  # below, its scale is subnormal
        indices = [np.arange(size) // length for size, length in zip(x.shape, block, strict=True)]
        expected = np.vectorize(reference.value_nvfp4, otypes=[float])(codes, scales[np.ix_(*indices)], tensor_amax)
        np.testing.assert_allclose(dequantize(ours).double().numpy(), expected, rtol=3e-7, atol=1e-44)


@pytest.mark.parametrize("case", adversarial())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_adversarial(case: str, dtype: torch.dtype) -> None:
    x = adversarial()[case].to(dtype)
    x = torch.nn.functional.pad(x, (0, x.shape[1] % 2))  # two codes to a byte
    for block in ((1, 4), (3, 1), (4, 4), *BLOCKS):
        check_against_reference(x, block)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("shape", [(32, 64), (48, 18), (5, 40), (17, 2)])
def test_blocks_of_16(block: tuple[int, int], shape: tuple[int, int]) -> None:
    """Blocks whose sizes differ so much that some scales are subnormal in E4M3, or zero."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(shape, generator=generator) * torch.exp(5 * torch.randn(shape, generator=generator))
    check_against_reference(x.bfloat16(), block)
    check_against_reference(x, block)


def test_ties_of_block_scales() -> None:
    """Amaxes in BF16 often lie in the middle between two scales, where a second rounding shows."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(96, 160, generator=generator) * torch.exp(2 * torch.randn(96, 160, generator=generator))
    check_against_reference(x.bfloat16(), (1, 16))


# --- Hadamard transform -----------------------------------------------------------------------------------------------


def test_the_transform_is_orthogonal() -> None:
    matrix = hadamard_matrix(torch.float64, torch.device("cpu"))
    assert torch.equal(matrix @ matrix.t(), torch.eye(16, dtype=torch.float64))
    assert (matrix.abs() == 0.25).all()


def test_the_transform_equals_the_reference() -> None:
    x = torch.randn(48, 5, generator=torch.Generator().manual_seed(5))
    expected = reference.hadamard_columns(x.numpy())
    np.testing.assert_allclose(hadamard_transform(x).numpy(), expected, rtol=1e-6, atol=1e-6)
    for each in (x.bfloat16(), (x * 1e-40).bfloat16()):
        expected = torch.from_numpy(reference.hadamard_columns(each.float().numpy())).float().bfloat16()
        assert torch.equal(hadamard_transform(each), expected), "rounded once, also where numbers are subnormal"


def test_the_transform_cancels_in_a_product() -> None:
    generator = torch.Generator().manual_seed(6)
    x, dy = (torch.randn(64, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    torch.testing.assert_close(hadamard_transform(dy).t() @ hadamard_transform(x), dy.t() @ x)


def test_the_transform_spreads_an_outlier() -> None:
    x = torch.zeros(16, 2)
    x[3, 0] = 8.0
    assert (hadamard_transform(x)[:, 0].abs() == 2.0).all()


def test_rows_that_are_no_multiple_of_16_are_refused() -> None:
    with pytest.raises(ValueError, match="groups of 16, here are 24: choose --seq-length"):
        hadamard_transform(torch.zeros(24, 2))


# --- stochastic rounding ----------------------------------------------------------------------------------------------

NOISE_UNIT = 1 / 256  # eight random bits: a probability is off by at most 2^-9


@pytest.mark.parametrize("x", [0.0, 0.1, 0.25, 0.5, 0.6, 1.2, 1.99, 2.01, 2.7, 3.9, 4.5, 5.9, 6.0, 7.0, -0.3, -4.7])
def test_stochastic_rounding_is_adjacent_and_unbiased(x: float) -> None:
    count = 1 << 16
    noise = random_bytes(count, torch.Generator().manual_seed(7))
    rounded = decode(cast(torch.full((count,), x), E2M1, noise=noise), E2M1, torch.float32)
    below, above, probability = reference.stochastic_neighbours(float(np.float32(x)), "e2m1")
    assert set(rounded.tolist()) <= {below, above}
    found = 0.0 if below == above else (rounded == above).double().mean().item()
    deviation = (probability * (1 - probability) / count) ** 0.5
    assert abs(found - probability) <= NOISE_UNIT / 2 + 4 * deviation


def test_rounding_probability_follows_the_noise_bytes() -> None:
    """Of 256 bytes, k round up where a value is at k/256 between its neighbours. Values of E2M1 never change."""
    noise = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    for numerator in range(257):
        for below, above in ((0.0, 0.5), (1.5, 2.0), (2.0, 3.0), (4.0, 6.0)):
            x = torch.full((256,), below + (above - below) * numerator / 256)
            rounded = decode(cast(x, E2M1, noise=noise), E2M1, torch.float32)
            assert (rounded == above).sum() in (numerator, numerator - 1, numerator + 1)
            if numerator in (0, 256):
                assert (rounded == (above if numerator else below)).all()


def test_mean_of_many_quantizations_equals_the_tensor() -> None:
    """Except for values beyond six times their block's scale, which saturate: that scale is rounded, also down."""
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(8))
    noise, stochastic = RoundingNoise("test"), rule((1, 16), is_stochastic=True)
    draws = [dequantize(quantize(x, stochastic, generator=noise.next_generator(x.device))) for _ in range(400)]
    nearest = quantize(x, rule((1, 16)))
    fits = x.abs() <= 6 * nearest.tensor_scale * nearest.dequant_scale.float().repeat_interleave(16, dim=1)
    assert fits.float().mean() > 0.9
    mean_error = (torch.stack(draws).mean(dim=0) - x)[fits].norm() / x.norm()
    nearest_error = (dequantize(nearest) - x)[fits].norm() / x.norm()
    assert mean_error < nearest_error / 10, "the error of a draw is about 1.5 times nearest's, the mean's 20 times less"


def test_noise_is_a_function_of_name_and_count() -> None:
    def draws(name: str, start: int = 0) -> list[list[int]]:
        noise = RoundingNoise(name)
        noise.load_state_dict({"num_draws": torch.tensor([start])})
        return [random_bytes(32, noise.next_generator(torch.device("cpu"))).tolist() for _ in range(3)]

    assert draws("a") == draws("a")
    assert draws("a")[1:] == draws("a", start=1)[:2]
    distinct = {tuple(bytes_) for name in ("a", "b") for bytes_ in draws(name)}
    assert len(distinct) == 6


def test_steps_and_replays_continue_the_stream() -> None:
    """A step takes the generators of the last one again; a replay draws after they were seeded, all at once."""
    cpu, free, noise = torch.device("cpu"), RoundingNoise("a"), RoundingNoise("a")
    expected = [random_bytes(8, free.next_generator(cpu)).tolist() for _ in range(9)]
    found = []
    for _ in range(2):
        noise.start_step()
        found += [random_bytes(8, noise.next_generator(cpu)).tolist() for _ in range(3)]
    assert len(noise.generators) == 3
    noise.seed_draws(2)
    found += [random_bytes(8, generator).tolist() for generator in noise.generators[:2]]
    noise.seed_draws(1)
    assert found + [random_bytes(8, noise.generators[0]).tolist()] == expected


def test_noise_is_uniform() -> None:
    counts = torch.bincount(random_bytes(1 << 18, torch.Generator().manual_seed(9)).int(), minlength=256)
    expected = (1 << 18) / 256
    assert ((counts - expected).abs() < 6 * expected**0.5).all()
