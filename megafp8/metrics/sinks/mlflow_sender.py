"""Sends the records of a run to MLflow, in a process of its own: `python -m megafp8.metrics.sinks.mlflow_sender JSON`.

The process follows records.jsonl. So the file is the backlog of an outage, however long it is, and nothing that MLflow
does takes time of training: its client needs 5 ms for the values of a step in a SQLite store, and waits for a server.
A file in the run folder has the ID of the MLflow run and the bytes of records.jsonl that MLflow has. The next process
goes on there, also one of a resumed run.

It ends with the first byte or the end of its standard input, after one more attempt to send what is there.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import signal
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from megafp8.errors import DataError
from megafp8.metrics.records import (
    RECORDS_FILE,
    EventRecord,
    Record,
    RunRecord,
    SampleRecord,
    StepRecord,
    from_json,
)
from megafp8.metrics.sinks.trackers import labels, scalars
from megafp8.utils.best_effort import Outage, reason_of, warn
from megafp8.utils.files import UnreadableFile, atomic_write_json, open_regular
from megafp8.utils.process import STOP_SIGNALS
from megafp8.utils.strict_json import parse_json, read_json

STATE_FILE = "mlflow_run.json"
INTERVAL_S = 5.0
MOST_BYTES = 1 << 20  # of records that are read at once
MOST_METRICS, MOST_PARAMS, LONGEST_PARAM = 1000, 100, 6000  # of MLflow for a request


@dataclass(frozen=True, kw_only=True)
class Destination:
    """Where the records go.

    Attributes:
        folder: of the run.
        last_step: of the run: before it, the run counts as stopped.
    """

    folder: str
    experiment: str
    run_name: str | None = None
    tracking_uri: str | None = None
    last_step: int = 0


@dataclass
class State:
    """What the state file has: the MLflow run, the bytes of records.jsonl that it has, and whether it has settings.

    The URI is the one that MLflow uses, also where it is from the environment, without a user and a password.
    """

    experiment: str
    tracking_uri: str
    run_id: str
    sent_bytes: int = 0
    has_settings: bool = False


class MlflowSender:
    """Sends the records that a file got since the last call.

    Args:
        client: an `MlflowClient`.
        entities: the module `mlflow.entities`.
    """

    def __init__(self, destination: Destination, client: Any, entities: Any):
        self._to, self._client, self._entities = destination, client, entities
        self._uri = re.sub("//[^/@]*@", "//", client.tracking_uri)
        self._records, self._state_file = (Path(destination.folder) / name for name in (RECORDS_FILE, STATE_FILE))
        self._state = self._saved_state()
        self._step, self._is_open = 0, False
        self._stream: BinaryIO | None = None
        self._metrics: deque[Any] = deque()  # of the records before `_read_bytes`, not sent yet
        self._read_bytes = 0 if self._state is None else self._state.sent_bytes

    def send(self) -> None:
        """Send all complete lines. An exception leaves the rest for the next call."""
        state = self._opened_run()
        while True:
            while self._metrics:
                # They stay in line until MLflow has them, with their time: MLflow knows a point that it gets twice.
                batch = [self._metrics[index] for index in range(min(MOST_METRICS, len(self._metrics)))]
                self._client.log_batch(state.run_id, metrics=batch)
                for _ in batch:
                    self._metrics.popleft()
            if state.sent_bytes != self._read_bytes:
                state.sent_bytes = self._read_bytes
                self._save_state(state)
            records, end = self._next_records()
            if not records:
                return
            now_ms = int(time.time() * 1000)
            metrics = [metric for record in records for metric in self._metrics_of(record, now_ms)]
            self._metrics.extend(metrics)
            self._read_bytes = end

    def num_left(self) -> int:
        """Records that MLflow does not have, at most 1 MiB of them."""
        self._read_bytes = 0 if self._state is None else self._state.sent_bytes
        try:
            return len(self._next_records()[0])
        except (UnreadableFile, OSError):
            return 0

    def close(self) -> None:
        """End the MLflow run."""
        if self._state is not None and self._is_open:
            is_complete = self._step >= self._to.last_step
            self._client.set_terminated(self._state.run_id, "FINISHED" if is_complete else "KILLED")

    def _opened_run(self) -> State:
        """The MLflow run, created or marked as running again."""
        if self._state is not None and not self._is_open and not self._exists(self._state.run_id):
            warn(f"MLflow lacks run {self._state.run_id} of {self._to.folder}: a new run gets all records")
            self._state, self._read_bytes = None, 0
        if self._state is None:
            experiment = self._client.get_experiment_by_name(self._to.experiment)
            number = (
                self._client.create_experiment(self._to.experiment) if experiment is None else experiment.experiment_id
            )
            run_id = self._client.create_run(number, run_name=self._to.run_name).info.run_id
            self._state = State(self._to.experiment, self._uri, run_id)
            self._save_state(self._state)
        elif not self._is_open:
            self._client.update_run(self._state.run_id, status="RUNNING")
        self._is_open = True
        return self._state

    def _exists(self, run_id: str) -> bool:
        """Whether MLflow has the run: it may be deleted, or a relative URI may be another store."""
        try:
            return self._client.get_run(run_id).info.lifecycle_stage == "active"
        except Exception as error:
            if getattr(error, "error_code", "") != "RESOURCE_DOES_NOT_EXIST":
                raise
            return False

    def _next_records(self) -> tuple[list[Record], int]:
        """The next records of the file, at most 1 MiB of them unless one is longer, and where they end."""
        # The open file keeps its inode from the one that the run creates if it was removed.
        if self._stream is None or not os.path.samestat(os.fstat(self._stream.fileno()), os.stat(self._records)):
            is_same = self._stream is None
            self._stream = open_regular(self._records)
            if not is_same or os.fstat(self._stream.fileno()).st_size < self._read_bytes:
                self._read_bytes = 0
        self._stream.seek(self._read_bytes)
        content = self._stream.read(MOST_BYTES)
        content += b"" if content.endswith(b"\n") else self._stream.readline()
        complete = content[: content.rfind(b"\n") + 1]
        records = []
        for line in complete.splitlines():
            try:
                records.append(from_json(line.decode("utf-8", errors="replace")))
            except DataError:  # the part of a line that a killed run left
                continue
        return records, self._read_bytes + len(complete)

    def _metrics_of(self, record: Record, now_ms: int) -> list[Any]:
        if isinstance(record, RunRecord):
            self._step = max(self._step, record.resumed_from_step or 0)
            self._log_settings(record)
            return []
        if isinstance(record, (EventRecord, SampleRecord)):
            return []
        if isinstance(record, StepRecord):
            self._step = record.step
        return [
            self._entities.Metric(re.sub(r"[^\w\-./ :]", "_", name, flags=re.ASCII), value, now_ms, record.step)
            for name, value in scalars(record).items()
        ]

    def _log_settings(self, record: RunRecord) -> None:
        """Settings as parameters, which MLflow does not let change: a resumed run has those of its first start."""
        state = self._state
        assert state is not None
        tags = [self._entities.RunTag(*label) for label in labels(record).items()]
        self._client.log_batch(state.run_id, tags=tags)
        if state.has_settings:
            return
        params = [
            self._entities.Param(f"{section}.{name}", str(value)[:LONGEST_PARAM])
            for section, values in record.config.items()
            if isinstance(values, dict)
            for name, value in values.items()
            if value is not None
        ]
        for start in range(0, len(params), MOST_PARAMS):
            try:
                self._client.log_batch(state.run_id, params=params[start : start + MOST_PARAMS])
            except Exception as error:
                # Another attempt would be refused as well. The store of files has the code of an internal error.
                is_refusal = getattr(error, "error_code", "") == "INVALID_PARAMETER_VALUE"
                if not is_refusal and "Changing param values" not in str(error):
                    raise
                warn(f"MLflow refuses parameters, its run keeps those that it has: {reason_of(error)}")
        state.has_settings = True
        self._save_state(state)  # a process that ends before the next values would leave the next one to be refused

    def _saved_state(self) -> State | None:
        """The state of an earlier process with the same destination."""
        try:
            state = State(**read_json(self._state_file))
        except (UnreadableFile, TypeError):
            return None
        is_same = (state.experiment, state.tracking_uri) == (self._to.experiment, self._uri)
        return state if is_same else None

    def _save_state(self, state: State) -> None:
        atomic_write_json(self._state_file, dataclasses.asdict(state))


def main() -> None:
    """Send records until the standard input has a byte or ends."""
    for number in STOP_SIGNALS:  # of the run, which says by the end of its output that there are no more records
        signal.signal(number, signal.SIG_IGN)
    destination = Destination(**parse_json(sys.argv[1]))
    ended = threading.Event()

    def wait_for_end() -> None:
        sys.stdin.buffer.read(1)
        ended.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    # The loop below tries again; MLflow's own attempts would take minutes. A store of files is one that MLflow asks to
    # be confirmed; the user gave its address.
    os.environ |= {
        name: os.environ.get(name, value)
        for name, value in (
            ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0"), ("MLFLOW_HTTP_REQUEST_TIMEOUT", "20"),
            ("MLFLOW_ALLOW_FILE_STORE", "true"),
        )
    }  # fmt: skip
    outage = Outage("MLflow", "records", f"training continues, records wait in {RECORDS_FILE}")
    sender, is_ended, pause_s = None, False, 0.0
    while not is_ended:
        is_ended, pause_s = ended.wait(pause_s), INTERVAL_S
        try:
            sender = sender or connect(destination)
            sender.send()
            if is_ended:
                sender.close()
        except Exception as error:  # MLflow raises many kinds of them for failures of the service, network or disk
            outage.failed(error)
        else:
            outage.ended()
    if outage.is_on:
        num_left = f"{sender.num_left()} " if sender else ""
        outage.report(f"MLflow lacks the last {num_left}records; the next start of the run sends them")


def connect(destination: Destination) -> MlflowSender:
    """A sender with MLflow's client."""
    from mlflow import MlflowClient, entities

    for name in ("mlflow", "alembic", "urllib3"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return MlflowSender(destination, MlflowClient(destination.tracking_uri), entities)


if __name__ == "__main__":
    main()
