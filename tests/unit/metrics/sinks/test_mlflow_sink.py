"""Records in MLflow: by a client that fails, then by MLflow itself, with its stores and its server, which is killed."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import types
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from megafp8.config.schema import LoggingConfig
from megafp8.device.layer_support import package_problems
from megafp8.metrics.records import EventRecord
from megafp8.metrics.sinks import JsonlSink, Sinks, build_sinks, mlflow_sender, read_records, trackers
from megafp8.metrics.sinks.mlflow_sender import MOST_METRICS, Destination, MlflowSender

STEPS, HOST = 6, "127.0.0.1"
ROOT = Path(__file__).resolve().parents[4]


class Metric(NamedTuple):
    key: str
    value: float
    timestamp: int
    step: int


def refusal(text: str, error_code: str) -> Exception:
    """An error as an `MlflowException`."""
    error = ValueError(text)
    error.error_code = error_code
    return error


class FakeClient:
    """The used part of an `MlflowClient`; it fails in the calls of `fails`, counted over all of them."""

    def __init__(self, tracking_uri: str = "http://user:secret@one") -> None:
        self.tracking_uri, self.deleted = tracking_uri, set[str]()
        self.points: list[Metric] = []
        self.sizes: list[int] = []
        self.params: list[tuple[str, str]] = []
        self.status, self.num_runs, self.num_calls, self.fails = "", 0, 0, set[int]()

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = (), tags: Any = ()) -> None:
        self.num_calls += 1
        if self.num_calls in self.fails:
            raise ConnectionError("no answer")
        self.sizes.append(len(metrics))
        self.points += metrics
        if any(name == key and value != other for name, value in self.params for key, other in params):
            raise refusal("Changing param values is not allowed", "INVALID_PARAMETER_VALUE")
        self.params += [param for param in params if param not in self.params]

    def get_run(self, run_id: str) -> Any:
        if run_id not in [f"run {number + 1}" for number in range(self.num_runs)]:
            raise refusal(f"Run with id={run_id} not found", "RESOURCE_DOES_NOT_EXIST")
        stage = "deleted" if run_id in self.deleted else "active"
        return types.SimpleNamespace(info=types.SimpleNamespace(lifecycle_stage=stage))

    def get_experiment_by_name(self, name: str) -> Any:
        return types.SimpleNamespace(experiment_id="1") if self.num_runs else None

    def create_experiment(self, name: str) -> str:
        return "1"

    def create_run(self, experiment_id: str, run_name: Any) -> Any:
        self.num_runs += 1
        self.status = "RUNNING"
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=f"run {self.num_runs}"))

    def update_run(self, run_id: str, status: str) -> None:
        self.status = status

    def set_terminated(self, run_id: str, status: str) -> None:
        self.status = status


ENTITIES = types.SimpleNamespace(Metric=Metric, Param=lambda *param: param, RunTag=lambda *tag: tag)


@pytest.fixture
def records(tmp_path: Path) -> JsonlSink:
    return JsonlSink(tmp_path / "records.jsonl")


def sender(folder: Path, client: FakeClient, experiment: str = "x") -> MlflowSender:
    return MlflowSender(Destination(folder=str(folder), experiment=experiment, last_step=STEPS), client, ENTITIES)


def losses(client: FakeClient) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in client.points if point.key == "lm loss"]


@pytest.mark.parametrize("fails", [set(), {1}, {2}, {3}, {4}, {3, 4, 5}])
def test_every_value_arrives_once_whatever_call_fails(
    fails: set[int], records: JsonlSink, tmp_path: Path, make_run, make_step, make_statistics
) -> None:
    client = FakeClient()
    client.fails = fails
    sends = sender(tmp_path, client)
    for record in (make_run(), *(make_step(step, loss=float(step)) for step in range(1, 601))):
        records.write(record)
    records.write(EventRecord(step=600, name="checkpoint saved"))
    records.write(make_statistics(600))
    num_failures = 0
    for _ in range(10):
        try:
            sends.send()
        except ConnectionError:
            num_failures += 1
    assert num_failures == len(fails)
    sends.close()
    assert losses(client) == [(step, float(step)) for step in range(1, 601)]
    assert max(client.sizes) == MOST_METRICS and len(set(client.points)) == len(client.points)
    assert [point.value for point in client.points if point.key == "fp8/amax_fwd"] == [2.0]
    assert client.params == [] and client.status == "FINISHED" and client.num_runs == 1


def test_the_next_process_goes_on_where_the_last_one_ended(
    records: JsonlSink, tmp_path: Path, make_run, make_step
) -> None:
    client = FakeClient()
    run = make_run(config={"model": {"num_layers": 2, "unset": None}, "given": ["--num-layers"]})
    for record in (run, make_step(1), make_step(2)):
        records.write(record)
    first = sender(tmp_path, client)
    first.send()
    first.close()
    assert client.status == "KILLED", "before its last step"
    records.write(make_step(3))  # after the process was killed
    with (tmp_path / "records.jsonl").open("a") as stream:
        stream.write('{"kind": "step", "ste')  # of a killed run
    sender(tmp_path, client).send()
    assert client.status == "RUNNING"
    for record in (make_run(resumed_from_step=2), make_step(3)):
        JsonlSink(tmp_path / "records.jsonl").write(record)
    sender(tmp_path, client).send()
    assert [step for step, _ in losses(client)] == [1, 2, 3, 3] and client.num_runs == 1
    assert client.params == [("model.num_layers", "2")]
    sender(tmp_path, client, "another").send()
    assert client.num_runs == 2 and len(losses(client)) == 8, "another experiment gets all of it"


def test_another_store_or_a_deleted_run_gets_a_new_run_with_all_records(
    records: JsonlSink, tmp_path: Path, make_run, make_step, capsys
) -> None:
    """The flag is not given: MLflow has the URI from MLFLOW_TRACKING_URI, or a relative default."""
    client, other = FakeClient(), FakeClient("http://two")
    for record in (make_run(), make_step(1), make_step(2)):
        records.write(record)
    for each in (client, other, other):
        sender(tmp_path, each).send()
        assert losses(each) == [(1, 4.0), (2, 4.0)] and each.num_runs == 1
    assert capsys.readouterr().out == ""
    same_uri = FakeClient("http://two")
    sender(tmp_path, same_uri).send()
    assert losses(same_uri) == [(1, 4.0), (2, 4.0)]
    assert capsys.readouterr().out.startswith("warning: MLflow lacks run run 1 of ")
    same_uri.deleted.add("run 1")
    sender(tmp_path, same_uri).send()
    assert same_uri.num_runs == 2 and len(losses(same_uri)) == 4
    same_uri.get_run = lambda run_id: 1 / 0
    with pytest.raises(ZeroDivisionError):  # an outage is no answer
        sender(tmp_path, same_uri).send()
    sender(tmp_path, client).send()
    assert "secret" not in (tmp_path / mlflow_sender.STATE_FILE).read_text()


@pytest.mark.parametrize("code", ["INVALID_PARAMETER_VALUE", "INTERNAL_ERROR"])  # of a server, and of a store of files
def test_settings_that_mlflow_has_otherwise_are_a_warning(
    code: str, records: JsonlSink, tmp_path: Path, make_run, make_step, capsys, monkeypatch
) -> None:
    client = FakeClient()
    for record in (make_run(config={"model": {"num_layers": 2}}), make_step(1)):
        records.write(record)
    client.fails = {3}  # after the tags and the settings: the process was killed before it sent a value
    with pytest.raises(ConnectionError):
        sender(tmp_path, client).send()
    records.write(make_run(config={"model": {"num_layers": 3}}))
    sender(tmp_path, client).send()
    assert capsys.readouterr().out == "", "the next process knows that MLflow has them"
    state = tmp_path / mlflow_sender.STATE_FILE
    state.write_text(state.read_text().replace("true", "false"))  # it was killed between the two
    records.write(make_run(config={"model": {"num_layers": 3}}))
    records.write(make_step(2))
    refuse = refusal
    monkeypatch.setitem(globals(), "refusal", lambda text, _: refuse(text, code))
    sender(tmp_path, client).send()
    assert client.params == [("model.num_layers", "2")] and losses(client) == [(1, 4.0), (2, 4.0)]
    assert capsys.readouterr().out.count("warning: MLflow refuses parameters, its run keeps those that it has") == 1


def test_a_client_that_does_not_start_is_tried_every_few_seconds(tmp_path: Path) -> None:
    package, attempts = tmp_path / "mlflow", tmp_path / "attempts"
    package.mkdir()
    (package / "__init__.py").write_text(
        "entities = None\n"
        "def MlflowClient(uri):\n"
        f"    print('once', file=open({str(attempts)!r}, 'a'), flush=True)\n"
        "    raise OSError('no store')\n"
    )
    destination = json.dumps({"folder": str(tmp_path), "experiment": "x"})
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "megafp8.metrics.sinks.mlflow_sender", destination],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
    )  # fmt: skip
    wait_for(attempts.exists)
    time.sleep(1)
    output = process.communicate(".", timeout=120)[0]
    most = 2 + (time.monotonic() - started) / mlflow_sender.INTERVAL_S  # the first and the last one, and those between
    assert 2 <= attempts.read_text().count("once") <= most
    assert output.count("MLflow cannot be written") == 1 and output.count("MLflow lacks the last records") == 1


def test_a_line_that_is_not_complete_waits(records: JsonlSink, tmp_path: Path, make_run, make_step) -> None:
    client, path = FakeClient(), tmp_path / "records.jsonl"
    records.write(make_run())
    records.write(make_step(1))
    content = path.read_bytes()
    path.write_bytes(content[:-10])
    sends = sender(tmp_path, client)
    sends.send()
    assert losses(client) == []
    path.write_bytes(content)
    sends.send()
    assert losses(client) == [(1, 4.0)]
    path.unlink()  # a folder that was removed: the run writes a new file
    records.write(make_step(2))
    sends.send()
    assert losses(client) == [(1, 4.0), (2, 4.0)]


def test_the_missing_package_is_a_problem_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (problem,) = package_problems(LoggingConfig(mlflow_experiment="x"))
    assert "--mlflow-experiment x: " in problem and "pip install mlflow" in problem


# ---- MLflow itself ---------------------------------------------------------------------------------------------------


@pytest.fixture
def mlflow_client(monkeypatch: pytest.MonkeyPatch) -> type:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    return mlflow.MlflowClient


def logging_to(uri: str) -> LoggingConfig:
    return LoggingConfig(mlflow_experiment="x", mlflow_run_name="first", mlflow_tracking_uri=uri)


def opened(folder: Path, uri: str) -> Sinks:
    return build_sinks(logging_to(uri), run_folder=str(folder), total_steps=STEPS)


def mlflow_runs(client: Any) -> list[Any]:
    experiment = client.get_experiment_by_name("x")
    return [] if experiment is None else list(client.search_runs([experiment.experiment_id]))


def steps_in(client: Any) -> list[int]:
    """Steps whose loss MLflow has, in their order."""
    return [
        metric.step for run in mlflow_runs(client) for metric in client.get_metric_history(run.info.run_id, "lm loss")
    ]


def wait_for(condition: Any, seconds: float = 120) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.parametrize("store", ["file:{}/store", "sqlite:///{}/mlflow.db"])
def test_a_store_without_a_server_has_all_records_of_a_killed_process_and_a_resumed_run(
    store: str, tmp_path: Path, mlflow_client: type, make_run, make_step, make_eval, capfd, monkeypatch
) -> None:
    if store.startswith("sqlite"):
        pytest.importorskip("sqlalchemy"), pytest.importorskip("alembic")
    monkeypatch.setattr(trackers, "MLFLOW_CLOSE_S", 120.0)  # a loaded machine
    uri, folder = store.format(tmp_path), tmp_path / "run"
    with opened(folder, uri) as sinks:
        sinks.write(make_run())
        process = sinks._sinks[-1]._process
        process.kill()
        process.wait()
        for step in range(1, 4):
            sinks.write(make_step(step))
    output = capfd.readouterr().out
    assert output.count("warning: MLflow cannot be written: ") == 1 and "status -9" in output
    assert len(read_records(folder / "records.jsonl")) == 4
    with opened(folder, uri) as sinks:
        sinks.write(make_run(resumed_from_step=3))
        for step in range(4, STEPS + 1):
            sinks.write(make_step(step))
        sinks.write(make_eval(STEPS, 3.0))
    client = mlflow_client(uri)
    assert steps_in(client) == list(range(1, STEPS + 1))
    (run,) = mlflow_runs(client)
    assert (run.info.status, run.info.run_name, run.data.tags["recipe"]) == ("FINISHED", "first", "bf16")
    assert run.data.metrics["lm loss validation"] == 3.0
    assert "warning" not in capfd.readouterr().out


@contextmanager
def mlflow_server(folder: Path, port: int) -> Iterator[None]:
    """MLflow's own server, which is killed at the end."""
    command = ["server", "--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--host", HOST]
    log = (folder / "server.log").open("ab")
    process = subprocess.Popen(
        [sys.executable, "-m", "mlflow", *command, "--port", str(port), "--workers", "1"],
        stdout=log, stderr=log, cwd=folder, start_new_session=True,
    )  # fmt: skip

    def answers() -> bool:
        if process.poll() is not None:
            pytest.skip(f"mlflow server does not start here: {(folder / 'server.log').read_text()[-300:]}")
        try:
            return urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=5).status == 200
        except OSError:
            return False

    try:
        wait_for(answers, 180)
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        log.close()


@pytest.mark.long  # MLflow's server takes a minute to start
def test_a_server_killed_in_the_middle_gets_everything_when_it_is_back(
    tmp_path: Path, mlflow_client: type, make_run, make_step, capfd, monkeypatch
) -> None:
    for name in ("flask", "sqlalchemy", "alembic", "graphene", "huey"):
        pytest.importorskip(name)
    monkeypatch.setattr(trackers, "MLFLOW_CLOSE_S", 120.0)
    with socket.socket() as free:
        free.bind((HOST, 0))
        port = free.getsockname()[1]
    uri, folder = f"http://{HOST}:{port}", tmp_path / "run"
    client = mlflow_client(uri)
    with opened(folder, uri) as sinks:
        with mlflow_server(tmp_path, port):
            sinks.write(make_run())
            sinks.write(make_step(1))
            wait_for(lambda: steps_in(client) == [1])
        for step in range(2, STEPS):
            sinks.write(make_step(step))
        time.sleep(2 * mlflow_sender.INTERVAL_S)
        with mlflow_server(tmp_path, port):
            wait_for(lambda: steps_in(client) == list(range(1, STEPS)))
        sinks.write(make_step(STEPS))
    output = capfd.readouterr().out
    assert "MLflow can be written again; nothing was lost" in output
    assert output.endswith("warning: MLflow lacks the last 1 records; the next start of the run sends them\n")
    assert len(read_records(folder / "records.jsonl")) == 1 + STEPS
