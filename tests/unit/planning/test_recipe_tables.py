"""What the plan knows of each recipe: of one that it does not know it makes nothing up."""

import pytest

from megafp8.config.precision_map import USUAL_FORMATS
from megafp8.errors import ConfigError
from megafp8.planning.memory import code_bytes_of
from megafp8.planning.step_time import peak_dtype


@pytest.mark.parametrize("recipe", USUAL_FORMATS)
def test_every_recipe_is_known(recipe):
    is_fp4 = USUAL_FORMATS[recipe] == "e2m1"
    assert code_bytes_of(recipe) == (0.5 if is_fp4 else 1)
    assert peak_dtype(recipe) == ("fp4" if is_fp4 else "fp8")


def test_high_precision_has_the_peak_of_bf16():
    assert peak_dtype("bf16") == "bf16"


@pytest.mark.parametrize("of_recipe", [code_bytes_of, peak_dtype])
def test_an_unknown_recipe_is_an_error(of_recipe):
    with pytest.raises(ConfigError, match="recipe rowwise .* tensorwise, "):
        of_recipe("rowwise")
