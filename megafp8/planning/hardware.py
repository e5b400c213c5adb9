"""The GPUs that plans are made for, and what ties them together. One table, each figure with its source.

Bandwidths are one way and of one GPU. A node is what NVLink joins; between nodes every GPU has a network adapter of its
own, on a fat tree without oversubscription.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Optional

from megafp8.device.capability import Target
from megafp8.device.peaks import DevicePeak, find_peak

MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One kind of GPU in its usual node."""

    name: str
    """As `--gpu` takes it."""
    device_name: str
    """As CUDA reports it; finds the peaks in `device/peaks.py`."""
    compute_capability: tuple[int, int]
    num_sms: int
    memory_bytes: int
    hbm_bytes_per_s: float
    nvlink_bytes_per_s: float
    network_bytes_per_s: float
    gpus_per_node: int
    source: str

    @functools.cached_property
    def peak(self) -> DevicePeak:
        """Peak FLOP/s by dtype."""
        entry = find_peak(self.device_name)
        assert entry is not None, self.device_name
        return entry

    @property
    def target(self) -> Target:
        """The machine as the legality checks see it; its Transformer Engine is taken for granted."""
        return Target(self.name, "cuda", self.compute_capability, "assumed")


_HGX = "memory: nvidia-smi's total; others: NVIDIA datasheet; network: 8 x 400 Gb/s InfiniBand of a DGX, an eighth"
_NVL72 = "memory: nvidia-smi's total; others: NVIDIA NVL72 datasheets, a 72nd; network: 400 Gb/s a GPU (GB300: 800)"

GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        gpu.name: gpu
        for gpu in (
            Gpu(
                name="h100", device_name="H100 80GB HBM3", compute_capability=(9, 0), num_sms=132,
                memory_bytes=81_559 * MIB, hbm_bytes_per_s=3.35e12, nvlink_bytes_per_s=450e9,
                network_bytes_per_s=50e9, gpus_per_node=8, source=_HGX,
            ),
            Gpu(
                name="h200", device_name="H200", compute_capability=(9, 0), num_sms=132,
                memory_bytes=143_771 * MIB, hbm_bytes_per_s=4.8e12, nvlink_bytes_per_s=450e9,
                network_bytes_per_s=50e9, gpus_per_node=8, source=_HGX,
            ),
            Gpu(
                name="b200", device_name="B200", compute_capability=(10, 0), num_sms=148,
                memory_bytes=183_359 * MIB, hbm_bytes_per_s=8e12, nvlink_bytes_per_s=900e9,
                network_bytes_per_s=50e9, gpus_per_node=8, source=_HGX,
            ),
            Gpu(
                name="gb200", device_name="GB200", compute_capability=(10, 0), num_sms=148,
                memory_bytes=189_471 * MIB, hbm_bytes_per_s=8e12, nvlink_bytes_per_s=900e9,
                network_bytes_per_s=50e9, gpus_per_node=64, source=_NVL72,
            ),
            Gpu(
                name="gb300", device_name="GB300", compute_capability=(10, 3), num_sms=148,
                memory_bytes=284_208 * MIB, hbm_bytes_per_s=8e12, nvlink_bytes_per_s=900e9,
                network_bytes_per_s=100e9, gpus_per_node=64, source=_NVL72,
            ),
        )
    }
)  # fmt: skip
"""GPUs by name. Of an NVL72's 72 GPUs 64 are planned with, since layouts are powers of two."""


def find_gpu(device_name: str) -> Optional[Gpu]:
    """The GPU that CUDA calls so, or that the name itself means; None if the planner does not know it."""
    by_length = sorted(GPUS.values(), key=lambda gpu: -len(gpu.device_name))  # a GB200 is no B200
    return GPUS.get(device_name) or next((gpu for gpu in by_length if gpu.device_name in device_name), None)
