"""Dense peak FLOP/s of known devices: the denominator of MFU.

Figures are the vendor's, without structured sparsity (a datasheet that gives only the sparse figure is halved), with
FP32 accumulation, at the part's rated power. A device that is not listed, or whose published figures disagree, has
no peak here; nothing is inferred from a similar name.

The GPUs that plans are made for, and what ties them together. One table, each figure with its source.

Bandwidths are one way and of one GPU. A node is what NVLink joins; between nodes every GPU has a network adapter of its
own, on a fat tree without oversubscription.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Optional

from megafp8.device.capability import Target

TERA = 1e12


@dataclass(frozen=True, kw_only=True)
class DevicePeak:
    """Peak of one device."""

    pattern: str
    """Regular expression for all of the name that CUDA reports, without the leading vendor."""
    flops: Mapping[str, float]
    """FLOP/s by dtype: fp32 (vector units), tf32, bf16, fp16, fp8, fp4 (the last five on matrix units)."""
    source: str


def find_peak(device_name: str) -> Optional[DevicePeak]:
    """The entry for a device, by the name that `torch.cuda.get_device_name` gives; None for any other device.

    The whole name must match. So a part of a GPU ("... MIG 1g.10gb"), a laptop or a custom model does not pass for
    the full one.
    """
    name = re.sub(r"^(NVIDIA|Nvidia|Tesla)\s+", "", device_name.strip())
    return next((entry for entry in PEAKS if re.fullmatch(entry.pattern, name)), None)


def peak_flops(device_name: str, dtype: str) -> Optional[float]:
    """Dense peak FLOP/s of a device for one dtype; None when device or dtype is not in the table (a CPU, say)."""
    entry = find_peak(device_name)
    return None if entry is None else entry.flops.get(dtype)


def _peak(pattern: str, source: str, *, bf16: float, **tera_flops: float) -> DevicePeak:
    """An entry from TFLOP/s. FP16 with FP32 accumulation is as fast as BF16 on every device listed."""
    in_tera = tera_flops | {"bf16": bf16, "fp16": bf16}
    return DevicePeak(pattern=pattern, flops={dtype: value * TERA for dtype, value in in_tera.items()}, source=source)


PEAKS: tuple[DevicePeak, ...] = (
    _peak(
        r"A[18]00(-SXM4?-[48]0GB|-PCI[Ee]-[48]0GB| 80GB PCIe)",
        "NVIDIA A100 datasheet",
        fp32=19.5,
        tf32=156,
        bf16=312,
    ),
    _peak(r"A10", "NVIDIA A10 datasheet", fp32=31.2, tf32=62.5, bf16=125),
    _peak(r"A40", "NVIDIA A40 datasheet", fp32=37.4, tf32=74.8, bf16=149.7),
    _peak(r"RTX A6000", "NVIDIA RTX A6000 datasheet", fp32=38.7, tf32=77.4, bf16=154.8),
    _peak(r"GeForce RTX 3090", "NVIDIA Ampere GA102 whitepaper", fp32=35.6, tf32=35.6, bf16=71),
    _peak(r"L4", "NVIDIA L4 datasheet, halved from sparse", fp32=30.3, tf32=60, bf16=121, fp8=242.5),
    _peak(r"L40", "NVIDIA L40 datasheet", fp32=90.5, tf32=90.5, bf16=181, fp8=362),
    _peak(r"L40S", "NVIDIA L40S datasheet", fp32=91.6, tf32=183, bf16=362, fp8=733),
    _peak(r"GeForce RTX 4090", "NVIDIA Ada GPU whitepaper", fp32=82.6, tf32=82.6, bf16=165.2, fp8=330.3),
    _peak(
        r"H[18]00 80GB HBM3|H800",
        "NVIDIA H100 whitepaper, SXM5",
        fp32=66.9,
        tf32=494.7,
        bf16=989.4,
        fp8=1978.9,
    ),
    _peak(r"H100 PCIe", "NVIDIA H100 whitepaper, PCIe", fp32=51.2, tf32=378, bf16=756, fp8=1513),
    _peak(
        r"H[12]00 NVL",
        "NVIDIA H100 and H200 datasheets, NVL, halved from sparse",
        fp32=60,
        tf32=417.5,
        bf16=835.5,
        fp8=1670.5,
    ),
    # The same die and clocks as the H100 SXM5; the H200 and GH200 datasheets round the same figures.
    _peak(
        r"H200|GH200 (480GB|144G HBM3e)",
        "NVIDIA H200 and GH200 datasheets (H100 SXM5 figures)",
        fp32=66.9,
        tf32=494.7,
        bf16=989.4,
        fp8=1978.9,
    ),
    _peak(
        r"B200",
        "NVIDIA HGX B200 datasheet, an eighth, halved from sparse",
        fp32=75,
        tf32=1125,
        bf16=2250,
        fp8=4500,
        fp4=9000,
    ),
    _peak(
        r"GB200",
        "NVIDIA GB200 NVL72 datasheet, a 72nd, halved from sparse",
        fp32=80,
        tf32=1250,
        bf16=2500,
        fp8=5000,
        fp4=10000,
    ),
    # No fp4 for B300: NVIDIA's own documents give 13, 13.5 and 14 PFLOP/s.
    _peak(
        r"B300( SXM6 AC)?",
        "NVIDIA HGX B300 datasheet, an eighth, halved from sparse",
        fp32=75,
        tf32=1125,
        bf16=2250,
        fp8=4500,
    ),
    _peak(
        r"GB300",
        "NVIDIA GB300 NVL72 datasheet, a 72nd, halved from sparse",
        tf32=1250,
        bf16=2500,
        fp8=5000,
        fp4=15000,
    ),
    _peak(
        r"GeForce RTX 5090",
        "NVIDIA RTX Blackwell GPU whitepaper",
        fp32=104.8,
        tf32=104.8,
        bf16=209.5,
        fp8=419,
        fp4=1676,
    ),
)
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One kind of GPU in its usual node."""

    name: str
    """As `--gpu` takes it."""
    device_name: str
    """As CUDA reports it; finds the peaks in `device/gpus.py`."""
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
