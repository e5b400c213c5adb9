"""Generated texts in every sink."""

import dataclasses
import io
import sys
import types

import pytest

from megafp8.config.schema import LoggingConfig
from megafp8.metrics.records import SampleRecord, from_json, to_json
from megafp8.metrics.sinks.console import ConsoleSink
from megafp8.metrics.sinks.jsonl import current_records
from megafp8.metrics.sinks.trackers import TensorBoardSink, WandbSink

FIRST = SampleRecord(step=5, prompt="def", text=" main(\n\u00e9", ended_by="length")
SECOND = dataclasses.replace(FIRST, prompt="", text="import")


def test_a_step_has_one_sample_of_each_prompt(make_run) -> None:
    assert from_json(to_json(FIRST)) == FIRST
    repeated = dataclasses.replace(FIRST, text=" other(")
    assert current_records([FIRST, SECOND, repeated]) == [SECOND, repeated]
    resumed = make_run(resumed_from_step=4)
    assert current_records([FIRST, resumed]) == [resumed]


def test_the_console_has_a_line_for_each() -> None:
    stream = io.StringIO()
    sink = ConsoleSink(LoggingConfig(), total_steps=10, stream=stream)
    sink.write(FIRST)
    assert stream.getvalue() == " step  5/10 | sample 'def' -> ' main(\\n\u00e9'\n"


def test_tensorboard_shows_the_text_as_it_is(tmp_path) -> None:
    accumulator_module = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    sink = TensorBoardSink(tmp_path, LoggingConfig())
    sink.write(FIRST)
    sink.write(SECOND)
    sink.close()
    accumulator = accumulator_module.EventAccumulator(str(tmp_path))
    accumulator.Reload()
    (event,) = accumulator.Tensors("samples/def")
    assert event.step == 5
    assert event.tensor_proto.string_val[0].decode() == "    def main(\n    \u00e9"
    assert accumulator.Tensors("samples/new document")


def test_wandb_has_a_table_of_each_step(monkeypatch) -> None:
    rows = []
    run = types.SimpleNamespace(id="r", log=lambda values, step: rows.append((step, values["samples"])), finish=bool)
    module = types.SimpleNamespace(init=lambda **arguments: run, Table=lambda columns, data: data)
    monkeypatch.setitem(sys.modules, "wandb", module)
    sink = WandbSink(LoggingConfig(wandb_project="p"))
    for record in (FIRST, SECOND, dataclasses.replace(FIRST, step=10)):
        sink.write(record)
    sink.close()
    assert rows[1] == (5, [[5, "def", FIRST.text], [5, "", "import"]])
    assert rows[2] == (10, [[10, "def", FIRST.text]])
