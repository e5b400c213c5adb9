"""The doctor's facts about a machine, and how to find them.

Functions that find facts return None or nothing instead of raising, because what is missing becomes a result.
"""

from __future__ import annotations

import contextlib
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
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import IO, Any, Optional

from megafp8.device.capability import has_te_torch_extension
from megafp8.utils.files import UnreadableFile
from megafp8.utils.strict_json import parse_json


@dataclass(frozen=True, kw_only=True)
class InstalledGpu:
    """A GPU that torch can use."""

    name: str
    memory_bytes: int
    compute_capability: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Facts about a machine. What could not be found out is None or empty.

    Attributes:
        packages: versions of the installed distributions, by normalized name.
        import_errors: error of each module that was imported, None if the import worked. Others are missing.
        slow_imports: the module whose import timed out, with the timeout in seconds; `CUDA` for torch's first use of
            the driver. Later modules were not tried.
        load_per_core: load of the machine when an import timed out.
        has_other_apex: whether `apex` is installed but is not NVIDIA's.
        has_te_torch_part: whether Transformer Engine's extension module for torch exists.
        driver: version of NVIDIA's driver.
        driver_error: why nvidia-smi failed; None if it worked or does not exist.
        driver_gpus: names of the GPUs according to the driver.
        gpus: GPUs that torch can use.
        cuda_error: why torch can use none.
        torch_cuda: CUDA version that torch was built for; None for a build without CUDA.
        cudnn_version: version of the cuDNN that torch loaded, such as 91900.
        wheel_cudnn: folder of the cuDNN that was installed with torch.
        found_cudnn: folder of the unversioned libcudnn.so that Transformer Engine finds first, and where this comes
            from.
        loaded: folders of each CUDA library that is loaded after all imports, by the library's name.
        library_versions: of the loaded CUDA libraries and the driver, by name (`device/cuda_libraries.py`).
        torch_wheels: the versions of NVIDIA's wheels that torch requires, by package.
        today: the date, as 2026-11-30.
        links: kinds of connections between the GPUs according to `nvidia-smi topo`, such as NV18, PIX or SYS.
    """

    python: tuple[int, int, int]
    packages: Mapping[str, str] = field(default_factory=dict)
    import_errors: Mapping[str, Optional[str]] = field(default_factory=dict)
    slow_imports: Mapping[str, float] = field(default_factory=dict)
    load_per_core: Optional[float] = None
    has_other_apex: bool = False
    has_te_torch_part: bool = False
    torch_version: Optional[str] = None
    torch_cuda: Optional[str] = None
    cudnn_version: Optional[int] = None
    cuda_error: Optional[str] = None
    driver: Optional[str] = None
    driver_error: Optional[str] = None
    driver_gpus: tuple[str, ...] = ()
    gpus: tuple[InstalledGpu, ...] = ()
    links: tuple[str, ...] = ()
    today: Optional[str] = None
    wheel_cudnn: Optional[str] = None
    found_cudnn: Optional[tuple[str, str]] = None
    loaded: Mapping[str, Sequence[str]] = field(default_factory=dict)
    library_versions: Mapping[str, Optional[str]] = field(default_factory=dict)
    torch_wheels: Mapping[str, str] = field(default_factory=dict)
    compiler: Optional[str] = None
    has_python_headers: bool = False
    shared_memory_bytes: Optional[int] = None
    open_files: Optional[int] = None
    folder: str = "."
    disk_free_bytes: Optional[int] = None
    disk_bytes_per_s: Optional[float] = None
    disk_error: Optional[str] = None
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def cuda_major(self) -> Optional[int]:
        """Major version of torch's CUDA."""
        return int(self.torch_cuda.split(".")[0]) if self.torch_cuda else None

    @property
    def cudnn(self) -> Optional[str]:
        """The version of cuDNN that torch loaded, such as 9.19.0."""
        number = self.cudnn_version
        return f"{number // 10000}.{number // 100 % 100}.{number % 100}" if number else None

    @property
    def has_gpu(self) -> bool:
        """Whether there is any sign of a GPU, even if torch cannot use it."""
        return bool(self.gpus or self.driver or self.driver_error)

    def works(self, module: str) -> bool:
        """Whether a module was imported successfully."""
        return self.import_errors.get(module, "not tried") is None


MINIMUM_DRIVER = {12: 525, 13: 580}
"""Minimum driver by CUDA major version. Source: CUDA Toolkit release notes, minor version compatibility."""
IMPORT_CHECK = Path(__file__).with_name("import_check.py")
IMPORT_TIMEOUT_S = 120
NO_TRITON = "ModuleNotFoundError: No module named 'triton'"
COMMAND_TIMEOUT_S = 60
KILL_TIMEOUT_S = 1
DISK_TEST_BYTES = 64 * 2**20
ENVIRONMENT_PATTERN = re.compile(r"(NVTE|NCCL|CUDA|CUDNN|TORCH|TRITON|LD_LIBRARY)_?")
CUDNN_VARIABLES = ("CUDNN_HOME", "CUDNN_PATH", "CUDA_HOME", "CUDA_PATH")
DEFAULT_CUDA_FOLDER = "/usr/local/cuda"


def find_machine(folder: str) -> Machine:
    """Find the facts about this machine, with the disk of `folder`."""
    packages = installed_packages()
    facts = import_facts(modules_to_try(packages))
    facts["gpus"] = tuple(
        InstalledGpu(**gpu | {"compute_capability": tuple(gpu["compute_capability"])}) for gpu in facts.get("gpus", ())
    )
    driver, driver_gpus, driver_error = driver_facts()
    return Machine(
        python=sys.version_info[:3],
        packages=packages,
        today=date.today().isoformat(),
        has_te_torch_part="transformer-engine" in packages and has_te_torch_extension(),
        has_other_apex="apex" in packages and not has_nvidias_apex(),
        driver=driver,
        driver_error=driver_error,
        driver_gpus=driver_gpus,
        links=gpu_links() if len(driver_gpus) > 1 else (),
        wheel_cudnn=wheel_cudnn(),
        torch_wheels=wheels_required_by("torch"),
        found_cudnn=find_cudnn(os.environ),
        compiler=compiler(os.environ),
        has_python_headers=(Path(sysconfig.get_paths()["include"]) / "Python.h").exists(),
        shared_memory_bytes=shared_memory_bytes(),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        folder=folder,
        **disk_facts(folder),
        environment={name: value for name, value in os.environ.items() if ENVIRONMENT_PATTERN.match(name)},
        **facts,
    )


def installed_packages() -> dict[str, str]:
    """Versions of the installed distributions by normalized name, without those whose metadata is broken."""
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        try:
            name, version = distribution.metadata["Name"], distribution.version
        except FileNotFoundError:  # raised by the importlib_metadata backport, if something has imported it
            continue
        if name and version:
            # The first one on the path is imported.
            found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), version)
    return found


def wheels_required_by(package: str, extras: Sequence[str] = ()) -> dict[str, str]:
    """The versions of NVIDIA's wheels that an installed package requires, also by way of extras of `cuda-toolkit`."""
    wheels: dict[str, str] = {}
    try:
        requirements = importlib.metadata.requires(package) or []
    except importlib.metadata.PackageNotFoundError:
        return wheels
    for requirement in requirements:
        pin = re.match(r"(nvidia-[\w-]+|cuda-toolkit)(?:\[([^]]*)])?\s*==\s*([\d.]*\d)", requirement)
        extra = re.search(r"extra == ['\"]([\w-]+)", requirement)
        if pin is None or (extra is not None and extra[1] not in extras):
            continue
        if pin[1] == "cuda-toolkit":
            wheels |= wheels_required_by("cuda-toolkit", (pin[2] or "").split(","))
        else:
            wheels[pin[1]] = pin[3]
    return wheels


def modules_to_try(packages: Mapping[str, str]) -> list[str]:
    """The modules that training imports. torch comes first, because the others need it."""
    modules = ["torch", "numpy", "megatron.core"]
    if "transformer-engine" in packages:
        modules.append("transformer_engine.pytorch")
    return modules


def import_facts(modules: Sequence[str]) -> dict[str, Any]:
    """Facts from importing modules in another process."""
    flags = ["-S"] if sys.flags.no_site else []
    status, output, _ = run_command([sys.executable, *flags, str(IMPORT_CHECK), *modules], IMPORT_TIMEOUT_S)
    return read_facts(output.splitlines(), status)


def read_facts(lines: Sequence[str], status: Optional[int]) -> dict[str, Any]:
    """Facts from the output of the import check. A module without a result ended the process, or timed out.

    Args:
        status: exit status of the process; None if it timed out.
    """
    errors: dict[str, Optional[str]] = {}
    facts: dict[str, Any] = {}
    pending = None
    for line in lines:
        try:
            report = parse_json(line)
        except UnreadableFile:
            continue  # printed by a library
        if not isinstance(report, dict):
            continue
        if "begin" in report:
            pending = report["begin"]
        elif "module" in report:
            pending, errors[report["module"]] = None, report["error"]
        else:
            facts |= report
    if pending is not None and status is None:
        facts["slow_imports"] = {pending: IMPORT_TIMEOUT_S}
        facts["load_per_core"] = os.getloadavg()[0] / (os.cpu_count() or 1)
    elif pending is not None:
        errors[pending] = f"the process exited with status {status}"
    if errors.get("megatron.core") == NO_TRITON and not facts.get("gpus"):
        errors["megatron.core"] = None  # without a GPU, megafp8 does without this import (`mcore/cpu_patches.py`)
    if cuda_error := errors.pop("CUDA", None):
        facts["cuda_error"] = cuda_error
    return facts | {"import_errors": errors}


def run_command(command: Sequence[str], seconds: float) -> tuple[Optional[int], str, str]:
    """Run a command with a timeout.

    Its output goes to files in memory. A pipe could be kept open by a process that it leaves behind, and a disk may be
    full.

    Returns:
        Exit status, None if it timed out; standard output; standard error.

    Raises:
        OSError: the command cannot be started.
    """
    with memory_file() as output, memory_file() as errors:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, cwd="/")
        status: Optional[int] = None
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # a process that waits in a driver may not end
                process.wait(KILL_TIMEOUT_S)
        for file in (output, errors):
            file.seek(0)
        return status, output.read().decode(errors="replace"), errors.read().decode(errors="replace")


def memory_file() -> IO[bytes]:
    """A file in memory."""
    return os.fdopen(os.memfd_create("doctor"), "w+b")


def command_output(*command: str) -> Optional[str]:
    """The output of a command; None if it does not exist or fails."""
    return query_command(*command)[0]


def query_command(*command: str) -> tuple[Optional[str], Optional[str]]:
    """Output of a command, or else its failure; neither if the command does not exist."""
    try:
        status, output, errors = run_command(command, COMMAND_TIMEOUT_S)
    except FileNotFoundError:
        return None, None
    except OSError as error:
        return None, f"{command[0]} cannot be started: {error.strerror}"
    if status is None:
        return None, f"{command[0]} did not finish within {COMMAND_TIMEOUT_S:g} s"
    if status != 0:
        line = next(filter(None, map(str.strip, f"{output}\n{errors}".splitlines())), "no word")
        return None, f"{command[0]} exited with status {status}: {line}"
    return output, None


def driver_facts() -> tuple[Optional[str], tuple[str, ...], Optional[str]]:
    """Driver version, names of the GPUs, and the failure of nvidia-smi."""
    text, error = query_command("nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader")
    rows = [line.split(", ", 1) for line in (text or "").splitlines() if ", " in line]
    return (rows[0][0] if rows else None), tuple(name for _, name in rows), error


def has_nvidias_apex() -> bool:
    """Whether `apex` is NVIDIA's, and not PyPI's package of that name."""
    package = importlib.util.find_spec("apex")
    folders = package.submodule_search_locations if package is not None else None
    return any((Path(folder) / "multi_tensor_apply").is_dir() for folder in folders or ())


def gpu_links() -> tuple[str, ...]:
    """Distinct kinds of connections between GPUs in `nvidia-smi topo -m`."""
    rows = [line.split() for line in (command_output("nvidia-smi", "topo", "-m") or "").splitlines()]
    gpus = [row for row in rows if len(row) > 1 and re.fullmatch(r"GPU\d+", row[0]) and "X" in row]
    return tuple(sorted({entry for row in gpus for entry in row[1 : len(gpus) + 1]} - {"X"}))


def wheel_cudnn() -> Optional[str]:
    """Folder of the cuDNN that was installed as a wheel."""
    for entry in sys.path:
        folder = Path(entry) / "nvidia" / "cudnn"
        if next((folder / "lib").glob("libcudnn.so*"), None):
            return str(folder.resolve())
    return None


def find_cudnn(environment: Mapping[str, str]) -> Optional[tuple[str, str]]:
    """Folder of the libcudnn that Transformer Engine loads, and where this comes from; None if it loads the wheel's.

    Follows the order of Transformer Engine 2.20's `common/__init__.py`: folders in the environment, the default CUDA
    folder, then what the loader finds for the unversioned name, which the wheel does not have.
    """
    named = [(variable, environment[variable]) for variable in CUDNN_VARIABLES if environment.get(variable)]
    for origin, home in [*named, ("the default CUDA folder", DEFAULT_CUDA_FOLDER)]:
        libraries = [path for path in Path(home).glob("**/libcudnn.so*") if "stub" not in str(path)]
        if libraries:
            return str(max(libraries, key=lambda path: path.name).parent.resolve()), origin
    for folder in filter(None, environment.get("LD_LIBRARY_PATH", "").split(os.pathsep)):
        if (Path(folder) / "libcudnn.so").exists():
            return str(Path(folder).resolve()), "LD_LIBRARY_PATH"
    for line in (command_output("ldconfig", "-p") or command_output("/sbin/ldconfig", "-p") or "").splitlines():
        name, _, path = line.strip().partition(" => ")
        if name.startswith("libcudnn.so "):
            return str(Path(path).parent.resolve()), "the loader's cache"
    return None


def compiler(environment: Mapping[str, str]) -> Optional[str]:
    """The C compiler that Triton uses."""
    named = environment.get("CC")
    return shutil.which(named) if named else next(filter(None, map(shutil.which, ("gcc", "clang", "cc"))), None)


def shared_memory_bytes() -> Optional[int]:
    """Size of /dev/shm; None if it does not exist."""
    try:
        return shutil.disk_usage("/dev/shm").total
    except OSError:
        return None


def disk_facts(folder: str) -> dict[str, Any]:
    """Free bytes of a folder, and the speed of writing and syncing a file of 64 MiB there. The file is deleted."""
    try:
        free = shutil.disk_usage(folder).free
        if free < 2 * DISK_TEST_BYTES:
            return {"disk_free_bytes": free}
        block = os.urandom(2**20)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
            start = time.perf_counter()
            for _ in range(DISK_TEST_BYTES // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            seconds = time.perf_counter() - start
    except OSError as error:
        return {"disk_error": f"{error.strerror or error}"}
    return {"disk_free_bytes": free, "disk_bytes_per_s": DISK_TEST_BYTES / seconds}
