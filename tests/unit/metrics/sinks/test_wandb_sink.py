import sys
import types

import pytest

from megafp8.config.schema import LoggingConfig
from megafp8.errors import CapabilityError
from megafp8.metrics.records import EventRecord, GuardRecord
from megafp8.metrics.sinks.trackers import WandbSink


class FakeRun:
    """The used part of a W&B run."""

    def __init__(self):
        self.rows, self.summary, self.settings, self.finished = [], {}, {}, False
        self.config = types.SimpleNamespace(update=lambda values, allow_val_change: self.settings.update(values))

    def log(self, values: dict, step: int) -> None:
        self.rows.append((step, values))

    def finish(self) -> None:
        self.finished = True


def test_records_arrive(monkeypatch, make_run, make_step, make_eval, make_statistics) -> None:
    run, requested = FakeRun(), {}

    def init(**arguments):
        requested.update(arguments)
        return run

    module = types.SimpleNamespace(init=init, Histogram=lambda np_histogram: np_histogram)
    monkeypatch.setitem(sys.modules, "wandb", module)
    sink = WandbSink(LoggingConfig(wandb_project="p", wandb_entity="e", wandb_exp_name="n", wandb_save_dir="f"))
    sink.write(make_run())
    sink.write(make_step(1))
    sink.write(make_eval(1, 3.0))
    sink.write(make_statistics(1))
    sink.write(GuardRecord(step=1, statistics={"residual": {"layers.0": 0.5}}))
    sink.write(EventRecord(step=1, name="checkpoint saved"))
    sink.close()
    assert requested == {"project": "p", "entity": "e", "name": "n", "dir": "f"}
    assert run.settings["recipe"] == "bf16"
    assert [step for step, _ in run.rows] == [1, 1, 1, 1]
    assert run.rows[2][1]["fp8/underflow_fraction/layers.0.linear_fc1.input"] == 0.25
    counts, edges = run.rows[2][1]["fp8/exponents/layers.0.linear_fc1.input"]
    assert (counts, edges) == ((1, 2, 1, 4), [-1.5, -0.5, 0.5, 1.5, 2.5])
    assert run.rows[3][1] == {"guard/residual/layers.0": 0.5}
    assert run.rows[0][1]["lm loss"] == 4.0
    assert run.rows[1][1]["lm loss validation"] == 3.0
    assert run.summary == {"final valid loss": 3.0}
    assert run.finished


def test_requested_but_missing_wandb_is_an_error_with_the_fix(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(CapabilityError, match=r"--wandb-project mine .*pip install wandb"):
        WandbSink(LoggingConfig(wandb_project="mine"))


def test_a_service_that_fails_stops_no_run(monkeypatch, make_run, make_step, capsys) -> None:
    run = FakeRun()
    module = types.SimpleNamespace(init=lambda **arguments: run, Histogram=None)
    monkeypatch.setitem(sys.modules, "wandb", module)
    sink = WandbSink(LoggingConfig(wandb_project="p"))
    sink.write(make_run())
    works = run.log
    monkeypatch.setattr(run, "log", lambda values, step: works(values, step) if step > 2 else 1 / 0)
    for step in range(1, 5):
        sink.write(make_step(step))
    monkeypatch.setattr(run, "finish", lambda: 1 / 0)
    sink.close()
    assert [step for step, _ in run.rows] == [3, 4]
    assert capsys.readouterr().out.splitlines() == [
        "warning: Weights & Biases cannot be written: ZeroDivisionError: division by zero; training continues",
        "warning: Weights & Biases can be written again; 2 records were lost",
        "warning: Weights & Biases cannot be written: ZeroDivisionError: division by zero; training continues",
        "warning: Weights & Biases: 2 records were lost in all",
    ]


def test_a_service_that_fails_to_start_is_not_retried(monkeypatch, make_run, make_step, capsys) -> None:
    calls = []

    def init(**arguments):
        calls.append(arguments)
        raise ConnectionError("no network")

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init, Histogram=None))
    sink = WandbSink(LoggingConfig(wandb_project="p"))
    sink.write(make_run())
    sink.write(make_step(1))
    sink.close()
    assert len(calls) == 2  # online and offline
    warnings = capsys.readouterr().out.splitlines()
    assert ["no network" in text for text in warnings] == [True, False]
    assert warnings[1].endswith("2 records were lost in all")


def test_a_resumed_run_continues_its_wandb_run(monkeypatch, tmp_path) -> None:
    requested = []

    def init(**arguments):
        requested.append(arguments)
        return types.SimpleNamespace(id="abc", finish=lambda: None)

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init, Histogram=None))
    for _ in range(2):
        WandbSink(LoggingConfig(wandb_project="p"), str(tmp_path)).close()
    first, second = requested
    assert "id" not in first and (second["id"], second["resume"]) == ("abc", "allow")


def test_without_a_login_the_run_is_written_offline(monkeypatch, capsys, make_step) -> None:
    run = FakeRun()
    run.dir = "runs/offline-run-1/files"

    def init(mode=None, **arguments):
        if mode != "offline":
            raise ValueError("No API key configured")
        return run

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init, Histogram=None))
    sink = WandbSink(LoggingConfig(wandb_project="p"))
    sink.write(make_step(1))
    sink.close()
    assert [step for step, _ in run.rows] == [1]
    (warning,) = capsys.readouterr().out.splitlines()
    assert "No API key configured" in warning and "wandb sync runs/offline-run-1" in warning
