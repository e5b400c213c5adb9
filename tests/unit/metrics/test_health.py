"""Every rule is triggered by statistics made for it, and not by healthy ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from megafp8.config.flags import parse
from megafp8.config.health_case import HealthCase, health_case
from megafp8.metrics.health import RULES, HealthMonitor, find_nonfinite
from megafp8.metrics.records import QuantizationRecord

FC1 = "layers.0.linear_fc1"
TINY = (
    "--model-preset tiny --seq-length 64 --micro-batch-size 2 --global-batch-size 8 --train-iters 40 --lr 1e-3 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 500 --bf16"
)
SATURATED, SMALL = {"saturated_fraction": 0.02}, {"underflow_fraction": 0.2}
FOUR_BITS, NOISY = {"format": "e2m1", "mean_local_sqnr_db": 17.5}, {"mean_local_sqnr_db": 5.0}
STALE, LOOSE = {"staleness_octaves": 1.5}, {"staleness_octaves": -4.0}
BAD = {"num_non_finite": 3}
STALLED, FROZEN = {"update_to_weight": 1e-9}, {"codes_changed_fraction": 0.0}

# Rule -> changes of consecutive statistics (of the input, the weight, the gradient), the tensor, and a part of the
# warning's text at the last one.
PROVOKED = {
    "non-finite values": [
        ([(None, None, BAD)], f"{FC1}.grad_output: 3 values are not finite"),
        ([(BAD, None, BAD)], f"{FC1}.input: 3 values are not finite; first of 2 such operands of linear layers"),
    ],
    "saturation": [
        ([(SATURATED, None, None)] * 2, f"{FC1}.input: 2.00% of its values saturate"),
        ([(FOUR_BITS | {"saturated_fraction": 0.3, "mean_local_sqnr_db": 11.0}, None, None)] * 2, "30.00% of its"),
    ],
    "gradients underflow": [
        ([(None, None, SMALL)] * 2, f"{FC1}.grad_output: 20.0% of its values become zero"),
        ([(None, None, FOUR_BITS | {"underflow_fraction": 0.74})] * 2, "74.0% of its values become zero"),
    ],
    "quantization noise": [
        ([(NOISY, None, None)] * 2, f"{FC1}.input: signal-to-quantization-noise ratio of 5.0 dB"),
        ([(None, FOUR_BITS | NOISY, None)] * 2, f"{FC1}.weight: signal-to-quantization-noise ratio of 5.0 dB"),
    ],
    "scales still changing after warmup": [
        ([({"amax": 2.0}, None, None), ({"amax": 9.0}, None, None), ({"amax": 1.0}, None, None)], "2 -> 9 -> 1")
    ],
    "stale delayed scales": [
        ([(STALE, None, None)] * 2, f"{FC1}.input: its amax is 2.83 times the amax of its scale"),
        ([(None, None, LOOSE)] * 2, f"{FC1}.grad_output: its scale is for 16 times its amax"),
    ],
    "stalled weights": [
        ([(None, STALLED, None)] * 2, f"{FC1}.weight: an update changes it by 1e-09 of its norm"),
        ([(None, FROZEN, None)] * 2, f"{FC1}.weight: an update changes only 0 of its codes"),
    ],
    "growing outlier channel": [
        ([({"outlier_octaves": octaves}, None, None) for octaves in (5.0, 5.5, 6.0, 7.0)], "channel 3 has 128 times")
    ],
}
CASES = [pytest.param(name, *case, id=name.replace(" ", "-")) for name, cases in PROVOKED.items() for case in cases]
Make = Callable[..., QuantizationRecord]


def case_of(flags: str = "--fp8-format hybrid --fp8-recipe delayed --fp8-log-interval 10") -> HealthCase:
    return health_case(parse(f"{TINY} {flags}".split()).config)


def details(
    make_statistics: Make, changes_by_step: list[tuple[Any, Any, Any]], first_step: int = 100
) -> list[list[str]]:
    """The warnings at each statistics step."""
    watch = HealthMonitor(case_of(), warmup_steps=50)
    return [
        [event.detail for event in watch.update(make_statistics(first_step + 10 * index, *changes))]
        for index, changes in enumerate(changes_by_step)
    ]


def test_every_rule_is_provoked() -> None:
    assert set(PROVOKED) == {rule.name for rule in RULES}


@pytest.mark.parametrize(("name", "changes_by_step", "text"), CASES)
def test_a_rule_reports_at_its_threshold(name: str, changes_by_step: list, text: str, make_statistics: Make) -> None:
    said = details(make_statistics, changes_by_step)
    assert not any(said[:-1]), "one record may be chance"
    (detail,) = said[-1]
    assert detail.startswith(f"{name}: ") and text in detail and "; try: " in detail, detail


def test_a_healthy_run_has_no_findings(make_statistics: Make) -> None:
    assert not any(details(make_statistics, [(None, None, None)] * 6))


@pytest.mark.parametrize(
    "changes_by_step",
    [
        pytest.param([(SATURATED, None, None), (None, None, None), (SATURATED, None, None)], id="now-and-then"),
        pytest.param([(SMALL, None, None)] * 3, id="inputs-that-underflow"),
        pytest.param([(FOUR_BITS | {"saturated_fraction": 0.035}, None, None)] * 3, id="block-scales-rounded-down"),
        pytest.param(
            [(FOUR_BITS | {"saturated_fraction": 0.97, "mean_local_sqnr_db": 32.0}, None, None)] * 3, id="blocks-alike"
        ),
        pytest.param([(None, None, FOUR_BITS | {"underflow_fraction": 0.28})] * 3, id="what-four-bits-lose"),
        pytest.param([({"amax": 2.0**-i}, None, None) for i in range(5)], id="scales-that-drift"),
        pytest.param([(None, None, {"amax": 9.0**-i}) for i in range(5)], id="gradients-that-fall"),
        pytest.param([({"staleness_octaves": 0.7}, None, None)] * 3, id="scales-a-little-old"),
        pytest.param([({"outlier_octaves": 8.0}, None, None)] * 5, id="outliers-that-stay"),
        pytest.param(
            [({"outlier_octaves": 5.0 + i, "outlier_channel": i}, None, None) for i in range(5)], id="other-channels"
        ),
    ],
)
def test_healthy_variations_have_no_findings(changes_by_step: list, make_statistics: Make) -> None:
    assert not any(details(make_statistics, changes_by_step))


def test_warm_up_may_move_scales_and_leave_weights(make_statistics: Make) -> None:
    changes_by_step = [({"amax": 5.0**index}, STALLED, None) for index in range(4)]
    assert not any(details(make_statistics, changes_by_step, first_step=10))
    assert any(details(make_statistics, changes_by_step, first_step=100))


def test_a_tensor_is_reported_once_and_all_are_summarized(make_statistics: Make) -> None:
    watch = HealthMonitor(case_of())
    events = [watch.update(make_statistics(step, of_input=SATURATED)) for step in (10, 20, 30)]
    assert [len(each) for each in events] == [0, 1, 0]
    expected = "3 statistics steps, 3 tensors: saturation (1 tensors, first at step 20)"
    assert watch.summary(1, 30).detail == expected
    calm = HealthMonitor(case_of())
    calm.update(make_statistics(10))
    assert calm.summary(1, 10).detail == "1 statistics step, 3 tensors: nothing to report"


def test_many_tensors_are_one_event(make_statistics: Make) -> None:
    watch = HealthMonitor(case_of())
    for step in (10, 20):
        record = make_statistics(step, of_gradient=SMALL)
        gradient = record.tensors[f"{FC1}.grad_output"]
        record.tensors.update({f"layers.{layer}.linear_fc2.grad_output": gradient for layer in range(9)})
        events = watch.update(record)
    (event,) = events
    assert event.detail.count("become zero") == 3 and "and 7 more" in event.detail


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--fp8-log-interval 100", "none of the steps 1 to 8 is a multiple of --fp8-log-interval 100"),
        ("--fp8-log-interval 5 --fp8-schedule bf16:5,fp8", "those of the steps 1 to 8 that are multiples of"),
        (
            "--fp8-log-interval 5 --fp8-schedule bf16:9,fp8",
            "the steps 1 to 8 are in high precision (--fp8-schedule bf16:9,fp8)",
        ),
    ],
)
def test_a_run_without_statistics_reports_why(flags: str, why: str) -> None:
    said = HealthMonitor(case_of(f"--fp8-format hybrid --fp8-recipe tensorwise {flags}")).summary(1, 8).detail
    assert said.startswith("no quantization statistics: ") and why in said


def test_what_if_recipes_are_checked_for_nonfinite_values(make_statistics: Make) -> None:
    """In high precision there are no other statistics, and they show the operands' values."""
    case = case_of("--fp8-log-interval 1 --fp8-what-if mxfp8,tensorwise")

    def tried(step: int, **changes: Any) -> QuantizationRecord:
        record = make_statistics(step, **changes)
        return dataclasses.replace(record, recipe="", tensors={}, what_if={"mxfp8": record.tensors, "tensorwise": {}})

    calm = HealthMonitor(case)
    assert calm.update(tried(1)) == []
    said = calm.summary(1, 1).detail
    assert said.startswith("1 statistics step, 3 tensors, in high precision, checked for non-finite values")
    (told,) = HealthMonitor(case).update(tried(1, of_input=BAD, of_gradient=BAD))
    assert told.detail.startswith(f"non-finite values: {FC1}.input: 3 values are not finite; first of 2 such")


def test_row_and_column_codes_are_one_operand(make_statistics: Make) -> None:
    record = make_statistics(100, BAD)
    stats = record.tensors[f"{FC1}.input"]
    record = dataclasses.replace(record, tensors={f"{FC1}.input.row": stats, f"{FC1}.input.column": stats})
    (found,) = find_nonfinite([record])
    assert found == (f"{FC1}.input.row", "3 values are not finite")
