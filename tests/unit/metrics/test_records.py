import dataclasses
import json
import math

import pytest

from megafp8.errors import DataError
from megafp8.metrics.records import (
    EvalRecord,
    EventRecord,
    GuardRecord,
    RunRecord,
    StepRecord,
    TaskScores,
    TornLineError,
    from_json,
    to_json,
)

RUN = RunRecord(
    config_hash="0123abcd",
    config={"model": {"num_layers": 2}, "overrides": []},
    world_size=2,
    layout={"tensor": 1, "data": 2},
    recipe="bf16",
    device_name="NVIDIA H200",
    peak_flops={"bf16": 989.4e12},
    peak_source="a datasheet",
    mfu_dtype="bf16",
    num_parameters=1000,
    versions={"torch": "2.13.0"},
    resumed_from_step=40,
)
STEP = StepRecord(
    step=41,
    consumed_samples=41 * 16,
    consumed_tokens=41 * 16 * 256,
    loss=3.25,
    learning_rate=3e-4,
    step_ms=410.5,
    tokens_per_second=9978.0,
    grad_norm=1.5,
    num_zeros_in_grad=7,
    timers_ms={"forward-backward": 300.25},
)
EVAL = EvalRecord(
    step=50, split="valid", loss=3.0, perplexity=20.0855, num_tokens=4096, eval_ms=900.0, consumed_tokens=204800
)
TASKS = dataclasses.replace(
    EVAL,
    tasks={
        "cloze": TaskScores(num_questions=100, bits_per_byte=1.5, accuracy=0.25, normalized_accuracy=0.3),
        "text": TaskScores(num_questions=7, bits_per_byte=math.inf, num_truncated=2),
    },
)
EVENT = EventRecord(step=50, name="checkpoint saved", detail="a folder with ü in it")


GUARD = GuardRecord(step=50, statistics={"residual": {"layers.0": 0.5, "layers.1": math.inf}, "kurtosis": {}})


@pytest.mark.parametrize("record", [RUN, STEP, GUARD, EVAL, TASKS, EVENT], ids=lambda record: record.kind)
def test_records_read_back(record) -> None:
    line = to_json(record)
    assert "\n" not in line
    assert line.isascii()
    assert json.loads(line)["kind"] == record.kind
    assert from_json(line) == record


def test_nonfinite_numbers_are_strings_in_strict_json() -> None:
    record = dataclasses.replace(STEP, loss=math.nan, grad_norm=math.inf, timers_ms={"forward": -math.inf})

    def refuse(constant: str) -> None:
        pytest.fail(f"{constant} is no JSON")

    content = json.loads(to_json(record), parse_constant=refuse)
    assert (content["loss"], content["grad_norm"], content["timers_ms"]) == ("nan", "inf", {"forward": "-inf"})
    back = from_json(to_json(record))
    assert math.isnan(back.loss)
    assert back.grad_norm == math.inf
    assert back.timers_ms == {"forward": -math.inf}


def test_an_integer_is_a_number_too() -> None:
    content = json.loads(to_json(STEP)) | {"loss": 3}
    loss = from_json(json.dumps(content)).loss
    assert loss == 3.0
    assert isinstance(loss, float)


def test_missing_fields_of_older_records_have_defaults() -> None:
    content = json.loads(to_json(STEP))
    del content["memory_peak_bytes"]
    assert from_json(json.dumps(content)) == STEP


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "footstep"}, "unknown kind"),
        ({"kind": None}, "unknown kind"),
        ({"flavour": 1}, "step.flavour is unknown; it may have been written by a newer version"),
        ({"loss": "three"}, "step.loss must be a valid number, not 'three'"),
        ({"loss": None}, "step.loss must be a valid number"),
        ({"loss": True}, "step.loss must be a valid number"),
        ({"step": 1.5}, "step.step must be a valid integer"),
        ({"step": True}, "step.step must be a valid integer"),
        ({"timers_ms": {"forward": "long"}}, "step.timers_ms.forward must be a valid number"),
    ],
)
def test_a_record_with_a_wrong_schema_is_refused(change: dict, message: str) -> None:
    with pytest.raises(DataError, match=message):
        from_json(json.dumps(json.loads(to_json(STEP)) | change))


def test_a_missing_field_is_named() -> None:
    content = json.loads(to_json(STEP))
    del content["step_ms"], content["loss"]
    with pytest.raises(DataError, match="step.loss is missing; step.step_ms is missing"):
        from_json(json.dumps(content))


def test_a_torn_line_is_distinguished_from_a_wrong_one() -> None:
    for length in (1, 10, len(to_json(STEP)) - 1):
        with pytest.raises(TornLineError):
            from_json(to_json(STEP)[:length])
    with pytest.raises(DataError, match="JSON object"):
        from_json("[1]")
    with pytest.raises(DataError, match="NaN is no JSON"):
        from_json('{"kind": "step", "loss": NaN}')


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(DataError, match="train"):
        dataclasses.replace(EVAL, split="train")


def test_records_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        STEP.loss = 1.0
