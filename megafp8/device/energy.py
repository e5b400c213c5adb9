"""Energy that GPUs take, from the counter of NVIDIA's driver (`--log-energy`)."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megafp8.errors import ConfigError

LIBRARY = "libnvidia-ml.so.1"
MILLIJOULES = 1e-3


def has_library() -> bool:
    """Whether this machine has the driver's library."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    return True


def energy_counter(device: torch.device) -> Callable[[], float]:
    """A function that returns the joules which a GPU has taken since its driver was loaded.

    The driver renews the counter some ten times a second.

    Raises:
        ConfigError: the driver has no counter for this GPU.
    """
    try:
        nvml = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise ConfigError(f"--log-energy needs {LIBRARY} of NVIDIA's driver: {error}; remove the flag") from error

    def call(name: str, *arguments: Any) -> None:
        if status := getattr(nvml, name)(*arguments):
            raise ConfigError(f"--log-energy: {name} of {LIBRARY} failed with status {status}; remove the flag")

    handle, total = ctypes.c_void_p(), ctypes.c_ulonglong()
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"

    def joules() -> float:
        call("nvmlDeviceGetTotalEnergyConsumption", handle, ctypes.byref(total))
        return total.value * MILLIJOULES

    call("nvmlInit_v2")
    call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(handle))
    joules()
    return joules


class EnergyMeter:
    """What all GPUs of a run take between two readings, with validations and saves in between.

    Args:
        joules: reads the counter of this rank's GPU.

    Attributes:
        tokens: trained by the run since the last reading; the caller counts them.
    """

    def __init__(self, joules: Callable[[], float], device: torch.device):
        self.joules, self.device, self.tokens = joules, device, 0
        self.last_joules, self.last_s = joules(), time.monotonic()

    def read(self) -> tuple[float, float]:
        """Joules for a token, and watts of a GPU, since the last reading. Collective over all ranks."""
        joules, seconds, tokens = self.joules(), time.monotonic(), self.tokens
        taken = torch.tensor(joules - self.last_joules, dtype=torch.float64, device=self.device)
        dist.all_reduce(taken)
        watts = float(taken) / (seconds - self.last_s) / dist.get_world_size()
        self.last_joules, self.last_s, self.tokens = joules, seconds, 0
        return float(taken) / tokens, watts
