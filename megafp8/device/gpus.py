"""Known GPUs: dense peak FLOP/s by device name, the denominator of MFU, and the GPUs and nodes that plans are made for.

Peaks are the vendor's, without structured sparsity (half of a figure that is only given with sparsity), with FP32
accumulation, at the part's rated power. A device that is not listed, or whose published figures disagree, has no peak.
Nothing is inferred from a similar name.

Bandwidths are per GPU and direction. A node is a group of GPUs that NVLink connects, or PCIe. Between nodes every GPU
has its own network adapter, on a fat tree without oversubscription.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Optional

from megafp8.config.gpu_names import COMPUTE_CAPABILITIES
from megafp8.device.capability import TARGETS, Target

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
    return next((entry for entry in PEAKS if re.fullmatch(entry.pattern, without_vendor(device_name))), None)


def without_vendor(device_name: str) -> str:
    """The device name of `torch.cuda.get_device_name` without the vendor."""
    return re.sub(r"^(NVIDIA|Nvidia|Tesla)\s+", "", device_name.strip())


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
    # NVIDIA publishes no sheet of the H20. Resellers and its own tables for partners agree on these.
    _peak(r"H20", "NVIDIA HGX H20 product brief, as resellers quote it", fp32=44, tf32=74, bf16=148, fp8=296),
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
    # Of 600 W; the Max-Q and server editions have other clocks. FP32 accumulation is at the full rate here.
    _peak(r"RTX PRO 6000 Blackwell Workstation Edition", "NVIDIA RTX Blackwell PRO GPU whitepaper",
          fp32=126, tf32=251.9, bf16=503.8, fp8=1007.6, fp4=2015.2),
    # The sheet has sparse FP4 only, 1 PFLOP/s. The rest has the ratios of the RTX PRO 6000's tensor cores.
    _peak(r"GB10", "NVIDIA DGX Spark datasheet, halved from sparse FP4; others by the RTX PRO 6000's ratios",
          fp32=31, tf32=62.5, bf16=125, fp8=250, fp4=500),
)  # fmt: skip
MIB = 2**20
NVLINK, PCIE = "NVLink", "PCIe"
PCIE4_BYTES_PER_S, PCIE5_BYTES_PER_S = 31.5e9, 63e9
"""Of 16 lanes, each way: PCI Express Base Specification 4.0 and 5.0."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A kind of GPU in its usual node.

    Attributes:
        name: its value of `--gpu`.
        device_name: the name that CUDA reports, without the vendor.
        link: between the GPUs of a node, `NVLINK` or `PCIE`.
        bf16_flops: dense peak in place of the listed one; the peaks of other dtypes change in proportion.
    """

    name: str
    device_name: str
    num_sms: int
    memory_bytes: int
    hbm_bytes_per_s: float
    link: str = NVLINK
    link_bytes_per_s: float
    network_bytes_per_s: float
    gpus_per_node: int = 8
    source: str
    bf16_flops: Optional[float] = None

    @property
    def compute_capability(self) -> tuple[int, int]:
        """Major and minor."""
        return COMPUTE_CAPABILITIES[self.name]

    @property
    def reaches_peers(self) -> bool:
        """Whether the GPUs of a node use each other's memory well: measured on Hopper with NVLink. Older GPUs and those
        without NVLink may not reach it at all."""
        return self.link == NVLINK and self.compute_capability >= (9, 0)

    @functools.cached_property
    def peak(self) -> DevicePeak:
        """Peak FLOP/s by dtype."""
        entry = find_peak(self.device_name)
        assert entry is not None, self.device_name
        if self.bf16_flops is None:
            return entry
        factor = self.bf16_flops / entry.flops["bf16"]
        flops = {dtype: factor * value for dtype, value in entry.flops.items()}
        return dataclasses.replace(entry, flops=flops, source="--gpu-peak-tflops")

    @property
    def target(self) -> Target:
        """A machine with this GPU; Transformer Engine is assumed to be installed."""
        return TARGETS[self.name]


_HGX = "memory: nvidia-smi's total; others: NVIDIA datasheet; network: 8 x 400 Gb/s InfiniBand of a DGX, an eighth"
_GH200 = "NVIDIA GH200 datasheet; network: assumed, 400 Gb/s a GPU"
_NVL72 = "memory: nvidia-smi's total; others: NVIDIA NVL72 datasheets, a 72nd; network: 400 Gb/s a GPU (GB300: 800)"
_CARD = "memory: nvidia-smi's total; others: NVIDIA datasheet, without NVLink bridges; network: assumed, 200 Gb/s a GPU"
_of_hgx = functools.partial(Gpu, link_bytes_per_s=450e9, network_bytes_per_s=50e9, source=_HGX)
_card = functools.partial(
    Gpu, link=PCIE, link_bytes_per_s=PCIE5_BYTES_PER_S, network_bytes_per_s=25e9, source=_CARD
)  # fmt: skip
_gh200 = functools.partial(
    Gpu, num_sms=132, link=PCIE, link_bytes_per_s=50e9, network_bytes_per_s=50e9, gpus_per_node=1, source=_GH200
)  # fmt: skip
GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        gpu.name: gpu
        for gpu in (
            Gpu(
                name="a100", device_name="A100-SXM4-80GB", num_sms=108, memory_bytes=81_920 * MIB,
                hbm_bytes_per_s=2.039e12, link_bytes_per_s=300e9, network_bytes_per_s=25e9,
                source="memory: nvidia-smi's total; others: NVIDIA A100 datasheet; network: DGX A100, 8 x 200 Gb/s",
            ),
            Gpu(
                name="a100-40gb", device_name="A100-SXM4-40GB", num_sms=108, memory_bytes=40_960 * MIB,
                hbm_bytes_per_s=1.555e12, link_bytes_per_s=300e9, network_bytes_per_s=25e9,
                source="memory: nvidia-smi's total; others: NVIDIA A100 datasheet; network: DGX A100, 8 x 200 Gb/s",
            ),
            _card(
                name="l40s", device_name="L40S", num_sms=142, memory_bytes=46_068 * MIB, hbm_bytes_per_s=864e9,
                link_bytes_per_s=PCIE4_BYTES_PER_S,
            ),
            _card(
                name="rtx4090", device_name="GeForce RTX 4090", num_sms=128, memory_bytes=24_564 * MIB,
                hbm_bytes_per_s=1.008e12, link_bytes_per_s=PCIE4_BYTES_PER_S,
            ),
            _of_hgx(
                name="h100", device_name="H100 80GB HBM3", num_sms=132, memory_bytes=81_559 * MIB,
                hbm_bytes_per_s=3.35e12,
            ),
            _card(
                name="h100-pcie", device_name="H100 PCIe", num_sms=114, memory_bytes=81_559 * MIB,
                hbm_bytes_per_s=2.0e12,
            ),
            _card(
                name="h100-nvl", device_name="H100 NVL", num_sms=132, memory_bytes=95_830 * MIB, hbm_bytes_per_s=3.9e12,
            ),
            _of_hgx(
                name="h200", device_name="H200", num_sms=132, memory_bytes=143_771 * MIB, hbm_bytes_per_s=4.8e12,
            ),
            _card(
                name="h200-nvl", device_name="H200 NVL", num_sms=132, memory_bytes=143_771 * MIB,
                hbm_bytes_per_s=4.8e12,
            ),
            # One beside its CPU: others are reached by the network.
            _gh200(
                name="gh200", device_name="GH200 480GB", memory_bytes=97_871 * MIB, hbm_bytes_per_s=4.0e12,
            ),
            _gh200(
                name="gh200-144gb", device_name="GH200 144G HBM3e", memory_bytes=147_456 * MIB, hbm_bytes_per_s=4.9e12,
            ),
            Gpu(
                name="h20", device_name="H20", num_sms=78, memory_bytes=97_871 * MIB, hbm_bytes_per_s=4.0e12,
                link_bytes_per_s=450e9, network_bytes_per_s=50e9,
                source="memory: nvidia-smi's total; others: NVIDIA HGX H20 product brief, as resellers quote it; "
                "network: as of a DGX H100",
            ),
            _of_hgx(
                name="b200", device_name="B200", num_sms=148, memory_bytes=183_359 * MIB, hbm_bytes_per_s=8e12,
                link_bytes_per_s=900e9,
            ),
            Gpu(
                name="gb200", device_name="GB200", num_sms=148, memory_bytes=189_471 * MIB, hbm_bytes_per_s=8e12,
                link_bytes_per_s=900e9, network_bytes_per_s=50e9, gpus_per_node=64, source=_NVL72,
            ),
            Gpu(
                name="b300", device_name="B300 SXM6 AC", num_sms=148, memory_bytes=275_040 * MIB, hbm_bytes_per_s=8e12,
                link_bytes_per_s=900e9, network_bytes_per_s=100e9,
                source="memory: nvidia-smi's total; others: NVIDIA HGX B300 datasheet; network: DGX B300, 8 x 800 Gb/s",
            ),
            Gpu(
                name="gb300", device_name="GB300", num_sms=148, memory_bytes=284_208 * MIB, hbm_bytes_per_s=8e12,
                link_bytes_per_s=900e9, network_bytes_per_s=100e9, gpus_per_node=64, source=_NVL72,
            ),
            _card(
                name="rtx5090", device_name="GeForce RTX 5090", num_sms=170, memory_bytes=32_607 * MIB,
                hbm_bytes_per_s=1.792e12,
            ),
            _card(
                name="rtxpro6000", device_name="RTX PRO 6000 Blackwell Workstation Edition", num_sms=188,
                memory_bytes=97_887 * MIB, hbm_bytes_per_s=1.792e12,
            ),
            Gpu(
                # Its memory is the CPU's, too: what the system takes is not there for training.
                name="gb10", device_name="GB10", num_sms=48, memory_bytes=128 * 10**9, hbm_bytes_per_s=273e9,
                link=PCIE, link_bytes_per_s=25e9, network_bytes_per_s=25e9, gpus_per_node=1,
                source="NVIDIA DGX Spark datasheet; network: its ConnectX-7, 200 Gb/s",
            ),
        )
    }
)  # fmt: skip
"""GPUs by name. Plans use 64 of an NVL72's 72 GPUs, since layouts are powers of two."""


def find_gpu(device_name: str) -> Optional[Gpu]:
    """The GPU with this name, or with this CUDA device name; None if the planner does not know it."""
    plain = without_vendor(device_name)
    return GPUS.get(device_name) or next((gpu for gpu in GPUS.values() if gpu.device_name == plain), None)


def gpu_of(target: Target) -> Optional[Gpu]:
    """The GPU of a target; None if the planner does not know it."""
    gpu = find_gpu(target.name)
    return None if gpu is None else with_figures(gpu, target.memory_gib, target.peak_tflops)


def with_figures(gpu: Gpu, memory_gib: Optional[float] = None, peak_tflops: Optional[float] = None) -> Gpu:
    """The GPU with another memory size or dense BF16 peak, to stand for one like it; None keeps its own."""
    if memory_gib is not None:
        gpu = dataclasses.replace(gpu, memory_bytes=int(memory_gib * 2**30))
    return gpu if peak_tflops is None else dataclasses.replace(gpu, bf16_flops=peak_tflops * TERA)
