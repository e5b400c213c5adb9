"""The precision table describes each recipe."""

import pytest

from megafp8.config.schema import ModelConfig, PrecisionConfig, RunConfig
from megafp8.resources.precision_table import format_precision_map, resolve_precision_map


def config_of(**precision: object) -> RunConfig:
    return RunConfig(model=ModelConfig(num_layers=4), precision=PrecisionConfig(bf16=True, **precision))


def gemms_of_a_layer(**precision: object) -> tuple[str, str, str]:
    """fprop, dgrad and wgrad of the first linear."""
    first = resolve_precision_map(config_of(**precision).model, config_of(**precision).precision)[0]
    return first.fprop, first.dgrad, first.wgrad


EXPECTED = {
    ("tensorwise", "hybrid"): (
        "input e4m3 x weight e4m3 per tensor, fp32 scale",
        "grad_output e5m2 x weight e4m3 per tensor, fp32 scale",
        "grad_output e5m2 x input e4m3 per tensor, fp32 scale",
    ),
    ("blockwise", "e4m3"): (
        "input e4m3 x weight e4m3 per 1x128 x 128x128, power of two scale",
        "grad_output e4m3 x weight e4m3 per 1x128 x 128x128, power of two scale",
        "grad_output e4m3 x input e4m3 per 1x128, power of two scale",
    ),
    ("blockwise", "hybrid"): (
        "input e4m3 x weight e4m3 per 1x128 x 128x128, power of two scale",
        "grad_output e5m2 x weight e4m3 per 1x128 x 128x128, power of two scale",
        "grad_output e5m2 x input e4m3 per 1x128, power of two scale",
    ),
    ("mxfp8", "hybrid"): (
        "input e4m3 x weight e4m3 per 1x32, e8m0 scale",
        "grad_output e5m2 x weight e4m3 per 1x32, e8m0 scale",
        "grad_output e5m2 x input e4m3 per 1x32, e8m0 scale",
    ),
}


@pytest.mark.parametrize("recipe, fp8_format", EXPECTED)
def test_recipes(recipe: str, fp8_format: str) -> None:
    expected = EXPECTED[recipe, fp8_format]
    assert gemms_of_a_layer(fp8_recipe=recipe, fp8_format=fp8_format) == expected


def test_fp4_table_shows_the_handling_of_gradients() -> None:
    assert gemms_of_a_layer(fp4_format="e2m1") == (
        "input e2m1 x weight e2m1 per 1x16 x 16x16, e4m3 x fp32 scale",
        "grad_output e2m1 (stochastic rounding) x weight e2m1 per 1x16 x 16x16, e4m3 x fp32 scale",
        "grad_output e2m1 (Hadamard and stochastic rounding) x input e2m1 (Hadamard) per 1x16, e4m3 x fp32 scale",
    )


def test_delayed_scaling_shows_its_history() -> None:
    """Megatron's defaults, which are not Transformer Engine's (max of 1024)."""
    fprop, _, _ = gemms_of_a_layer(fp8_recipe="delayed", fp8_format="hybrid")
    assert fprop == "input e4m3 x weight e4m3 per tensor, delayed (most_recent of 1, margin 0) fp32 scale"
    fprop, _, _ = gemms_of_a_layer(
        fp8_recipe="delayed", fp8_format="hybrid", fp8_amax_history_len=16, fp8_amax_compute_algo="max", fp8_margin=1
    )
    assert fprop.endswith("delayed (max of 16, margin 1) fp32 scale")


def test_weight_gradients_in_high_precision() -> None:
    _, _, wgrad = gemms_of_a_layer(fp8_recipe="mxfp8", fp8_format="e4m3", fp8_wgrad=False)
    assert wgrad == "bf16 x bf16"


def test_layers_in_high_precision_have_rows_of_their_own() -> None:
    config = config_of(fp8_format="e4m3", fp8_recipe="tensorwise", first_last_layers_bf16=True)
    rows = resolve_precision_map(config.model, config.precision)
    layers = {(row.layers, row.fprop) for row in rows if row.linear == "linear_qkv"}
    assert layers == {("1-2", "input e4m3 x weight e4m3 per tensor, fp32 scale"), ("0, 3", "bf16 x bf16")}
    assert rows[-1].linear == "output_layer"
    assert rows[-1].fprop == "bf16 x bf16"


def test_columns_are_aligned() -> None:
    text = format_precision_map(resolve_precision_map(config_of().model, config_of().precision))
    starts = {line.index("bf16 x bf16") for line in text.splitlines()[2:]}
    assert len(starts) == 1
