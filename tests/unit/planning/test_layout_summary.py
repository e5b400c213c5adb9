"""megafp8.plan."""

from __future__ import annotations

import warnings

import pytest

import megafp8
from megafp8.config import flags
from megafp8.errors import ConfigError

SMALL = {"model": "gpt2-124m", "gpus": 2, "gpu": "H100"}


@pytest.fixture(autouse=True)
def remarks() -> None:
    warnings.simplefilter("ignore")


def test_layouts_are_those_of_the_planner() -> None:
    layouts = megafp8.plan(**SMALL, recipe="tensorwise", seq_length=512, sequence_parallel=False)
    best = layouts[0]
    assert best.tokens_per_s_per_gpu == max(each.tokens_per_s_per_gpu for each in layouts)
    assert best.tensor * best.pipeline * best.context * best.data == 2
    config = flags.parse(best.argv).config
    assert (config.precision.fp8_recipe, config.precision.fp8_format) == ("tensorwise", "hybrid")
    assert config.data.seq_length == 512 and config.model.model_preset == "gpt2-124m"
    assert sum(best.step_parts_s.values()) == pytest.approx(best.step_s)


def test_given_settings_are_not_searched() -> None:
    layouts = megafp8.plan(**SMALL, tensor_model_parallel_size=2)
    assert {(each.tensor, each.data) for each in layouts} == {(2, 1)}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"gpu": "a1000"}, "gpu a1000; did you mean a100 or a100-40gb? (known GPUs: a100,"),
        ({"gpus": 0}, "gpus 0: must be at least 1"),
        ({"recipe": "fp5"}, "fp5 (known recipes: bf16"),
        ({"seq_len": 5}, "--seq-length"),
        ({"model": "llama3-405b"}, "llama3-405b does not fit on 2 x H100: the smallest layout needs"),
    ],
)
def test_errors(arguments: dict, text: str) -> None:
    with pytest.raises(ConfigError) as error:
        megafp8.plan(**(SMALL | arguments))
    assert text in str(error.value)


def test_remarks_are_warnings() -> None:
    with pytest.warns(UserWarning, match="not supported by Transformer Engine"):
        megafp8.plan(**SMALL, recipe="rowwise", tensor_model_parallel_size=1)
