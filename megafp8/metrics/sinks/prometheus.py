"""Sink for Prometheus: the values of the job at an HTTP port, which a server of Prometheus reads.

Only rank 0 has the port. Its records are those of the job: the loss of all ranks, the largest memory of any device. The
devices themselves are the matter of the exporters that a cluster has for every machine.
"""

from __future__ import annotations

import re
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from megafp8.errors import CapabilityError
from megafp8.metrics.records import EvalRecord, EventRecord, Record, RunRecord, StepRecord
from megafp8.metrics.sinks.trackers import labels, scalars
from megafp8.utils.best_effort import Outage

PREFIX = "megafp8_"
RETRY_S = 60.0


class PrometheusSink:
    """Keeps the newest values of steps and evaluations, and sums of time and events, for whoever reads the port.

    The values have the names of TensorBoard's scalars, with `megafp8_` in front. A thread answers requests. It makes
    the text, so that a record costs training a few microseconds.

    Best effort: a port in use, as by another run of this machine, is reported, and tried again with later records.
    """

    def __init__(self, port: int):
        """
        Raises:
            CapabilityError: prometheus-client is not installed.
        """
        try:
            from prometheus_client import CollectorRegistry, core, start_http_server
        except ImportError as error:
            raise CapabilityError(
                f"--metrics-port {port} needs the package prometheus-client, which cannot be imported ({error}): "
                "pip install prometheus-client, or remove the flag (records.jsonl and TensorBoard have the same values)"
            ) from error
        self._core = core
        self._values: dict[str, float] = {}
        self._info: dict[str, str] = {}
        self._seconds, self._events = defaultdict[str, float](float), Counter[str]()
        self._outage = Outage(f"--metrics-port {port}", "records", "training continues, and tries again every minute")
        registry = CollectorRegistry()
        registry.register(self)
        self._start = partial(start_http_server, port, registry=registry)
        self._server: Any = None
        self._open()

    def _open(self) -> None:
        """Listen at the port, if it is free."""
        self._tried_at = time.monotonic()
        try:
            # Programs that the run starts do not inherit the socket, as Python's default is close-on-exec. Data loaders
            # are forked later and do: they end with this process, and `close` ends the listening for them, too.
            self._server, self._thread = self._start()
        except OSError as error:
            self._outage.failed(error)
        else:
            self._outage.ended()

    def write(self, record: Record) -> None:
        if self._server is None and time.monotonic() - self._tried_at >= RETRY_S:
            self._open()
        if isinstance(record, RunRecord):
            self._info = labels(record)
        elif isinstance(record, EventRecord):
            self._events[record.name] += 1
        elif isinstance(record, EvalRecord):
            self._values |= scalars(record)
        elif isinstance(record, StepRecord):
            # Memory and energy are those of the last logged step, since others do not have them.
            self._values |= scalars(record)
            self._values |= {"step": record.step, "consumed-tokens": record.consumed_tokens, "step-ended": time.time()}
            self._seconds["step"] += record.step_ms / 1000
            for part, ms in (*(record.timers_ms or {}).items(), *(record.between_ms or {}).items()):
                self._seconds[part] += ms / 1000

    def collect(self) -> Iterator[Any]:
        """The metrics of one request, in the thread of the server."""
        # Copies, which Python makes without a break: training may add a name in the meantime.
        values, seconds, events, info = dict(self._values), dict(self._seconds), dict(self._events), self._info
        for name, value in values.items():
            yield self._core.GaugeMetricFamily(PREFIX + re.sub(r"\W", "_", name, flags=re.ASCII), name, value=value)
        for name, label, documentation, sums in (
            ("seconds", "part", "Time of steps, of their parts, and of what is between steps", seconds),
            ("events", "name", "Events of the records", events),
        ):
            family = self._core.CounterMetricFamily(PREFIX + name, documentation, labels=[label])
            for key, value in sums.items():
                family.add_metric([key], value)
            yield family
        yield self._core.InfoMetricFamily(PREFIX + "run", "The run", value=info)

    def close(self) -> None:
        if self._server is None:
            return
        self._server.shutdown()
        with suppress(OSError):  # it is closed already
            self._server.socket.shutdown(socket.SHUT_RDWR)  # `server_close` leaves copies in forked processes open
        self._server.server_close()
        self._thread.join()
