import argparse
import dataclasses
import re

import pytest

from megafp8.config.gpu_names import COMPUTE_CAPABILITIES, gpu_type
from megafp8.device.capability import TARGETS
from megafp8.device.gpus import GPUS, PEAKS, find_gpu, find_peak, gpu_of, peak_flops, with_figures


@pytest.mark.parametrize(
    ("device_name", "dtype", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("A100-SXM4-40GB", "tf32", 156e12),
        ("NVIDIA A100 80GB PCIe", "fp32", 19.5e12),
        ("NVIDIA H100 80GB HBM3", "fp8", 1978.9e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA H100 NVL", "bf16", 835.5e12),
        ("NVIDIA H200", "bf16", 989.4e12),
        ("NVIDIA H200 NVL", "fp8", 1670.5e12),
        ("NVIDIA B200", "fp4", 9000e12),
        ("NVIDIA GB200", "fp8", 5000e12),
        ("NVIDIA L40S", "fp8", 733e12),
        ("NVIDIA L40", "fp8", 362e12),
        ("NVIDIA GeForce RTX 4090", "fp8", 330.3e12),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "fp8", 1007.6e12),
        ("NVIDIA GB10", "fp4", 500e12),
        ("NVIDIA H20", "bf16", 148e12),
    ],
)
def test_known_devices(device_name: str, dtype: str, expected: float) -> None:
    assert peak_flops(device_name, dtype) == pytest.approx(expected)


@pytest.mark.parametrize(
    "device_name",
    [
        "cpu",
        "",
        "Intel(R) Xeon(R) Platinum 8480+",
        "NVIDIA H100",  # SXM or PCIe? They differ.
        "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
        "NVIDIA A100-SXM-64GB",  # a custom part with more units
        "NVIDIA A10G",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA H20-3e",
        "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
        "AMD Instinct MI300X",
    ],
)
def test_a_device_that_is_not_in_the_table_has_no_peak(device_name: str) -> None:
    assert find_peak(device_name) is None
    assert peak_flops(device_name, "bf16") is None


def test_a_dtype_without_hardware_has_no_peak() -> None:
    assert peak_flops("NVIDIA A100-SXM4-80GB", "fp8") is None
    assert peak_flops("NVIDIA H200", "fp4") is None


def test_no_peak_is_a_sparse_figure() -> None:
    """Matrix units double their rate as the width halves, so a sparse figure shows as a factor of four."""
    for entry in PEAKS:
        assert entry.source
        if "fp8" in entry.flops:
            assert entry.flops["fp8"] == pytest.approx(2 * entry.flops["bf16"], rel=0.02), entry.pattern
        assert entry.flops["bf16"] >= entry.flops["tf32"]
        if "fp4" in entry.flops:
            assert 2 <= entry.flops["fp4"] / entry.flops["fp8"] <= 4, entry.pattern


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("A100", "a100"), ("NVIDIA A100-SXM4-80GB", "a100"), ("a100 40GB", "a100-40gb"), ("L40s", "l40s"),
        ("RTX 4090", "rtx4090"), ("rtx_4090", "rtx4090"), ("4090", "rtx4090"), ("NVIDIA GeForce RTX 5090", "rtx5090"),
        ("RTX PRO 6000", "rtxpro6000"), ("RTX 6000 Pro Blackwell", "rtxpro6000"), ("DGX Spark", "gb10"),
        ("H100 SXM5", "h100"), ("h100sxm", "h100"), ("H100-SXM-80GB", "h100"), ("H100 PCIe", "h100-pcie"),
        ("h100_nvl", "h100-nvl"), ("H200-SXM", "h200"), ("HGX H20", "h20"), ("B200", "b200"), ("DGX B300", "b300"),
        ("GB200 NVL72", "gb200"), ("GB300", "gb300"),
    ],
)  # fmt: skip
def test_gpus_are_known_as_people_spell_them(spelling: str, name: str) -> None:
    assert gpu_type()(spelling) == name


@pytest.mark.parametrize("name", ["RTX 4090 Laptop GPU", "RTX 4090 D", "A10", "H20-3e", "RTX 6000 Ada"])
def test_another_gpu_of_a_similar_name_is_not_a_known_one(name: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="others: --gpu-memory-gib"):
        gpu_type()(name)
    assert find_gpu(f"NVIDIA {name}") is None


def test_every_gpu_is_found_by_its_device_name_and_has_its_source() -> None:
    assert GPUS.keys() == COMPUTE_CAPABILITIES.keys() == TARGETS.keys() - {"cpu"}
    for gpu in GPUS.values():
        assert find_gpu(f"NVIDIA {gpu.device_name}") is gpu and gpu_type()(gpu.name) == gpu.name
        assert gpu.source and gpu.peak.source and gpu.target.name == gpu.name
        assert ("fp8" in gpu.peak.flops) == (gpu.compute_capability >= (8, 9)), gpu.name
        assert ("fp4" in gpu.peak.flops) <= (gpu.compute_capability >= (10, 0)), gpu.name


def test_a_gpu_like_a_known_one() -> None:
    like = with_figures(GPUS["l40s"], memory_gib=20, peak_tflops=181)
    assert like.memory_bytes == 20 * 2**30 and like.peak.source == "--gpu-peak-tflops"
    assert like.peak.flops["bf16"] == pytest.approx(181e12) and like.peak.flops["fp8"] == pytest.approx(366.5e12)
    target = dataclasses.replace(TARGETS["l40s"], memory_gib=20.0, peak_tflops=181.0)
    assert gpu_of(target) == like and gpu_of(TARGETS["l40s"]) is GPUS["l40s"]


def test_every_pattern_compiles_and_names_one_entry() -> None:
    for name in ("A100-SXM4-80GB", "H200", "H200 NVL", "L4", "L40", "B200", "GB200"):
        assert sum(re.fullmatch(entry.pattern, name) is not None for entry in PEAKS) == 1
