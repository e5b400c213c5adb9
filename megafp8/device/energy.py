"""Energy that GPUs take, and the share of time that they are busy, from NVIDIA's driver (`--log-energy`)."""

from __future__ import annotations

import ctypes
import time
from typing import Any

import torch
import torch.distributed as dist

from megafp8.device.cuda_libraries import NVML
from megafp8.errors import ConfigError

MILLIJOULES = 1e-3


def has_library() -> bool:
    """Whether this machine has the driver's library."""
    try:
        ctypes.CDLL(NVML)
    except OSError:
        return False
    return True


class Utilization(ctypes.Structure):
    """`nvmlUtilization_t`: percent of the driver's last sampling period, 1/6 s to 1 s."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class EnergyCounter:
    """What the driver counts of one GPU.

    Raises:
        ConfigError: the driver has no counter for this GPU.
    """

    def __init__(self, device: torch.device):
        try:
            self._nvml = ctypes.CDLL(NVML)
        except OSError as error:
            raise ConfigError(f"--log-energy needs {NVML} of NVIDIA's driver: {error}; remove the flag") from error
        self._handle = ctypes.c_void_p()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        self._call("nvmlInit_v2")
        self._call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(self._handle))
        self.joules()

    def joules(self) -> float:
        """Taken since the driver was loaded; it renews the counter some ten times a second."""
        total = ctypes.c_ulonglong()
        self._call("nvmlDeviceGetTotalEnergyConsumption", self._handle, ctypes.byref(total))
        return total.value * MILLIJOULES

    def busy_fraction(self) -> float:
        """Of the driver's last sampling period, the time in which a kernel ran."""
        utilization = Utilization()
        self._call("nvmlDeviceGetUtilizationRates", self._handle, ctypes.byref(utilization))
        return utilization.gpu / 100

    def _call(self, name: str, *arguments: Any) -> None:
        if status := getattr(self._nvml, name)(*arguments):
            raise ConfigError(f"--log-energy: {name} of {NVML} failed with status {status}; remove the flag")


class EnergyMeter:
    """What all GPUs of a run take between two readings, with validations and saves in between.

    Args:
        counter: of this rank's GPU.

    Attributes:
        tokens: trained by the run since the last reading; the caller counts them.
    """

    def __init__(self, counter: EnergyCounter, device: torch.device):
        self.counter, self.device, self.tokens = counter, device, 0
        self.last_joules, self.last_s = counter.joules(), time.monotonic()

    def read(self) -> tuple[float, float, float]:
        """Joules for a token and watts of a GPU since the last reading, and the share of time that GPUs are busy now.

        Collective over all ranks.
        """
        joules, seconds, tokens = self.counter.joules(), time.monotonic(), self.tokens
        numbers = [joules - self.last_joules, self.counter.busy_fraction()]
        sums = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        dist.all_reduce(sums)
        (taken, busy), ranks = sums.tolist(), dist.get_world_size()
        watts = taken / (seconds - self.last_s) / ranks
        self.last_joules, self.last_s, self.tokens = joules, seconds, 0
        return taken / tokens, watts, busy / ranks
