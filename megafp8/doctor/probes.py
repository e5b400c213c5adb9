"""Finding the facts out. Each probe answers with nothing instead of raising: what is missing is a finding, too."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

from megafp8.device.capability import has_torch_part
from megafp8.doctor.machine import Gpu, Machine
from megafp8.utils.small_files import UnreadableFile
from megafp8.utils.strict_json import parse_json

CHILD = Path(__file__).with_name("child.py")
IMPORT_SECONDS = 120
COMMAND_SECONDS = 20
DISK_BYTES = 64 * 2**20
ENVIRONMENT = re.compile(r"(NVTE|NCCL|CUDA|CUDNN|TORCH|TRITON|LD_LIBRARY)_?")
CUDNN_VARIABLES = ("CUDNN_HOME", "CUDNN_PATH", "CUDA_HOME", "CUDA_PATH")
USUAL_CUDA = "/usr/local/cuda"


def find_machine(folder: str) -> Machine:
    """This machine; disk figures are those of `folder`."""
    packages = installed_packages()
    facts = import_facts(modules_to_try(packages))
    facts["gpus"] = tuple(
        Gpu(name=gpu["name"], memory_bytes=gpu["memory_bytes"], compute_capability=tuple(gpu["compute_capability"]))
        for gpu in facts.get("gpus", ())
    )
    facts["loaded_cudnn"] = tuple(facts.get("loaded_cudnn", ()))
    driver, driver_gpus = driver_facts()
    return Machine(
        python=sys.version_info[:3],
        packages=packages,
        has_te_torch_part="transformer-engine" in packages and has_torch_part(),
        driver=driver,
        driver_gpus=driver_gpus,
        links=gpu_links() if len(driver_gpus) > 1 else (),
        wheel_cudnn=wheel_cudnn(),
        found_cudnn=find_cudnn(os.environ),
        compiler=compiler(os.environ),
        has_python_headers=(Path(sysconfig.get_paths()["include"]) / "Python.h").exists(),
        shared_memory_bytes=shared_memory_bytes(),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        folder=folder,
        **disk_facts(folder),
        environment={name: value for name, value in os.environ.items() if ENVIRONMENT.match(name)},
        **facts,
    )


def installed_packages() -> dict[str, str]:
    """Versions by normalized name. A distribution with broken metadata is left out."""
    found = {}
    for distribution in importlib.metadata.distributions():
        try:
            name, version = distribution.metadata["Name"], distribution.version
        except FileNotFoundError:  # of the backport of importlib.metadata, where something has imported it
            continue
        if name and version:
            # The first one on the path is the one that is imported.
            found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), version)
    return found


def modules_to_try(packages: Mapping[str, str]) -> list[str]:
    """What training imports. torch first: the others need it, and it says most."""
    modules = ["torch", "numpy", "megatron.core"]
    if "transformer-engine" in packages:
        modules.append("transformer_engine.pytorch")
    return modules


def import_facts(modules: Sequence[str]) -> dict[str, Any]:
    """Facts that importing gives, from another process."""
    flags = ["-S"] if sys.flags.no_site else []
    command = [sys.executable, *flags, str(CHILD), *modules]
    # Its output goes to files: a process that the libraries leave behind must not keep a pipe open.
    with tempfile.TemporaryFile("w+") as told, tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, stdout=told, stderr=said, cwd=tempfile.gettempdir())
        try:
            ended = f"the process ended with status {process.wait(IMPORT_SECONDS)}"
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            ended = f"not done after {IMPORT_SECONDS} s"
        told.seek(0)
        return read_facts(told.read().splitlines(), ended)


def read_facts(lines: Sequence[str], ended: str) -> dict[str, Any]:
    """The child's lines. A module that was begun and has no result ended the process.

    Args:
        ended: how the process ended, for such a module.
    """
    errors: dict[str, Optional[str]] = {}
    facts: dict[str, Any] = {}
    for line in lines:
        try:
            told = parse_json(line)
        except UnreadableFile:
            continue  # a library's own print
        if not isinstance(told, dict):
            continue
        if "begin" in told:
            errors[told["begin"]] = ended
        elif "module" in told:
            errors[told["module"]] = told["error"]
        else:
            facts |= told
    return facts | {"import_errors": errors}


def output_of(*command: str) -> Optional[str]:
    """What a command prints; None where it is not there or fails."""
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ended.stdout if ended.returncode == 0 else None


def driver_facts() -> tuple[Optional[str], tuple[str, ...]]:
    """(driver's version, names of the GPUs) by nvidia-smi."""
    text = output_of("nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader")
    rows = [line.split(", ", 1) for line in (text or "").splitlines() if ", " in line]
    return (rows[0][0] if rows else None), tuple(name for _, name in rows)


def gpu_links() -> tuple[str, ...]:
    """Distinct entries between GPUs in `nvidia-smi topo -m`."""
    rows = [line.split() for line in (output_of("nvidia-smi", "topo", "-m") or "").splitlines()]
    gpus = [row for row in rows if len(row) > 1 and re.fullmatch(r"GPU\d+", row[0]) and "X" in row]
    return tuple(sorted({entry for row in gpus for entry in row[1 : len(gpus) + 1]} - {"X"}))


def wheel_cudnn() -> Optional[str]:
    """Folder of the cuDNN wheel beside torch."""
    for place in sys.path:
        folder = Path(place) / "nvidia" / "cudnn"
        if next((folder / "lib").glob("libcudnn.so*"), None):
            return str(folder.resolve())
    return None


def find_cudnn(environment: Mapping[str, str]) -> Optional[tuple[str, str]]:
    """(folder, what led there) of the libcudnn that Transformer Engine loads; None where it takes the wheel's.

    The order of its `common/__init__.py`, release 2.20: folders that the environment names, the usual CUDA folder, then
    what the loader finds for the unversioned name (which the wheel does not have).
    """
    named = [(variable, environment[variable]) for variable in CUDNN_VARIABLES if environment.get(variable)]
    for origin, home in [*named, ("the usual folder of CUDA", USUAL_CUDA)]:
        libraries = [path for path in Path(home).glob("**/libcudnn.so*") if "stub" not in str(path)]
        if libraries:
            return str(max(libraries, key=lambda path: path.name).parent.resolve()), origin
    for folder in filter(None, environment.get("LD_LIBRARY_PATH", "").split(os.pathsep)):
        if (Path(folder) / "libcudnn.so").exists():
            return str(Path(folder).resolve()), "LD_LIBRARY_PATH"
    for line in (output_of("ldconfig", "-p") or output_of("/sbin/ldconfig", "-p") or "").splitlines():
        name, _, path = line.strip().partition(" => ")
        if name.startswith("libcudnn.so "):
            return str(Path(path).parent.resolve()), "the loader's cache"
    return None


def compiler(environment: Mapping[str, str]) -> Optional[str]:
    """The C compiler that Triton takes."""
    named = environment.get("CC")
    return shutil.which(named) if named else next(filter(None, map(shutil.which, ("gcc", "clang", "cc"))), None)


def shared_memory_bytes() -> Optional[int]:
    """Size of /dev/shm."""
    try:
        return shutil.disk_usage("/dev/shm").total
    except OSError:
        return None


def disk_facts(folder: str) -> dict[str, Any]:
    """Free bytes, and how fast a file of 64 MiB becomes durable in the folder; the file is deleted."""
    try:
        free = shutil.disk_usage(folder).free
        if free < 2 * DISK_BYTES:
            return {"disk_free_bytes": free}
        block = os.urandom(2**20)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
            start = time.perf_counter()
            for _ in range(DISK_BYTES // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            seconds = time.perf_counter() - start
    except OSError as error:
        return {"disk_error": f"{error.strerror or error}"}
    return {"disk_free_bytes": free, "disk_bytes_per_s": DISK_BYTES / seconds}
