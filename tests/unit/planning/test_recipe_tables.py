"""The planner's data of each recipe. It invents nothing for an unknown recipe."""

import pytest

from megafp8.errors import ConfigError
from megafp8.planning.compute import bytes_per_element
from megafp8.planning.step_time import peak_dtype


@pytest.mark.parametrize(
    ("recipe", "bytes_of_a_code", "peak"),
    [("bf16", 2, "bf16"), ("tensorwise", 1, "fp8"), ("mxfp8", 1, "fp8"), ("nvfp4", 0.5, "fp4")],
)
def test_codes_and_peaks(recipe, bytes_of_a_code, peak):
    assert (bytes_per_element(recipe), peak_dtype(recipe)) == (bytes_of_a_code, peak)


@pytest.mark.parametrize("of_recipe", [bytes_per_element, peak_dtype])
def test_an_unknown_recipe_is_an_error(of_recipe):
    with pytest.raises(ConfigError, match="'tensorwize' is not a recipe; recipes: tensorwise, "):
        of_recipe("tensorwize")
