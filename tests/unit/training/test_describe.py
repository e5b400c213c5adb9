"""What a run says of itself at its start."""

from megafp8.config.schema import ModelConfig, PrecisionConfig, RunConfig
from megafp8.training.describe import recipe_lines


def lines_of(**precision: object) -> list[str]:
    config = RunConfig(model=ModelConfig(num_layers=4), precision=PrecisionConfig(bf16=True, **precision))
    return recipe_lines(config, "emulated")


def test_the_resolved_recipe_has_a_line_for_each_gemm() -> None:
    assert lines_of(fp8_format="hybrid", fp8_recipe="mxfp8") == [
        "recipe of layers 0-3: fp8 hybrid mxfp8, emulated, on bf16",
        "  fprop  input e4m3 x weight e4m3 per 1x32, e8m0 scale",
        "  dgrad  grad_output e5m2 x weight e4m3 per 1x32, e8m0 scale",
        "  wgrad  grad_output e5m2 x input e4m3 per 1x32, e8m0 scale",
    ]


def test_defaults_and_exceptions_are_in_it() -> None:
    assert all("delayed (most_recent of 1, margin 0)" in line for line in lines_of(fp8_format="hybrid")[1:])
    kept = lines_of(fp8_format="e4m3", fp8_recipe="tensorwise", first_last_layers_bf16=True, fp8_wgrad=False)
    assert kept[0].startswith("recipe of layers 1-2:")
    assert kept[3] == "  wgrad  bf16 x bf16"


def test_weights_that_are_codes_are_said() -> None:
    usual, codes = (lines_of(fp8_format="hybrid", fp8_param_gather=gather) for gather in (False, True))
    assert codes == [*usual, "  weights are kept and gathered as codes and scales"]


def test_high_precision_has_no_recipe() -> None:
    assert lines_of() == []
