"""Patterns of --fp8-log-layers match linears with statistics."""

from __future__ import annotations

import pytest

from megafp8.config import flags, rules

RUN = (
    "--model-preset tiny --seq-length 64 --micro-batch-size 2 --global-batch-size 8 --train-iters 8 --lr 1e-3 --bf16 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 500 --fp8-log-interval 2"
)
FP8, TRIED = "--fp8-format hybrid --fp8-recipe tensorwise", "--fp8-what-if mxfp8"


def problems_of(text: str) -> list[str]:
    return rules.setting_problems(flags.parse(f"{RUN} {text}".split()).config, 1)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (f"{FP8} --fp8-log-layers output_layer", "matches only linear layers in high precision"),
        (f"{FP8} {TRIED} --fp8-log-layers output_layer", "set a recipe for these with --precision"),
        (f"{FP8} --fp8-log-layers layers.0.* --precision layers.0.*=bf16", "quantized ones, layers.1.linear_qkv to"),
        (f"{FP8} --fp8-log-layers layers.1.*,layers.0.* --precision layers.0.*=bf16", "--fp8-log-layers layers.0.*"),
        (f"{FP8} --precision *=bf16", "no linear layer of this run is quantized"),
        (f"{TRIED} --fp8-log-layers output_layer", "covers only the linear layers"),
        (f"{FP8} --fp8-log-layers layers.0-5.*", "layers.0-5: the layers are 0 to 1"),
        (f"{FP8} --fp8-log-layers layers.1-0.*", "a range must be ascending; use layers.0-1"),
        (f"{FP8} --fp8-log-layers *.linear_fc3", "matches no linear layer"),
    ],
)
def test_a_pattern_without_statistics_is_refused(text: str, why: str) -> None:
    (problem,) = problems_of(text)
    assert why in problem


@pytest.mark.parametrize(
    "text",
    [
        f"{FP8} --fp8-log-layers layers.0-1.linear_fc1,*.linear_qkv",
        f"{FP8} --fp8-log-layers output_layer --precision output_layer=mxfp8",
        f"{FP8} --fp8-log-layers layers.0.* --precision layers.0.*:wgrad=bf16",
        f"{FP8} --fp8-log-layers layers.0.* --fp8-schedule bf16:4,fp8",
        f"{TRIED} --fp8-log-layers layers.0.*",
    ],
)
def test_a_pattern_of_linears_with_statistics_is_accepted(text: str) -> None:
    assert problems_of(text) == []
