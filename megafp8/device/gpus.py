"""Known GPUs: dense peak FLOP/s by device name, the denominator of MFU, and the GPUs and nodes that plans are made for.

Peaks are the vendor's, without structured sparsity (half of a figure that is only given with sparsity), with FP32
accumulation, at the part's rated power. A device that is not listed, or whose published figures disagree, has no peak.
Nothing is inferred from a similar name.

Bandwidths are per GPU and direction. A node is a group of GPUs that NVLink connects. Between nodes every GPU has its
own network adapter, on a fat tree without oversubscription.
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
    """Peak FLOP/s of one device.

    Attributes:
        pattern: regular expression that matches the complete name that CUDA reports, without the vendor.
        flops: FLOP/s by dtype: fp32 on CUDA cores; tf32, bf16, fp16, fp8 and fp4 on tensor cores.
    """

    pattern: str
    flops: Mapping[str, float]
    source: str


def find_peak(device_name: str) -> Optional[DevicePeak]:
    """The peaks of a device by the name of `torch.cuda.get_device_name`; None for an unknown device.

    The complete name must match, so that a MIG slice ("... MIG 1g.10gb"), a laptop GPU or a custom model does not get
    the peaks of the full GPU.
    """
    name = re.sub(r"^(NVIDIA|Nvidia|Tesla)\s+", "", device_name.strip())
    return next((entry for entry in PEAKS if re.fullmatch(entry.pattern, name)), None)


def peak_flops(device_name: str, dtype: str) -> Optional[float]:
    """Dense peak FLOP/s of a device for one dtype; None if the device (such as a CPU) or the dtype is unknown."""
    entry = find_peak(device_name)
    return None if entry is None else entry.flops.get(dtype)


def _peak(pattern: str, source: str, *, bf16: float, **tera_flops: float) -> DevicePeak:
    """An entry from TFLOP/s. FP16 with FP32 accumulation is as fast as BF16 on every device listed."""
    in_tera = tera_flops | {"bf16": bf16, "fp16": bf16}
    return DevicePeak(pattern=pattern, flops={dtype: value * TERA for dtype, value in in_tera.items()}, source=source)


PEAKS: tuple[DevicePeak, ...] = (
    _peak(r"A[18]00(-SXM4?-[48]0GB|-PCI[Ee]-[48]0GB| 80GB PCIe)", "NVIDIA A100 datasheet",
          fp32=19.5, tf32=156, bf16=312),
    _peak(r"A10", "NVIDIA A10 datasheet", fp32=31.2, tf32=62.5, bf16=125),
    _peak(r"A40", "NVIDIA A40 datasheet", fp32=37.4, tf32=74.8, bf16=149.7),
    _peak(r"RTX A6000", "NVIDIA RTX A6000 datasheet", fp32=38.7, tf32=77.4, bf16=154.8),
    _peak(r"GeForce RTX 3090", "NVIDIA Ampere GA102 whitepaper", fp32=35.6, tf32=35.6, bf16=71),
    _peak(r"L4", "NVIDIA L4 datasheet, halved from sparse", fp32=30.3, tf32=60, bf16=121, fp8=242.5),
    _peak(r"L40", "NVIDIA L40 datasheet", fp32=90.5, tf32=90.5, bf16=181, fp8=362),
    _peak(r"L40S", "NVIDIA L40S datasheet", fp32=91.6, tf32=183, bf16=362, fp8=733),
    _peak(r"GeForce RTX 4090", "NVIDIA Ada GPU whitepaper", fp32=82.6, tf32=82.6, bf16=165.2, fp8=330.3),
    _peak(r"H[18]00 80GB HBM3|H800", "NVIDIA H100 whitepaper, SXM5",
          fp32=66.9, tf32=494.7, bf16=989.4, fp8=1978.9),
    _peak(r"H100 PCIe", "NVIDIA H100 whitepaper, PCIe", fp32=51.2, tf32=378, bf16=756, fp8=1513),
    _peak(r"H[12]00 NVL", "NVIDIA H100 and H200 datasheets, NVL, halved from sparse",
          fp32=60, tf32=417.5, bf16=835.5, fp8=1670.5),
    # The same die and clocks as the H100 SXM5; the H200 and GH200 datasheets round the same figures.
    _peak(r"H200|GH200 (480GB|144G HBM3e)", "NVIDIA H200 and GH200 datasheets (H100 SXM5 figures)",
          fp32=66.9, tf32=494.7, bf16=989.4, fp8=1978.9),
    _peak(r"B200", "NVIDIA HGX B200 datasheet, an eighth, halved from sparse",
          fp32=75, tf32=1125, bf16=2250, fp8=4500, fp4=9000),
    _peak(r"GB200", "NVIDIA GB200 NVL72 datasheet, a 72nd, halved from sparse",
          fp32=80, tf32=1250, bf16=2500, fp8=5000, fp4=10000),
    # No fp4 for B300: NVIDIA's own documents give 13, 13.5 and 14 PFLOP/s.
    _peak(r"B300( SXM6 AC)?", "NVIDIA HGX B300 datasheet, an eighth, halved from sparse",
          fp32=75, tf32=1125, bf16=2250, fp8=4500),
    _peak(r"GB300", "NVIDIA GB300 NVL72 datasheet, a 72nd, halved from sparse",
          tf32=1250, bf16=2500, fp8=5000, fp4=15000),
    _peak(r"GeForce RTX 5090", "NVIDIA RTX Blackwell GPU whitepaper",
          fp32=104.8, tf32=104.8, bf16=209.5, fp8=419, fp4=1676),
)  # fmt: skip
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A kind of GPU in its usual node.

    Attributes:
        name: its value of `--gpu`.
        device_name: the name that CUDA reports.
    """

    name: str
    device_name: str
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
        """A machine with this GPU; Transformer Engine is assumed to be installed."""
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
"""GPUs by name. Plans use 64 of an NVL72's 72 GPUs, since layouts are powers of two."""


def find_gpu(device_name: str) -> Optional[Gpu]:
    """The GPU with this name, or whose CUDA device name is part of it; None if the planner does not know it."""
    by_length = sorted(GPUS.values(), key=lambda gpu: -len(gpu.device_name))  # longest first: GB200 contains B200
    return GPUS.get(device_name) or next((gpu for gpu in by_length if gpu.device_name in device_name), None)
