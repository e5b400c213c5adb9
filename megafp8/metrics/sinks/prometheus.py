"""Sink for Prometheus: the values of the job at an HTTP port, which a server of Prometheus reads.

Only rank 0 has the port. Its records are those of the job: the loss of all ranks, the largest memory of any device. The
devices themselves are the matter of the exporters that a cluster has for every machine.
"""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from megafp8.errors import CapabilityError
from megafp8.metrics.records import EvalRecord, EventRecord, Record, RunRecord, StepRecord
from megafp8.metrics.sinks.trackers import scalars
from megafp8.utils.best_effort import reason_of

PREFIX = "megafp8_"


class PrometheusSink:
    """Keeps the newest values of steps and evaluations, and sums of time and events, for whoever reads the port.

    The values have the names of TensorBoard's scalars, with `megafp8_` in front. A thread answers requests. It makes
    the text, so that a record costs training a few microseconds.
    """

    def __init__(self, port: int):
        """
        Raises:
            CapabilityError: prometheus-client is not installed, or the port cannot be used.
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
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(port, registry=registry)
        except OSError as error:
            raise CapabilityError(
                f"--metrics-port {port} cannot be used on this machine: {reason_of(error)}; choose another port, or "
                "remove the flag"
            ) from error

    def write(self, record: Record) -> None:
        if isinstance(record, RunRecord):
            self._info = {"recipe": record.recipe, "device": record.device_name, "ranks": str(record.world_size)}
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
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
