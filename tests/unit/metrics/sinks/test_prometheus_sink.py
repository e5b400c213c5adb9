"""The endpoint of --metrics-port, read over HTTP and parsed by prometheus-client."""

from __future__ import annotations

import math
import os
import socket
import sys
import time
import types
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from megafp8.config.schema import LoggingConfig
from megafp8.errors import CapabilityError
from megafp8.metrics.records import EventRecord
from megafp8.metrics.sinks import build_sinks, prometheus, read_records

HOST = "127.0.0.1"


@pytest.fixture
def port() -> Iterator[int]:
    pytest.importorskip("prometheus_client")
    with socket.socket() as free:
        free.bind(("", 0))
        number = free.getsockname()[1]
    yield number


def metrics(port: int) -> dict[str, float]:
    """The samples of the endpoint by name and labels."""
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(f"http://{HOST}:{port}/metrics", timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return {
        f"{sample.name}{''.join(f' {value}' for value in sample.labels.values())}": sample.value
        for family in families
        for sample in family.samples
    }


def test_values_of_the_job_are_read(port: int, tmp_path: Path, make_run, make_step, make_eval) -> None:
    with build_sinks(LoggingConfig(metrics_port=port), run_folder=str(tmp_path), total_steps=3) as sinks:
        sinks.write(make_run())
        assert metrics(port)["megafp8_run_info cpu 2 bf16"] == 1
        sinks.write(make_step(1, memory_peak_bytes=5 << 30, mfu_fraction=0.5, timers_ms={"data-wait": 20.0}))
        sinks.write(EventRecord(step=1, name="health", detail="layers.0.linear_fc1.input: saturation"))
        times = {"timers_ms": {"data-wait": 30.0}, "between_ms": {"checkpoints": 500.0}}
        sinks.write(make_step(2, loss=math.nan, **times))
        sinks.write(make_eval(2, 3.0))
        found = metrics(port)
    assert math.isnan(found["megafp8_lm_loss"]), "Prometheus has NaN"
    expected = {
        "step": 2, "consumed_tokens": 8192, "tokens_per_second": 40960, "iteration_time": 0.1, "lm_loss_validation": 3,
        "mfu": 0.5, "mem_max_allocated_bytes": 5 << 30, "events_total health": 1, "seconds_total step": 0.2,
        "seconds_total data-wait": 0.05, "seconds_total checkpoints": 0.5,
    }  # fmt: skip
    assert {name: found[f"megafp8_{name}"] for name in expected} == pytest.approx(expected)
    assert abs(found["megafp8_step_ended"] - time.time()) < 600
    with pytest.raises(OSError):
        metrics(port)


def test_a_port_in_use_stops_nothing_and_is_tried_again(
    port: int, tmp_path: Path, make_run, make_step, capsys, monkeypatch
) -> None:
    """As by another run of the machine, or by one that has not ended yet."""
    now = [0.0]
    monkeypatch.setattr(prometheus, "time", types.SimpleNamespace(monotonic=lambda: now[0], time=time.time))
    with socket.socket() as other:
        other.bind(("", port))
        other.listen()
        build_sinks(LoggingConfig(metrics_port=port), run_folder=None, total_steps=3).close()
        sinks = build_sinks(LoggingConfig(metrics_port=port), run_folder=str(tmp_path), total_steps=3)
        sinks.write(make_run())
        now[0] = 60.0
        sinks.write(make_step(1))
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    message = f"warning: --metrics-port {port} cannot be written: Address already in use; training continues, and "
    assert warnings == [f"{message}tries again every minute"] * 2, "one of each run"
    with sinks:
        now[0] = 119.0
        sinks.write(make_step(2))
        with pytest.raises(OSError):
            metrics(port)
        now[0] = 120.0
        sinks.write(make_step(3))
        assert metrics(port)["megafp8_step"] == 3
        assert f"--metrics-port {port} can be written again; nothing was lost" in capsys.readouterr().out
    assert len(read_records(tmp_path / "records.jsonl")) == 4


def test_a_process_that_has_the_socket_does_not_keep_the_port(port: int, make_step, capsys) -> None:
    """As a forked data loader, which has a copy of the descriptor. Programs that the run starts have none."""
    first = build_sinks(LoggingConfig(metrics_port=port), run_folder=None, total_steps=3)
    assert not os.get_inheritable(first._sinks[0]._server.fileno())
    copy = os.dup(first._sinks[0]._server.fileno())
    first.close()
    with build_sinks(LoggingConfig(metrics_port=port), run_folder=None, total_steps=3) as second:
        second.write(make_step(2))
        assert metrics(port)["megafp8_step"] == 2
    os.close(copy)
    assert "warning" not in capsys.readouterr().out


def test_a_reader_that_is_gone_and_a_dead_server_stop_nothing(port: int, tmp_path: Path, make_run, make_step) -> None:
    with build_sinks(LoggingConfig(metrics_port=port), run_folder=str(tmp_path), total_steps=9) as sinks:
        sinks.write(make_run())
        with socket.create_connection((HOST, port)) as reader:
            reader.sendall(b"GET /metrics HTTP/1.1\r\n")  # and no end of the request
            sinks.write(make_step(1))
        assert metrics(port)["megafp8_step"] == 1
        sinks._sinks[0]._server.socket.close()
        for step in range(2, 5):
            sinks.write(make_step(step))
    assert len(read_records(tmp_path / "records.jsonl")) == 5


def test_the_missing_package_is_an_error_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(CapabilityError, match=r"--metrics-port 9400 .*pip install prometheus-client"):
        build_sinks(LoggingConfig(metrics_port=9400), run_folder=None, total_steps=3)
