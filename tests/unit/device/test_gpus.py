import re

import pytest

from megafp8.device.gpus import PEAKS, find_peak, peak_flops


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
        "NVIDIA H20",
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


def test_every_pattern_compiles_and_names_one_entry() -> None:
    for name in ("A100-SXM4-80GB", "H200", "H200 NVL", "L4", "L40", "B200", "GB200"):
        assert sum(re.fullmatch(entry.pattern, name) is not None for entry in PEAKS) == 1
