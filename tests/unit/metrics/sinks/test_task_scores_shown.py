"""Scores of tasks on the console and in TensorBoard."""

from __future__ import annotations

from megafp8.metrics.records import VALID_HIGH_PRECISION, TaskScores
from megafp8.metrics.sinks.console import describe_eval
from megafp8.metrics.sinks.trackers import scalars

TASKS = {
    "cloze": TaskScores(num_questions=100, bits_per_byte=1.5, accuracy=0.25, normalized_accuracy=0.301),
    "text": TaskScores(num_questions=7, bits_per_byte=2.0),
}


def test_the_console_line(make_eval) -> None:
    line = describe_eval(make_eval(20, 3.0, tasks=TASKS))
    assert " tokens | cloze 25.0% (normalized 30.1%), 1.500 bits/byte | text 2.000 bits/byte | " in line


def test_the_scalars(make_eval) -> None:
    values = scalars(make_eval(20, 3.0, tasks=TASKS))
    assert {name: value for name, value in values.items() if name.startswith("tasks")} == {
        "tasks/accuracy/cloze": 0.25,
        "tasks/normalized_accuracy/cloze": 0.301,
        "tasks/bits_per_byte/cloze": 1.5,
        "tasks/bits_per_byte/text": 2.0,
    }
    high = scalars(make_eval(20, 3.0, tasks=TASKS, split=VALID_HIGH_PRECISION))
    assert high["tasks high precision/accuracy/cloze"] == 0.25
