"""`megafp8 plan --goodput` as a user runs it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megafp8.cli import plan
from megafp8.cli.goodput_flags import build_request, goodput_problems
from megafp8.config import flags
from megafp8.device.gpus import GPUS
from megafp8.planning.goodput_inputs import GoodputInputs

FIGURES = ("--step-s", "5", "--tokens-per-step", "16e6", "--checkpoint-gb", "5000")
SMALL = ("--goodput", "--gpus", "512", "--gpu", "h100", "--days", "5", "--replicas", "19", *FIGURES)


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    status = plan.main(list(arguments))
    return status, *capsys.readouterr()


def inputs_of(*arguments: str) -> GoodputInputs:
    own, training = plan.build_parser().parse_known_args(arguments)
    return build_request(own, flags.parse(training), GPUS[own.gpu]).inputs


def test_text_and_picture(capsys, tmp_path: Path) -> None:
    picture = tmp_path / "goodput.png"
    more = ("--spare-nodes", "2", "--stragglers-per-1000-node-days", "0.1", "--maintenance-interval-days", "9")
    status, output, _ = run(capsys, *SMALL, *more, "--async-save", "--plot", str(picture))
    assert status == 0
    for text in (
        "goodput of 5 days on 512 x h100 (64 nodes), a save every", "effective training time", "tokens per day",
        "where the time goes", "best by simulation", "Young's formula", "Daly's formula", "what to improve first",
        "a step of 16,000,000 tokens takes 5 s (given)", "2 spare nodes", "saves: asynchronous",
    ):  # fmt: skip
        assert text in output
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 20_000


def test_json_with_the_step_time_and_checkpoint_size_of_the_model(capsys) -> None:
    """Llama 3 8B: 8.03e9 parameters of 14 bytes, a batch of 4 million tokens."""
    model = ("--goodput", "--gpus", "64", "--model-preset", "llama3-8b", "--replicas", "19", "--days", "2")
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


def test_flags_reach_the_simulation_in_its_units() -> None:
    words = (
        "--gpu-failures-per-1000-days 0.5 --node-failures-per-1000-days 3 --failures-per-burst 2 --burst-gap-s 60 "
        "--hang-fraction 0.1 --hardware-fraction 0.5 --detection-s 4 --restart-s 90 --spare-nodes 3 --repair-hours 2 "
        "--maintenance-interval-days 1.5 --maintenance-minutes 20 --stragglers-per-1000-node-days 7 "
        "--straggler-slowdown 1.4 --straggler-hours 3 --simulation-seed 9 --no-failures-while-down "
        "--save-interval 25 --async-save --save-stall-s 2 --node-storage-gb-per-s 2 --storage-gb-per-s 50 "
        "--step-timeout-s 33"
    )
    found = vars(inputs_of(*SMALL, *words.split()))
    expected = {
        "num_gpus": 512, "num_nodes": 64, "days": 5, "step_s": 5, "tokens_per_step": 16e6, "save_interval": 25,
        "stall_s": 2, "write_s": 100, "load_s": 100,
        "failures_per_burst": 2, "burst_gap_s": 60, "hang_fraction": 0.1, "hardware_fraction": 0.5, "detection_s": 4,
        "hang_detection_s": 33, "restart_s": 90, "fails_while_down": False, "spare_nodes": 3, "repair_s": 7200,
        "maintenance_interval_s": 1.5 * 86_400, "maintenance_s": 1200, "straggler_slowdown": 1.4, "straggler_s": 10_800,
        "replicas": 19, "seed": 9, "gpu_failures_per_s": 0.5 / 86.4e6, "node_failures_per_s": 3 / 86.4e6,
        "stragglers_per_s": 7 / 86.4e6,
    }  # fmt: skip
    assert found == pytest.approx(expected)


@pytest.mark.parametrize(
    ("words", "detection_s"), [((), 120), (("--step-s", "60"), 300), (("--step-timeout-s", "0"), 600)]
)
def test_a_hang_is_detected_by_the_timeouts_of_a_run(words, detection_s) -> None:
    assert inputs_of(*SMALL, *words).hang_detection_s == detection_s


def test_asynchronous_saves_stall_for_a_part_of_the_save() -> None:
    synchronous, asynchronous = inputs_of(*SMALL), inputs_of(*SMALL, "--async-save")
    assert synchronous.stall_s == synchronous.write_s == pytest.approx(5000 / (64 * 1.3))
    assert asynchronous.stall_s == pytest.approx(0.142 * asynchronous.write_s)


def flags_with_numbers() -> list[tuple[str, str, str]]:
    return [
        ("--days", "1e9", "between 0.01 and 3,650"),
        ("--days", "0", "between 0.01 and 3,650"),
        ("--step-s", "-1", "between 0.0001 and 100,000"),
        ("--tokens-per-step", "1e30", "between 1 and 1,000,000,000,000"),
        ("--checkpoint-gb", "0", "between 1e-06 and 1,000,000,000"),
        ("--storage-gb-per-s", "-1", "between 0.001 and 1,000,000,000"),
        ("--node-storage-gb-per-s", "-1", "between 0.001 and 1,000,000"),
        ("--gpu-failures-per-1000-days", "-1", "between 0 and 1,000,000,000"),
        ("--failures-per-burst", "0.5", "between 1 and 1,000"),
        ("--hang-fraction", "1.1", "between 0 and 1"),
        ("--restart-s", "1e9", "between 0 and 1,000,000"),
        ("--spare-nodes", "-1", "between 0 and 1,048,576"),
        ("--maintenance-interval-days", "0", "between 0.001 and 100,000"),
        ("--straggler-slowdown", "0.9", "between 1 and 1,000"),
        ("--straggler-hours", "0", "between 0.0001 and 100,000"),
        ("--replicas", "18", "between 19 and 100,000"),
        ("--simulation-seed", "-1", "between 0 and"),
    ]


@pytest.mark.parametrize(("flag", "value", "range_of_it"), flags_with_numbers())
def test_numbers_out_of_range_are_refused(capsys, flag, value, range_of_it) -> None:
    status, output, errors = run(capsys, *SMALL, f"{flag}={value}")
    assert status == 64 and output == ""
    assert f"{flag} {float(value):g}: must be {range_of_it}" in errors


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("flag", ["--days", "--network-gbit-per-s"])
def test_values_that_are_not_finite_are_refused(capsys, flag, value) -> None:
    with pytest.raises(SystemExit) as ended:
        plan.main([*SMALL, f"{flag}={value}"])
    assert ended.value.code == 64 and f"{flag}: '{value}' is not a finite number" in capsys.readouterr().err


def test_the_limits_that_messages_state_are_permitted(capsys) -> None:
    """In the unit of the flag."""
    wrong = {flag: value for flag, value, _ in flags_with_numbers()}
    _, _, errors = run(capsys, *SMALL, *(f"{flag}={value}" for flag, value in wrong.items()))
    ranges = re.findall(r"(--[a-z0-9-]+) \S+: must be between (\S+) and (\S+)", errors)
    assert sorted(flag for flag, *_ in ranges) == sorted(wrong)  # all are reported together
    for flag, *limits in ranges:
        for limit in limits:
            number = limit.replace(",", "")
            own, _ = plan.build_parser().parse_known_args([*SMALL, f"{flag}={number}"])
            assert list(goodput_problems(own)) == [], (flag, limit)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--gpus", "8", "--model-preset", "llama3-8b", "--days", "3"), "--days: only with --goodput"),
        (("--gpus", "8", "--model-preset", "llama3-8b", "--no-failures-while-down"), "only with --goodput"),
        (("--goodput", "--gpus", "8"), "neither a model nor the figures of one: give --model-preset"),
        (("--goodput", "--gpus", "8", *FIGURES[:4]), "--step-s, --tokens-per-step and --checkpoint-gb"),
        (("--goodput", "--gpus", "8", "--model-preset", "llama3-70b"), "no layout of the model fits"),
        ((*SMALL, "--scaling", "8"), "--scaling: not with --goodput"),
        ((*SMALL, "--top", "3"), "--top: not with --goodput"),
        ((*SMALL, "--save-stall-s", "1"), "add --async-save"),
        ((*SMALL, "--save-stall-s", "1e5", "--async-save"), "longer than the complete save"),
        ((*SMALL, "--gpu-failures-per-1000-days", "1e8"), "events are expected"),
        ((*SMALL, "--spare-nodes", "65"), "--spare-nodes 65: more than the 64 nodes of the run"),
        ((*SMALL, "--no-such-flag"), "unknown flag --no-such-flag"),
        ((*SMALL, "--plot", "goodput.xyz"), "--plot goodput.xyz: must end in .png, .svg, .pdf"),
        ((*SMALL, "--step-timeout-s", "-5"), "--step-timeout-s -5"),
        ((*SMALL, "--global-batch-size", "-5"), "--global-batch-size -5"),
        ((*SMALL, "--save-interval", "0"), "--save-interval 0 must be at least 1"),
        ((*SMALL, "--days", "0.01", "--step-s", "1e5"), "longer than the complete run, 864 s"),
        ((*SMALL, "--checkpoint-gb", "1e9", "--storage-gb-per-s", "0.001"), "give more --storage-gb-per-s"),
    ],
)
def test_what_cannot_be_simulated_is_refused_with_the_reason(capsys, arguments, reason) -> None:
    status, output, errors = run(capsys, *arguments)
    assert status == 64 and output == "" and reason in errors


@pytest.mark.parametrize("words", [("--restart-s", "5m"), ("--gpus", "1e9"), ("--gpu", "foo")])
def test_what_is_not_a_number_is_refused_as_wrong_flags(capsys, words) -> None:
    with pytest.raises(SystemExit) as ended:
        plan.main([*SMALL, *words])
    assert ended.value.code == 64 and words[0] in capsys.readouterr().err
