"""Versions of the CUDA libraries, with stand-ins for the libraries that a machine without a GPU does not have."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megafp8.device import cuda_libraries
from megafp8.launch.doctor.facts import IMPORT_CHECK
from megafp8.training.run_record import RunRecord

NAMES = ["cuBLASLt", "cuDNN", "NCCL", "NVSHMEM", "driver"]


@pytest.mark.skipif(torch.version.cuda is not None, reason="a torch with CUDA has them")
def test_what_is_absent_is_none() -> None:
    found = cuda_libraries.cuda_library_versions()
    assert list(found) == NAMES
    assert [found[name] for name in NAMES[:4]] == [None] * 4


def stand_in(file: str, **_: Any) -> SimpleNamespace:
    """The library of this name, of those that have been loaded."""

    def write_numbers(*references: Any) -> None:
        for reference, number in zip(references, (3, 4, 5), strict=True):
            reference._obj.value = number

    def write_driver(buffer: Any, size: int) -> int:
        assert size == ctypes.sizeof(buffer) == 80
        buffer.value = b"580.159.03"
        return 0

    class CublasLtGetVersion:
        def __call__(self) -> int:
            return 130600

    libraries = {
        "libcublasLt.so.13": SimpleNamespace(cublasLtGetVersion=CublasLtGetVersion()),
        "libnvshmem_host.so.3": SimpleNamespace(nvshmemx_vendor_get_version_info=write_numbers),
        "libnvidia-ml.so.1": SimpleNamespace(
            nvmlInit_v2=lambda: 0, nvmlSystemGetDriverVersion=write_driver, nvmlShutdown=lambda: 0
        ),
    }
    if file not in libraries:
        raise OSError(file)
    return libraries[file]


def test_each_library_says_its_own_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", stand_in)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    found = cuda_libraries.cuda_library_versions()
    assert list(found.values()) == ["13.6.0", "9.19.0", "2.28.9", "3.4.5", "580.159.03"]


def test_a_driver_that_does_not_start_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda file, **_: SimpleNamespace(nvmlInit_v2=lambda: 9))
    assert cuda_libraries._driver() is None


def test_the_import_check_of_the_doctor_runs_from_anywhere() -> None:
    """By its path, with nothing of the project on the path, as the doctor starts it."""
    command = [sys.executable, "-I", str(IMPORT_CHECK), "json"]
    ended = subprocess.run(command, cwd="/", capture_output=True, text=True, check=True)
    assert [json.loads(line) for line in ended.stdout.splitlines()][:2] == [
        {"begin": "json"}, {"module": "json", "error": None},
    ]  # fmt: skip


def test_records_of_earlier_versions_have_none() -> None:
    record = RunRecord(config_hash="", config={}, world_size=1, layout={}, recipe="bf16", device_name="cpu")
    assert record.cuda_versions == {}
