"""Every check on a correct machine and on each kind of incorrect one."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from megafp8.launch.doctor import versions
from megafp8.launch.doctor.checks import CHECKS, ERROR, LIBRARIES, OK, WARNING, recipe_support, run_checks
from megafp8.launch.doctor.facts import InstalledGpu, Machine
from megafp8.launch.doctor.report import exit_status, report_data, report_text
from megafp8.launch.doctor.versions import dotted

ROOT = Path(__file__).resolve().parents[4]
WHEEL = "/site/nvidia/cudnn"
CPU = Machine(
    python=(3, 11, 7),
    packages={"torch": "2.13.0+cpu", "megatron-core": "0.16.1"} | dict.fromkeys(LIBRARIES, "1.0"),
    import_errors={"torch": None, "numpy": None, "megatron.core": None},
    torch_version="2.13.0+cpu",
    compiler="gcc", has_python_headers=True, shared_memory_bytes=2**34, open_files=65536,
    disk_free_bytes=2**40, disk_bytes_per_s=1e9,
)  # fmt: skip
H200 = dataclasses.replace(
    CPU,
    python=(3, 12, 3),
    packages={
        **CPU.packages, "torch": "2.11.0+cu130", "transformer-engine": "2.20.2", "transformer-engine-cu13": "2.20.2",
        "transformer-engine-torch": "2.20.2", "triton": "3.6.0", "nvidia-cudnn-cu13": "9.19.0.56",
        "nvidia-cublas": "13.1.0.3", "nvidia-nvshmem-cu13": "3.4.5",
    },
    import_errors=CPU.import_errors | {"transformer_engine.pytorch": None},
    has_te_torch_part=True, torch_version="2.11.0+cu130", torch_cuda="13.0", cudnn_version=91900,
    library_versions={"NCCL": "2.28.9", "cuBLASLt": "13.1.0"},
    torch_wheels={"nvidia-cublas": "13.1.0.3", "nvidia-nvshmem-cu13": "3.4.5", "nvidia-cudnn-cu13": "9.19.0.56"},
    driver="580.159.04", driver_gpus=("NVIDIA H200",) * 8, links=("NV18",),
    gpus=(InstalledGpu(name="NVIDIA H200", memory_bytes=150 * 10**9, compute_capability=(9, 0)),) * 8,
    wheel_cudnn=WHEEL, loaded={"cuDNN": (WHEEL + "/lib",), "cuBLASLt": ("/site/nvidia/cu13/lib",)},
)  # fmt: skip
BROKEN_TORCH = "ImportError: libcudart.so.13: cannot open shared object file"


def without(machine: Machine, *names: str, **others: str) -> dict:
    """The packages without some, and with others."""
    return {name: version for name, version in machine.packages.items() if name not in names} | others


def change(machine: Machine, **values) -> Machine:
    return dataclasses.replace(machine, **values)


def failing(machine: Machine, **errors: str) -> dict:
    return dict(machine.import_errors) | {name.replace("__", "."): text for name, text in errors.items()}


@pytest.mark.parametrize(
    ("machine", "today", "ending"),
    [
        (CPU, "2027-05-03", []),  # 181 days before
        (CPU, "2027-05-04", ["Python 3.11", "megatron-core 0.16.1"]),
        (H200, "2027-05-04", ["megatron-core 0.16.1"]),
        (CPU, "2030-01-01", ["Python 3.11", "megatron-core 0.16.1"]),
    ],
)
def test_ends_of_support_are_announced(machine: Machine, today: str, ending: list[str]) -> None:
    found = [each for each in run_checks(change(machine, today=today)) if each.check == "support"]
    assert [each.text.split(":")[0] for each in found if each.level == WARNING] == ending
    assert len(found) == max(1, len(ending)) and (ending or found[0].level == OK)


@pytest.mark.parametrize("machine", [CPU, H200], ids=["CPU", "H200"])
def test_a_correct_machine_has_no_findings(machine: Machine) -> None:
    results = run_checks(machine)
    assert {result.level for result in results} == {OK}
    assert all(result.fix is None for result in results)
    assert exit_status(results, strict=True) == 0
    assert "nothing to fix" in report_text(machine, results)


CASES = {
    "python": ({"python": (3, 14, 0)}, ERROR, "Python", "3.14.0: megafp8 needs 3.11 to 3.13", "docs/install.md"),
    "an early Python 3.11": ({"python": (3, 11, 3)}, WARNING, "Python", "3.11.3: Python 3.11.0 to 3.11.3", "3.11.4"),
    "torch is missing": (
        {"packages": without(CPU, "torch"), "torch_version": None,
         "import_errors": failing(CPU, torch="ModuleNotFoundError: No module named 'torch'")},
        ERROR, "torch", "not installed", "pip install",
    ),
    "torch is broken": (
        {"import_errors": failing(CPU, torch=BROKEN_TORCH)}, ERROR, "torch", "libcudart.so.13", "--force-reinstall"
    ),
    "torch is old": ({"torch_version": "2.5.1"}, ERROR, "torch", "older than 2.6", "torch>=2.6"),
    "megatron-core is missing": (
        {"packages": without(CPU, "megatron-core")}, ERROR, "megatron-core", "not installed", "megatron-core==0.16.1"
    ),
    "another megatron-core": (
        {"packages": without(CPU) | {"megatron-core": "0.18.1"}}, ERROR, "megatron-core", "0.18.1: supported versions "
        "are 0.16.1 and 0.19", "megatron-core==0.16.1",
    ),
    "megatron-core is missing on a newer Python": (
        {"packages": without(CPU, "megatron-core"), "python": (3, 12, 3)}, ERROR, "megatron-core", "not installed",
        "megatron-core==0.19.2",
    ),
    "a tested megatron-core on another Python": (
        {"packages": without(CPU) | {"megatron-core": "0.16.1"}, "python": (3, 13, 4)}, WARNING, "tested set",
        "Python 3.13 (tested 3.1",
        "-c constraints.txt",
    ),
    "megatron-core is broken": (
        {"import_errors": failing(CPU, megatron__core="AttributeError: x")}, ERROR, "megatron-core",
        "AttributeError: x", "pip install",
    ),
    "a library is missing": (
        {"packages": without(CPU, "psutil", "tqdm")}, ERROR, "libraries", "psutil, tqdm", "pip install psutil tqdm"
    ),
    "numpy is broken": (
        {"import_errors": failing(CPU, numpy="ImportError: x")}, ERROR, "libraries", "numpy cannot", "numpy"
    ),
    "not tested together": (
        {"packages": without(CPU, torch="2.12.1")}, WARNING, "tested set", "torch 2.12.1 (tested 2.13)",
        "-c constraints.txt",
    ),
    "little shared memory": (
        {"shared_memory_bytes": 64 * 2**20}, WARNING, "shared memory", "67 MB", "--shm-size"
    ),
    "no shared memory": ({"shared_memory_bytes": None}, WARNING, "shared memory", "/dev/shm does not exist", "mount"),
    "few open files": ({"open_files": 1024}, WARNING, "open files", "1024", "ulimit -n"),
    "little space": ({"disk_free_bytes": 2**30, "disk_bytes_per_s": None}, WARNING, "disk", "1 GiB free", "space"),
    "a full disk": ({"disk_free_bytes": 2**29, "disk_bytes_per_s": None}, ERROR, "disk", "full: 537 MB free", "space"),
    "no space for a file": ({"disk_error": "No space left on device"}, ERROR, "disk", "No space left", "disk space"),
    "a slow disk": ({"disk_bytes_per_s": 5e6}, WARNING, "disk", "5 MB/s", "faster"),
    "torch without the driver's library": (
        {"import_errors": failing(CPU, torch="ImportError: libcuda.so.1: cannot open shared object file")}, ERROR,
        "torch", "libcuda.so.1", "install the NVIDIA driver",
    ),
    "torch without memory": (
        {"import_errors": failing(CPU, torch="the process exited with status -9")}, ERROR, "torch", "status -9",
        "free memory",
    ),
    "nvidia-smi without a driver": (
        {"driver_error": "nvidia-smi exited with status 9: NVIDIA-SMI has failed"}, ERROR, "GPU",
        "broken driver: nvidia-smi exited with status 9: NVIDIA-SMI has failed", "dmesg | grep -i nvrm",
    ),
    "the other Apex": (
        {"packages": without(CPU, apex="0.9.10.dev0"), "has_other_apex": True}, WARNING, "Apex",
        "0.9.10.dev0 is not NVIDIA's: the package apex on PyPI is a toolkit for Pyramid", "pip uninstall apex",
    ),
    "a Python whose support ends": (
        {"today": "2027-10-31", "packages": without(CPU) | {"megatron-core": "0.19.2"}}, WARNING, "support",
        "Python 3.11: support ends on 2027-10-31: last security fixes", "Python 3.13",
    ),
    "no writing": ({"disk_error": "Read-only file system"}, ERROR, "disk", "Read-only file system", "--folder"),
}  # fmt: skip

GPU_CASES = {
    "a megatron-core whose support has ended": (
        {"today": "2027-11-01"}, WARNING, "support", "megatron-core 0.16.1: support ended on 2027-10-31", "Python 3.12",
    ),
    "another cuDNN than the tested one": (
        {"cudnn_version": 91201}, WARNING, "tested set", "differs from H200, CUDA 13.0: cuDNN 9.12.1 (tested 9.19)",
        "-c constraints-gpu.txt",
    ),
    "no GPU for torch": (
        {"gpus": (), "cuda_error": "Found no NVIDIA driver on your system"}, ERROR, "GPU",
        "torch sees 0: Found no NVIDIA driver", "nvidia-smi",
    ),
    "hidden GPUs": (
        {"gpus": H200.gpus[:2], "environment": {"CUDA_VISIBLE_DEVICES": "0,1"}}, WARNING, "GPU",
        "torch sees 2: CUDA_VISIBLE_DEVICES=0,1", "unset",
    ),
    "torch for CPUs": (
        {"gpus": (), "torch_cuda": None, "torch_version": "2.11.0+cpu"}, ERROR, "GPU", "built without CUDA", "torch"
    ),
    "an old driver": (
        {"gpus": (), "driver": "550.54.15"}, ERROR, "GPU", "550.54.15 is too old for torch's CUDA 13.0", "580"
    ),
    "Transformer Engine is missing": (
        {"packages": without(H200, "transformer-engine"), "has_te_torch_part": False}, WARNING, "Transformer Engine",
        "emulated", "-e '.[te]'",
    ),
    "half a Transformer Engine": (
        {"has_te_torch_part": False}, ERROR, "Transformer Engine", "without its torch extension", "pip uninstall"
    ),
    "Transformer Engine's Python alone": (
        {"packages": without(H200, "transformer-engine-torch"), "has_te_torch_part": False}, ERROR,
        "Transformer Engine", "2.20.2 is the empty meta package, without transformer-engine-torch",
        "pip install --no-build-isolation 'transformer-engine[pytorch]==2.20.2', or: pip uninstall transformer-engine",
    ),
    "a driver that hangs beside working GPUs": (
        {"driver_error": "nvidia-smi did not finish within 60 s", "driver": None, "driver_gpus": ()}, WARNING, "GPU",
        "broken driver: nvidia-smi did not finish within 60 s; torch sees 8", "dmesg",
    ),
    "CUDA that does not start": (
        {"gpus": (), "slow_imports": {"CUDA": 120}}, WARNING, "GPU",
        "8 x NVIDIA H200; CUDA did not start within 120 s", "idle machine",
    ),
    "a broken Transformer Engine": (
        {"import_errors": failing(H200, transformer_engine__pytorch="ImportError: undefined symbol")}, ERROR,
        "Transformer Engine", "undefined symbol", "--no-build-isolation transformer-engine-torch==2.20.2",
    ),
    "Transformer Engine for another CUDA": (
        {"packages": without(H200, "transformer-engine-cu13") | {"transformer-engine-cu12": "2.20.2"}}, ERROR,
        "CUDA libraries", "transformer-engine-cu12", "pip uninstall transformer-engine-cu12",
    ),
    "two cuDNN wheels": (
        {"packages": without(H200) | {"nvidia-cudnn-cu12": "9.10.2"}}, WARNING, "CUDA libraries", "nvidia-cudnn-cu12",
        "pip uninstall nvidia-cudnn-cu12",
    ),
    "the system's cuDNN": (
        {"found_cudnn": ("/usr/lib/x86_64-linux-gnu", "the loader's cache")}, ERROR, "cuDNN",
        "uses 9.19.0 in /site/nvidia/cudnn, but Transformer Engine finds another in /usr/lib/x86_64-linux-gnu",
        "export CUDNN_HOME=/site/nvidia/cudnn",
    ),
    "two loaded cuDNNs": (
        {"loaded": {"cuDNN": (WHEEL + "/lib", "/usr/lib")}}, ERROR, "cuDNN", "two versions are loaded",
        f"CUDNN_HOME={WHEEL}",
    ),
    "parts of two Transformer Engines": (
        {"packages": without(H200) | {"transformer-engine-torch": "2.19.0"}}, ERROR, "Transformer Engine",
        "2.20.2, but transformer-engine-torch 2.19.0", "transformer-engine[pytorch]==2.20.2",
    ),
    "another cuBLAS": (
        {"packages": without(H200) | {"nvidia-cublas": "13.4.0.1"}}, WARNING, "CUDA libraries",
        "torch 2.11.0+cu130 was built with: nvidia-cublas 13.4.0.1 (13.1.0.3)", "pip install nvidia-cublas==13.1.0.3",
    ),
    "no NVSHMEM": (
        {"packages": without(H200, "nvidia-nvshmem-cu13")}, WARNING, "CUDA libraries",
        "nvidia-nvshmem-cu13 missing (3.4.5)", "pip install nvidia-nvshmem-cu13==3.4.5",
    ),
    "two loaded cuBLASLts": (
        {"loaded": {"cuBLASLt": ("/site/nvidia/cu13/lib", "/usr/local/cuda/lib64")}}, ERROR, "CUDA libraries",
        "two copies of cuBLASLt are loaded", "remove /usr/local/cuda/lib64",
    ),
    "no Triton": ({"packages": without(H200, "triton")}, ERROR, "Triton", "not installed", "pip install triton"),
    "no compiler": ({"compiler": None}, ERROR, "Triton", "a C compiler", "gcc"),
    "no headers": ({"has_python_headers": False}, ERROR, "Triton", "Python.h", "python3.12-dev"),
    "no NVLink": ({"links": ("NV18", "SYS")}, WARNING, "GPU links", "SYS", "--tensor-model-parallel-size"),
    "a switch": (
        {"environment": {"NVTE_NVFP4_DISABLE_RHT": "1"}}, WARNING, "environment", "nothing is Hadamard-transformed",
        "unset NVTE_NVFP4_DISABLE_RHT",
    ),
    "no fused attention": (
        {"environment": {"NVTE_FUSED_ATTN": "0"}}, WARNING, "environment", "--attention-backend auto",
        "unset NVTE_FUSED_ATTN",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("machine", "values", "level", "check", "text", "mend"),
    [(CPU, *case) for case in CASES.values()] + [(H200, *case) for case in GPU_CASES.values()],
    ids=[*CASES, *GPU_CASES],
)
def test_each_fault_is_found_with_its_fix(machine, values, level, check, text, mend) -> None:
    found = [
        result for result in run_checks(change(machine, **values)) if result.check == check and result.level == level
    ]
    assert len(found) == 1, [result for result in run_checks(change(machine, **values)) if result.level != OK]
    assert text in found[0].text and found[0].fix is not None and mend in found[0].fix
    assert exit_status(found) == (64 if level == ERROR else 0)
    assert exit_status(found, strict=True) == (64 if level == ERROR else 1)


def test_every_check_has_a_fault() -> None:
    named = {case[2] for case in (*CASES.values(), *GPU_CASES.values())}
    assert set(CHECKS) - named == set()


def test_a_bare_machine_has_every_problem() -> None:
    nothing = Machine(python=(3, 9, 2), import_errors={"torch": "ModuleNotFoundError"}, disk_error="gone")
    results = run_checks(nothing, num_gpus=8)
    errors = {result.check for result in results if result.level == ERROR}
    assert errors == {"Python", "torch", "megatron-core", "libraries", "disk", "GPU"}
    assert set(recipe_support(nothing).values()) == {"not available: see above"}
    assert "training cannot run" in report_text(nothing, results)


def test_one_broken_torch_is_reported_once() -> None:
    others = dict.fromkeys(("torch", "megatron.core", "transformer_engine.pytorch"), BROKEN_TORCH)
    results = run_checks(change(H200, import_errors=others, torch_version=None, gpus=(), torch_cuda=None))
    assert [result.check for result in results if BROKEN_TORCH in result.text] == ["torch"]


@pytest.mark.parametrize(
    ("module", "check"),
    [("torch", "torch"), ("megatron.core", "megatron-core"), ("numpy", "libraries"),
     ("transformer_engine.pytorch", "Transformer Engine")],
)  # fmt: skip
def test_a_slow_import_is_not_reported_as_broken(module: str, check: str) -> None:
    """The ones after it were not tried."""
    tried = dict(list(H200.import_errors.items())[: list(H200.import_errors).index(module)])
    machine = change(H200, import_errors=tried, slow_imports={module: 120.0}, load_per_core=5.25)
    found = [result for result in run_checks(machine) if result.level != OK]
    assert [(result.check, result.level) for result in found] == [(check, WARNING)]
    assert "not imported within 120 s (load 5.2 per core): unknown whether it works" in found[0].text
    assert "reinstall" not in str(found) and "pip" not in str(found)
    assert exit_status(found) == 0 and exit_status(found, strict=True) == 1
    assert "unknown whether training can run" in report_text(machine, found)
    assert set(recipe_support(machine).values()) == {"unknown: see above"}
    assert report_data(machine, found)["can_train"] is None


def test_a_gpu_that_torch_cannot_use_is_found() -> None:
    """No report says that Transformer Engine is not needed without a GPU."""
    no_engine = {"packages": without(H200, "transformer-engine"), "gpus": (), "has_te_torch_part": False}
    for changes in ({}, {"driver": None, "driver_gpus": (), "driver_error": "nvidia-smi exited with status 9: failed"}):
        machine = change(H200, **no_engine, **changes)
        text = report_text(machine, run_checks(machine))
        assert "without a GPU" not in text and "FP8 is emulated" in text
        assert "none: training runs on the CPU" not in text


def test_requested_gpus_must_exist() -> None:
    assert exit_status(run_checks(H200, num_gpus=8)) == 0
    assert exit_status(run_checks(CPU, num_gpus=1)) == 64
    assert "16 expected, torch sees 8" in report_text(H200, run_checks(H200, num_gpus=16))
    late = change(H200, gpus=(), slow_imports={"CUDA": 120})
    assert exit_status(run_checks(late, num_gpus=8)) == 0
    assert "16 expected, the driver has 8" in report_text(late, run_checks(late, num_gpus=16))


def test_recipes_are_native_emulated_or_not_at_all() -> None:
    hopper = {"tensorwise": "native", "delayed": "native", "blockwise": "native"}
    emulated = ("rowwise", "mxfp8", "nvfp4", "quartet2")
    assert recipe_support(H200) == hopper | dict.fromkeys(emulated, "emulated")
    blackwell = InstalledGpu(name="NVIDIA B200", memory_bytes=1, compute_capability=(10, 0))
    found = recipe_support(change(H200, gpus=(blackwell,)))
    assert [name for name, how in found.items() if how != "native"] == ["rowwise", "quartet2"]
    # Unlike GPUs: the recipes of the least capable one.
    assert recipe_support(change(H200, gpus=(blackwell, H200.gpus[0])))["mxfp8"] == "emulated"
    assert set(recipe_support(CPU).values()) == {"emulated"}
    assert recipe_support(change(H200, packages=without(H200, "transformer-engine")))["delayed"] == "emulated"


def test_the_checks_are_those_of_setup() -> None:
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    assert f"torch>={dotted(versions.TORCH_FROM)}" in setup
    required = setup.partition("install_requires")[2].partition("extras_require")[0].lower()
    assert {*re.findall(r'"([\w-]+)', required)} == {*LIBRARIES, "torch"}


def test_json_has_no_values_of_the_environment() -> None:
    machine = change(H200, environment={"NCCL_SOCKET_IFNAME": "a-secret"})
    data = report_data(machine, run_checks(machine))
    assert data["can_train"] and data["machine"]["environment"] == ["NCCL_SOCKET_IFNAME"]
    assert "a-secret" not in str(data)
