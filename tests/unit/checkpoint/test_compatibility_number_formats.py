"""Settings that are number formats, and settings that only determine how they are computed."""

from __future__ import annotations

from pathlib import Path

import pytest

from megafp8.checkpoint import compatibility
from megafp8.checkpoint.compatibility import check_number_formats
from megafp8.config import flags
from megafp8.config.schema import RunConfig
from megafp8.errors import CheckpointError

TENSORWISE, DELAYED = ("--bf16 --fp8-format hybrid --fp8-recipe " + recipe for recipe in ("tensorwise", "delayed"))
NVFP4 = "--bf16 --fp4-format e2m1 --first-last-layers-bf16"


MAPPED = f"{TENSORWISE} --num-layers 2 --precision *.linear_fc2=mxfp8"


def config_of(text: str) -> RunConfig:
    """As parsed, without rules."""
    return flags.parse(text.split()).config


def checked(before: str, now: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    monkeypatch.setattr(compatibility, "read_config", lambda path: config_of(before))
    config = config_of(now)
    return check_number_formats(Path("iter_0000007"), config.model, config.precision, config.checkpoint)


@pytest.mark.parametrize(
    ("before", "now", "named"),
    [
        ("--bf16", TENSORWISE, "precision.fp8_format: None -> hybrid"),
        (TENSORWISE, "--bf16", "precision.fp8_format: hybrid -> None"),
        (TENSORWISE, DELAYED, "precision.fp8_recipe: tensorwise -> delayed"),
        (TENSORWISE, TENSORWISE.replace("hybrid", "e4m3"), "precision.fp8_format: hybrid -> e4m3"),
        (TENSORWISE, f"{TENSORWISE} --first-last-layers-bf16", "precision.first_last_layers_bf16: False -> True"),
        (DELAYED, f"{DELAYED} --fp8-margin 1", "precision.fp8_margin: 0 -> 1"),
        (NVFP4, f"{NVFP4} --no-fp4-stochastic-rounding", "precision.fp4_stochastic_rounding: True -> False"),
        (NVFP4, f"{NVFP4} --fp4-four-over-six", "precision.fp4_four_over_six: False -> True"),
        (NVFP4, f"{NVFP4} --fp4-recipe quartet2", "precision.fp4_recipe: nvfp4 -> quartet2"),
        ("", "--bf16", "precision.bf16: False -> True"),
        (
            MAPPED,
            f"{MAPPED} --precision layers.1.*:wgrad=bf16",
            "precision of layers.1.linear_qkv, layers.1.linear_proj, layers.1.linear_fc1: tensorwise hybrid -> fprop "
            "tensorwise hybrid, dgrad tensorwise hybrid, wgrad high precision",
        ),
        (f"{TENSORWISE} --num-layers 2", MAPPED, "layers.1.linear_fc2: tensorwise hybrid -> mxfp8 hybrid"),
        (
            f"{MAPPED} --precision output_layer=delayed",
            f"{MAPPED} --precision output_layer=delayed --fp8-margin 1",
            "precision.fp8_margin: 0 -> 1",
        ),
        (TENSORWISE, f"{TENSORWISE} --fp8-schedule bf16:9,fp8", "precision.fp8_schedule: None -> bf16:9,fp8"),
    ],
)
def test_other_number_formats_need_a_flag(before: str, now: str, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError) as caught:
        checked(before, now, monkeypatch)
    assert named in str(caught.value) and "--override-precision" in str(caught.value)
    (note,) = checked(before, f"{now} --override-precision --load runs/x", monkeypatch)
    assert named in note


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (TENSORWISE, TENSORWISE),
        ("--bf16", "--bf16 --fp8-recipe tensorwise"),  # without a format there is no recipe
        (TENSORWISE, f"{TENSORWISE} --fp8-margin 1"),  # for delayed scaling
        (TENSORWISE, f"{TENSORWISE} --fp8-param-gather --use-distributed-optimizer"),
        (MAPPED, f"{TENSORWISE} --num-layers 2 --precision layers.0-1.linear_fc2=bf16 *.linear_fc2=mxfp8"),
        (TENSORWISE, f"{TENSORWISE} --transformer-impl emulated --num-layers-at-start-in-bf16 2"),
    ],
)
def test_settings_without_effect_on_numerics_may_differ(before: str, now: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checked(before, now, monkeypatch) == ()
