"""`megafp8 goodput` and `megafp8 plan --goodput` as a user runs them."""

from __future__ import annotations

import json
import re

import pytest

from megafp8.cli import goodput, plan
from megafp8.cli.goodput_flags import REFUSED_FLAGS, build_inputs, goodput_problems
from megafp8.config import flags
from megafp8.device.gpus import GPUS
from megafp8.planning.goodput import RANGES, GoodputInputs

FIGURES = ("--step-s", "5", "--tokens-per-step", "16e6", "--checkpoint-gb", "5000")
SMALL = ("--goodput", "--gpus", "512", "--gpu", "h100", "--days", "5", *FIGURES)


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    status = plan.main(list(arguments))
    return status, *capsys.readouterr()


def inputs_of(*arguments: str) -> GoodputInputs:
    own, training = plan.build_parser().parse_known_args(arguments)
    return build_inputs(own, flags.parse(training), GPUS[own.gpu])[0]


def test_text(capsys) -> None:
    status, output, _ = run(capsys, *SMALL, "--async-save", "--save-interval", "25")
    assert status == 0
    for text in (
        "goodput of 5 days on 512 x h100 (64 nodes)", "effective training time 9", "billion tokens per day",
        "1.2 failures, one every 4.1 days", "--save-interval: 25 steps between saves, 2.1 minutes: ",
        "where the time goes",
        "a step of 16,000,000 tokens takes 5 s (given)", "saves: training stops for 8.53 s, complete after 60.1 s",
    ):  # fmt: skip
        assert text in output


def test_the_command_prints_what_plan_prints(capsys) -> None:
    assert run(capsys, *SMALL) == (goodput.main([*SMALL[1:]]), *capsys.readouterr())
    assert goodput.main(["--gpus", "8", "--restart-s", "-1"]) == 64
    assert capsys.readouterr().err.startswith("goodput: 1 problem with the settings:\n  - --restart-s -1: must be")


def test_help_has_the_flags_of_the_formulas_in_one_place() -> None:
    own, of_plan = goodput.build_parser().format_help(), plan.build_parser().format_help()
    assert all(flag in own and flag not in of_plan for flag in RANGES)
    assert not any(flag in own + of_plan for flag in REFUSED_FLAGS)


def test_json_with_the_step_time_and_checkpoint_size_of_the_model(capsys) -> None:
    """Llama 3 8B: 8.03e9 parameters of 14 bytes, a batch of 4 million tokens."""
    model = ("--goodput", "--gpus", "64", "--model-preset", "llama3-8b", "--days", "2")
    status, output, errors = run(capsys, *model, "--json", "--save-interval", "25")
    assert status == 0, errors
    found = json.loads(output)
    assert found["save_interval"] == 25 and found["at_intervals"]["--save-interval"]["steps"] == 25
    assert sum(found["parts"].values()) == pytest.approx(1)
    inputs = found["inputs"]
    assert inputs["tokens_per_step"] == 4 * 2**20 and 0.5 < inputs["step_s"] < 20
    assert found["tokens_per_day"] == pytest.approx(
        found["effective_fraction"] * 86_400 / inputs["step_s"] * inputs["tokens_per_step"]
    )
    assert "predicted for" in found["sources"][0] and "a checkpoint of 112.4 GB" in found["sources"][1]
    assert inputs["write_s"] == pytest.approx(112.4 / (8 * 1.3), rel=1e-3)
    assert inputs_of(*model, "--step-s", "3").step_s == 3


def test_flags_reach_the_formulas_in_their_units() -> None:
    words = (
        "--gpu-failures-per-1000-days 0.5 --node-failures-per-1000-days 3 --detection-s 4 --restart-s 90 "
        "--save-interval 25 --async-save --save-stall-s 2 --node-storage-gb-per-s 2 --storage-gb-per-s 50"
    )
    expected = {
        "num_gpus": 512, "num_nodes": 64, "days": 5, "step_s": 5, "tokens_per_step": 16e6, "save_interval": 25,
        "stall_s": 2, "write_s": 100, "load_s": 100, "detection_s": 4, "restart_s": 90,
        "gpu_failures_per_s": 0.5 / 86.4e6, "node_failures_per_s": 3 / 86.4e6,
    }  # fmt: skip
    assert vars(inputs_of(*SMALL, *words.split())) == pytest.approx(expected)


def test_asynchronous_saves_stall_for_a_part_of_the_save() -> None:
    synchronous, asynchronous = inputs_of(*SMALL), inputs_of(*SMALL, "--async-save")
    assert synchronous.stall_s == synchronous.write_s == pytest.approx(5000 / (64 * 1.3))
    assert asynchronous.stall_s == pytest.approx(0.142 * asynchronous.write_s)


def test_numbers_out_of_range_are_refused_together_and_stated_limits_are_permitted(capsys) -> None:
    status, output, errors = run(capsys, *SMALL, *(f"{flag}=-1" for flag in RANGES))
    assert status == 64 and output == ""
    found = re.findall(r"(--[a-z0-9-]+) -1: must be between (\S+) and (\S+)", errors)
    assert [flag for flag, *_ in found] == [*RANGES]
    assert ("--days", "0.01", "3,650") in found
    for flag, *limits in found:
        for limit in limits:
            own, _ = plan.build_parser().parse_known_args([*SMALL, f"{flag}={limit.replace(',', '')}"])
            assert list(goodput_problems(own)) == [], (flag, limit)


def test_flags_of_the_former_simulation_are_refused_with_what_to_give(capsys) -> None:
    given = [word for flag in REFUSED_FLAGS for word in (flag, *([] if "failures-while" in flag else ["3"]))]
    for words in ((*SMALL, *given), ("--gpus", "8", "--model-preset", "llama3-8b", *given)):
        status, output, errors = run(capsys, *words)
        assert status == 64 and output == ""
        assert all(f"{flag}: {reason}" in errors for flag, reason in REFUSED_FLAGS.items())


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("flag", ["--days", "--network-gbit-per-s"])
def test_values_that_are_not_finite_are_refused(capsys, flag, value) -> None:
    with pytest.raises(SystemExit) as ended:
        plan.main([*SMALL, f"{flag}={value}"])
    assert ended.value.code == 64 and f"{flag}: '{value}' is not a finite number" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--gpus", "8", "--model-preset", "llama3-8b", "--days", "3"), "--days: only with --goodput"),
        (("--goodput", "--gpus", "8"), "neither a model nor the figures of one: give --model-preset"),
        (("--goodput", "--gpus", "8", *FIGURES[:4]), "--step-s, --tokens-per-step and --checkpoint-gb"),
        (("--goodput", "--gpus", "8", "--model-preset", "llama3-70b"), "no layout of the model fits"),
        ((*SMALL, "--scaling", "8"), "--scaling: not with --goodput"),
        ((*SMALL, "--top", "3"), "--top: not with --goodput"),
        ((*SMALL, "--save-stall-s", "1"), "add --async-save"),
        ((*SMALL, "--save-stall-s", "1e5", "--async-save"), "longer than the complete save"),
        ((*SMALL, "--no-such-flag"), "unknown flag --no-such-flag"),
        ((*SMALL, "--plot", "goodput.png"), "--plot: not with --goodput"),
        ((*SMALL, "--global-batch-size", "-5"), "--global-batch-size -5"),
        ((*SMALL, "--save-interval", "0"), "--save-interval 0 must be at least 1"),
    ],
)
def test_what_has_no_goodput_is_refused_with_the_reason(capsys, arguments, reason) -> None:
    status, output, errors = run(capsys, *arguments)
    assert status == 64 and output == "" and reason in errors


@pytest.mark.parametrize("words", [("--restart-s", "5m"), ("--gpus", "1e9"), ("--gpu", "foo")])
def test_what_is_not_a_number_is_refused_as_wrong_flags(capsys, words) -> None:
    with pytest.raises(SystemExit) as ended:
        plan.main([*SMALL, *words])
    assert ended.value.code == 64 and words[0] in capsys.readouterr().err
