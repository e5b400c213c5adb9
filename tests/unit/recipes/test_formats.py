"""The table of formats agrees with torch's types."""

import pytest
import torch

from megafp8.quantization.rounding import CODE_DTYPES
from megafp8.recipes.formats import E4M3, E5M2, FORMATS, Format


@pytest.mark.parametrize("fmt", [E4M3, E5M2])
def test_range_is_that_of_the_torch_type(fmt: Format) -> None:
    limits = torch.finfo(CODE_DTYPES[fmt.name])
    assert (fmt.max, fmt.min_normal) == (limits.max, limits.tiny)
    assert 1 + fmt.exponent_bits + fmt.mantissa_bits == limits.bits
    assert torch.tensor(fmt.nan_code, dtype=torch.uint8).view(CODE_DTYPES[fmt.name]).float().isnan()


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda fmt: fmt.name)
def test_smallest_values_follow_from_bias(fmt: Format) -> None:
    smallest_exponent = -fmt.exponent_bias if fmt.name == "e8m0" else 1 - fmt.exponent_bias
    assert fmt.min_normal == 2.0**smallest_exponent
    assert fmt.min_subnormal == fmt.min_normal / 2**fmt.mantissa_bits


def test_table_is_frozen() -> None:
    with pytest.raises(TypeError):
        FORMATS["e9m9"] = E4M3
