"""`--performance max`: what it adds, and what it leaves out with the reason."""

from __future__ import annotations

from typing import Optional

import pytest
from automatic_runs import BETA2, DELAYED, chosen, validated


def test_maximum_performance_adds_compatible_settings() -> None:
    found = chosen(f"{DELAYED} --performance max")
    assert found["--precision"] == "output_layer=tensorwise"
    config = validated(f"{DELAYED} --performance max").invocation.config
    assert config.precision.precision_map == ("output_layer=tensorwise",)
    assert config.optimizer.use_precision_aware_optimizer is None
    choices = validated(f"{DELAYED} --performance max").choices
    (unchanged,) = (each for each in choices if each.flag == "--use-precision-aware-optimizer")
    assert unchanged.value == "off" and "--adam-beta2 0.999" in unchanged.reason


@pytest.mark.parametrize("recipe", ["", DELAYED])
def test_maximum_performance_has_moments_in_bf16(recipe: str) -> None:
    settings = validated(f"{recipe} {BETA2} --performance max").invocation.config.optimizer
    assert settings.use_precision_aware_optimizer
    assert (settings.exp_avg_dtype, settings.exp_avg_sq_dtype, settings.main_params_dtype) == ("bf16", "bf16", "fp32")


@pytest.mark.parametrize(
    "extra",
    [
        "--no-use-precision-aware-optimizer",
        "--no-use-distributed-optimizer",
        "--no-one-pass-optimizer",
        "--optimizer sgd",
        "--use-torch-fsdp2",
        "--exp-avg-dtype fp32",
        f"{DELAYED} --fp8-param-gather",  # without FP32 master weights the one-pass update has no such moments
    ],
)
def test_maximum_performance_keeps_moments_in_fp32(extra: str) -> None:
    config = validated(f"{BETA2} --performance max {extra}", world_size=2).invocation.config
    assert not config.optimizer.use_precision_aware_optimizer and config.optimizer.exp_avg_dtype == "fp32"


@pytest.mark.parametrize(
    ("extra", "target"),
    [
        (DELAYED, "cpu"),
        (f"{DELAYED} --fp8-param-gather --no-use-transformer-engine-op-fuser", "h200"),
        ("--no-use-transformer-engine-op-fuser", "h200"),
    ],
)
def test_maximum_performance_reports_where_it_adds_nothing(extra: str, target: str) -> None:
    (choice,) = (each for each in validated(f"{extra} --performance max", target).choices if "performance" in each.flag)
    assert choice.reason.startswith("adds nothing")


@pytest.mark.parametrize(
    ("extra", "output_layer", "moments"),
    [
        (BETA2, "layers are not in FP8", None),
        ("--fp8-format e4m3 --fp8-recipe mxfp8", "mxfp8 has no recipe for the output layer", "0.999"),
        (
            f"{BETA2} --fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather",
            "--fp8-param-gather: the precision map gives output_layer tensorwise hybrid, but Transformer Engine "
            "supports FP8 weights in one recipe only",
            None,
        ),
        (f"{DELAYED} --precision output_layer=bf16", "the precision map has output_layer", "0.999"),
        (f"{DELAYED} --no-one-pass-optimizer", None, "the one-pass update excludes --no-one-pass-optimizer"),
        (f"{DELAYED} --no-use-precision-aware-optimizer", None, "flags choose the dtypes of moments"),
    ],
)
def test_maximum_performance_names_what_it_leaves_out(
    extra: str, output_layer: Optional[str], moments: Optional[str]
) -> None:
    choices = validated(f"{extra} --performance max", "b200").choices
    for flag, reason in (("--precision", output_layer), ("--use-precision-aware-optimizer", moments)):
        (choice,) = (each for each in choices if each.flag.split()[0] == flag)
        is_left_out = choice.value in ("off", "as given")
        assert is_left_out == (reason is not None) and (reason or "--performance max") in choice.reason


@pytest.mark.parametrize(
    ("extra", "flag", "reason"),
    [
        (
            f"{BETA2} --use-torch-fsdp2",
            "--use-precision-aware-optimizer",
            "the optimizer of FSDP2 keeps FP32 master weights and moments of its rows",
        ),
        (
            f"{DELAYED} --tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap",
            "--precision",
            "--tp-comm-overlap with a precision map: the user buffers support only one recipe",
        ),
    ],
)
def test_maximum_performance_asks_nobody_to_remove_what_it_left_out(extra: str, flag: str, reason: str) -> None:
    choices = validated(f"{extra} --performance max", world_size=2).choices
    (choice,) = (each for each in choices if each.flag == flag and each.value == "off")
    assert choice.reason.endswith(reason)


@pytest.mark.parametrize("entry", ["output_layer=bf16", "*=bf16", "output*:wgrad=bf16"])
def test_maximum_performance_keeps_a_map(entry: str) -> None:
    config = validated(f"{DELAYED} --performance max --precision {entry}").invocation.config
    assert config.precision.precision_map == (entry,)
