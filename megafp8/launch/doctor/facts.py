"""The facts that checks read. Whatever could not be found out is None or empty, never a guess.

Sets of versions that the project was tested with. What is not among them may work, and nobody has seen it.

Finding the facts out. Each probe answers with nothing instead of raising: what is missing is a finding, too.
"""

from __future__ import annotations

import contextlib
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
from pathlib import Path
from typing import IO, Any, Optional

from megafp8.device.capability import has_torch_part
from megafp8.utils.files import UnreadableFile
from megafp8.utils.strict_json import parse_json


@dataclass(frozen=True, kw_only=True)
class InstalledGpu:
    """One GPU as the driver or torch sees it."""

    name: str
    memory_bytes: int
    compute_capability: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One machine.

    Attributes:
        packages: versions of the installed distributions, by their names in lower case with dashes.
        import_errors: what importing a module gave, None where it worked. A module that was not tried is not there.
        slow_imports: the module whose import was given up, with the seconds that it had; `CUDA` for torch's first use
            of the driver. Those after it were not tried.
        load_per_core: of the machine when an import was given up.
        has_other_apex: whether `apex` is installed and not NVIDIA's.
        has_te_torch_part: whether Transformer Engine's extension for torch lies where it belongs.
        driver: version of NVIDIA's driver.
        driver_error: what nvidia-smi did instead of an answer; None where it answered, or is not there.
        driver_gpus: GPUs that the driver shows.
        gpus: GPUs that torch can use.
        cuda_error: why torch can use none.
        torch_cuda: CUDA version that torch was built for; None for a build without.
        cudnn_version: of the library that torch loaded, as 91900.
        wheel_cudnn: folder of the cuDNN that came with torch.
        found_cudnn: folder of the unversioned libcudnn.so that Transformer Engine finds first, and what led there.
        loaded_cudnn: folders that cuDNN was loaded from once everything was imported.
        links: connections between the GPUs by `nvidia-smi topo`: NV18, PIX, SYS.
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
    nccl_version: Optional[str] = None
    cudnn_version: Optional[int] = None
    cuda_error: Optional[str] = None
    driver: Optional[str] = None
    driver_error: Optional[str] = None
    driver_gpus: tuple[str, ...] = ()
    gpus: tuple[InstalledGpu, ...] = ()
    links: tuple[str, ...] = ()
    wheel_cudnn: Optional[str] = None
    found_cudnn: Optional[tuple[str, str]] = None
    loaded_cudnn: tuple[str, ...] = ()
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
        """Of torch's CUDA."""
        return int(self.torch_cuda.split(".")[0]) if self.torch_cuda else None

    @property
    def has_gpu(self) -> bool:
        """Whether anything knows of a GPU, also one that torch cannot use."""
        return bool(self.gpus or self.driver or self.driver_error)

    def works(self, module: str) -> bool:
        """Whether a module was imported."""
        return self.import_errors.get(module, "not tried") is None


MEGATRON_CORE = "0.16.1"
PYTHON_FROM, PYTHON_BELOW = (3, 10), (3, 13)
TORCH_FROM = (2, 6)


@dataclass(frozen=True, kw_only=True)
class TestedSet:
    """Versions that ran together.

    Attributes:
        packages: version or beginning of a version (`2.11`) of each.
    """

    name: str
    pythons: tuple[tuple[int, int], ...]
    packages: Mapping[str, str]

    __test__ = False  # no test class, whatever its name begins with


CPU = TestedSet(
    name="CPU (continuous integration)",
    pythons=((3, 11),),
    packages={"torch": "2.13", "megatron-core": MEGATRON_CORE},
)
H200 = TestedSet(
    name="H200, driver 580.159, CUDA 13.0, cuDNN 9.19",
    pythons=((3, 12),),
    packages={"torch": "2.11", "megatron-core": MEGATRON_CORE, "transformer-engine": "2.20.2", "triton": "3.6"},
)
MINIMUM_DRIVER = {12: 525, 13: 580}
"""NVIDIA driver that a CUDA major version needs. Source: CUDA Toolkit release notes, minor version compatibility."""
CHILD = Path(__file__).with_name("import_check.py")
IMPORT_SECONDS = 120
COMMAND_SECONDS = 60
KILL_SECONDS = 1
DISK_BYTES = 64 * 2**20
ENVIRONMENT = re.compile(r"(NVTE|NCCL|CUDA|CUDNN|TORCH|TRITON|LD_LIBRARY)_?")
CUDNN_VARIABLES = ("CUDNN_HOME", "CUDNN_PATH", "CUDA_HOME", "CUDA_PATH")
USUAL_CUDA = "/usr/local/cuda"


def find_machine(folder: str) -> Machine:
    """This machine; disk figures are those of `folder`."""
    packages = installed_packages()
    facts = import_facts(modules_to_try(packages))
    facts["gpus"] = tuple(
        InstalledGpu(
            name=gpu["name"], memory_bytes=gpu["memory_bytes"], compute_capability=tuple(gpu["compute_capability"])
        )
        for gpu in facts.get("gpus", ())
    )
    facts["loaded_cudnn"] = tuple(facts.get("loaded_cudnn", ()))
    driver, driver_gpus, driver_error = driver_facts()
    return Machine(
        python=sys.version_info[:3],
        packages=packages,
        has_te_torch_part="transformer-engine" in packages and has_torch_part(),
        has_other_apex="apex" in packages and not has_nvidias_apex(),
        driver=driver,
        driver_error=driver_error,
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
    ended = run([sys.executable, *flags, str(CHILD), *modules], IMPORT_SECONDS)
    return read_facts(ended.output.splitlines(), ended.status)


def read_facts(lines: Sequence[str], status: Optional[int]) -> dict[str, Any]:
    """The child's lines. A module that was begun and has no result ended the process, or took too long.

    Args:
        status: the exit status of the process; None where its time was over.
    """
    errors: dict[str, Optional[str]] = {}
    facts: dict[str, Any] = {}
    begun = None
    for line in lines:
        try:
            told = parse_json(line)
        except UnreadableFile:
            continue  # a library's own print
        if not isinstance(told, dict):
            continue
        if "begin" in told:
            begun = told["begin"]
        elif "module" in told:
            begun, errors[told["module"]] = None, told["error"]
        else:
            facts |= told
    if begun is not None and status is None:
        facts["slow_imports"] = {begun: IMPORT_SECONDS}
        facts["load_per_core"] = os.getloadavg()[0] / (os.cpu_count() or 1)
    elif begun is not None:
        errors[begun] = f"the process ended with status {status}"
    if cuda_error := errors.pop("CUDA", None):
        facts["cuda_error"] = cuda_error
    return facts | {"import_errors": errors}


@dataclass(frozen=True)
class Ended:
    """How a process ended.

    Attributes:
        status: its exit status; None where its time was over.
        output: what it wrote to standard output.
        errors: to standard error.
    """

    status: Optional[int]
    output: str
    errors: str


def run(command: Sequence[str], seconds: float) -> Ended:
    """Run a command for so long at most.

    Its output goes to memory: a process that it leaves behind must not keep a pipe open, and no disk may be full.

    Raises:
        OSError: it cannot be started.
    """
    with memory_file() as output, memory_file() as errors:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, cwd="/")
        status: Optional[int] = None
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # one that waits in a driver may not end at all
                process.wait(KILL_SECONDS)
        texts = [(file.seek(0), file.read().decode(errors="replace"))[1] for file in (output, errors)]
    return Ended(status, *texts)


def memory_file() -> IO[bytes]:
    """A file in memory where the system has them."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("doctor"), "w+b")
    return tempfile.TemporaryFile()


def output_of(*command: str) -> Optional[str]:
    """What a command prints; None where it is not there or fails."""
    return answer_of(*command)[0]


def answer_of(*command: str) -> tuple[Optional[str], Optional[str]]:
    """(what a command prints, what it did instead); neither where there is no such command."""
    try:
        ended = run(command, COMMAND_SECONDS)
    except FileNotFoundError:
        return None, None
    except OSError as error:
        return None, f"{command[0]} cannot be started: {error.strerror}"
    if ended.status is None:
        return None, f"{command[0]} did not answer in {COMMAND_SECONDS:g} s"
    if ended.status != 0:
        said = next(filter(None, map(str.strip, (ended.output + "\n" + ended.errors).splitlines())), "no word")
        return None, f"{command[0]} ended with status {ended.status}: {said}"
    return ended.output, None


def driver_facts() -> tuple[Optional[str], tuple[str, ...], Optional[str]]:
    """(driver's version, names of the GPUs, what nvidia-smi did instead of an answer) by nvidia-smi."""
    text, error = answer_of("nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader")
    rows = [line.split(", ", 1) for line in (text or "").splitlines() if ", " in line]
    return (rows[0][0] if rows else None), tuple(name for _, name in rows), error


def has_nvidias_apex() -> bool:
    """Whether `apex` is NVIDIA's, and not the toolkit for Pyramid that PyPI has by the name."""
    package = importlib.util.find_spec("apex")
    folders = package.submodule_search_locations if package is not None else None
    return any((Path(folder) / "multi_tensor_apply").is_dir() for folder in folders or ())


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
