"""The energy counter of NVIDIA's driver, with a library in its place, and readings over two ranks."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any, Optional

import pytest
import torch
from ranks import run_ranks

from megafp8.config import flags
from megafp8.device import energy
from megafp8.device.capability import Target, capability_problems
from megafp8.device.energy import EnergyCounter, EnergyMeter
from megafp8.errors import ConfigError

GPU = torch.device("cuda", 0)


class Driver:
    """Its functions return a status, and write their results to the addresses that they get."""

    def __init__(self, status: int = 0):
        self.status, self.millijoules, self.requested = status, 1_500, b""

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        self.requested = uuid
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any, total: Any) -> int:
        ctypes.cast(total, ctypes.POINTER(ctypes.c_ulonglong))[0] = self.millijoules
        return self.status

    def nvmlDeviceGetUtilizationRates(self, handle: Any, rates: Any) -> int:
        ctypes.cast(rates, ctypes.POINTER(ctypes.c_uint * 2))[0][:] = 97, 40
        return 0


def install(monkeypatch: pytest.MonkeyPatch, driver: Optional[Driver]) -> None:
    def load(name: str) -> Driver:
        if driver is None:
            raise OSError("no such file")
        return driver

    monkeypatch.setattr(energy.ctypes, "CDLL", load)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="12-34"))


def test_the_counter_is_in_joules(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    install(monkeypatch, driver)
    counter = EnergyCounter(GPU)
    assert driver.requested == b"GPU-12-34" and counter.joules() == pytest.approx(1.5)
    driver.millijoules = 4_000_000_000_000  # more than 32 bits
    assert counter.joules() == pytest.approx(4e9) and counter.busy_fraction() == 0.97


@pytest.mark.parametrize(("driver", "reason"), [(None, "no such file"), (Driver(status=3), "failed with status 3")])
def test_without_a_counter_the_flag_is_refused(
    driver: Optional[Driver], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, driver)
    with pytest.raises(ConfigError, match=f"--log-energy.*{reason}.*remove the flag"):
        EnergyCounter(GPU)


def test_a_cpu_has_no_counter() -> None:
    config = flags.parse(["--model-preset", "tiny", "--log-energy"]).config
    problems = capability_problems(config, Target("a CPU", "cpu", None, "here"))
    assert "--log-energy: a CPU has no CUDA device; remove the flag" in problems


def test_readings_are_sums_over_the_ranks() -> None:
    def readings() -> list[tuple[float, float, float]]:
        values = iter([100.0, 130.0, 190.0])  # of each rank
        counter: Any = SimpleNamespace(joules=lambda: next(values), busy_fraction=lambda: 0.5)
        clock = iter([0.0, 2.0, 5.0])
        energy.time = SimpleNamespace(monotonic=lambda: next(clock))
        meter, found = EnergyMeter(counter, torch.device("cpu")), []
        for tokens in (30, 40):
            meter.tokens += tokens
            found.append(meter.read())
        return found

    for found in run_ranks(2, readings):
        assert found == [(2 * 30 / 30, 15.0, 0.5), (2 * 60 / 40, 20.0, 0.5)]
