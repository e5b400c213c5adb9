"""The doctor's checks: one function per check, from the facts of a machine to results."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from typing import Optional

from megafp8.device.capability import Target
from megafp8.device.layer_support import ATTENTION_SWITCHES
from megafp8.launch.doctor import facts, versions
from megafp8.launch.doctor.facts import Machine
from megafp8.launch.doctor.versions import TestedSet, dotted, matches_version, version_numbers
from megafp8.recipes import registry
from megafp8.utils.installation import transformer_engine_command

LIBRARIES = (
    "numpy", "psutil", "pydantic", "pyyaml", "sentencepiece", "tensorboard", "matplotlib", "scipy", "jinja2", "tqdm",
    "packaging", "argcomplete", "google-crc32c",
)  # fmt: skip
OPTIONAL_LIBRARIES = ("obstore",)  # object storage
MIN_SHARED_MEMORY_BYTES = 2**30
MIN_OPEN_FILES = 4096
MIN_FREE_BYTES, FULL_BYTES = 20 * 2**30, 2**30
MIN_DISK_BYTES_PER_S = 50e6
MB, GIB = 1e6, 2**30
DRIVER_FIX = (
    "for the reason: dmesg | grep -i nvrm; restart the machine or reinstall the driver (no GPU: remove nvidia-smi)"
)


OK, WARNING, ERROR = "ok", "warning", "error"
"""Error: training cannot run, or not as this machine should. Warning: it runs, but slower or untested."""


@dataclass(frozen=True)
class DoctorResult:
    """The result of a check.

    Attributes:
        fix: how to fix it, preferably as a command; None if nothing is wrong.
        check: name of the check; `run_checks` sets it.
    """

    level: str
    text: str
    fix: Optional[str] = None
    check: str = ""


ok, warning, error = (partial(DoctorResult, level) for level in (OK, WARNING, ERROR))


# ---- failed and slow imports --------------------------------------------------------------------------------------


DRIVER_LIBRARY = re.compile(r"lib(cuda|nvidia-[\w-]+)\.so")
WRONG_ABI = re.compile(r"undefined symbol|symbol lookup error")
NO_MEMORY = re.compile(r"MemoryError|Cannot allocate memory|exited with status -9\b")
DRIVER_LIBRARY_FIX = "install the NVIDIA driver (in a container: docker run --gpus all), or a CPU build of torch"
MEMORY_FIX = (
    "free memory, or raise the container's limit; dmesg | grep -i oom lists the processes that the kernel killed"
)

ABI_FIX = "pip install --force-reinstall --no-deps --no-cache-dir --no-build-isolation"
TE_PARTS = re.compile(r"transformer-engine-(cu\d+|torch)$")


def import_problem(machine: Machine, module: str, version: str, reinstall: str) -> Optional[DoctorResult]:
    """The result of a failed or slow import; None if the import worked or was not tried.

    Args:
        reinstall: the command that reinstalls the library. Failures of the driver or of memory get another fix.
    """
    if module in machine.slow_imports:
        return warning(
            f"{version} was not imported {timeout_text(machine, module)}: unknown whether it works",
            "run the doctor again on an idle machine; to profile the import: "
            f"python -X importtime -c 'import {module}'",
        )  # fmt: skip
    failure = machine.import_errors.get(module)
    if failure is None:
        return None
    fix = reinstall
    if DRIVER_LIBRARY.search(failure):
        fix = DRIVER_LIBRARY_FIX
    elif NO_MEMORY.search(failure):
        fix = MEMORY_FIX
    elif WRONG_ABI.search(failure) and module.startswith("transformer_engine"):
        fix = f"{ABI_FIX} transformer-engine-torch=={version}  # it was compiled for another torch"
    return error(f"{version} cannot be imported: {failure}", fix)


def needs_torch(machine: Machine, module: str, version: str, reinstall: str) -> Optional[DoctorResult]:
    """`import_problem` of a library that imports torch: if that is broken, the check of torch alone reports it."""
    return import_problem(machine, module, version, reinstall) if machine.works("torch") else None


def timeout_text(machine: Machine, module: str) -> str:
    """The time limit of an import and the load, such as `within 120 s (load of 5.1 a core)`."""
    load = "" if machine.load_per_core is None else f" (load {machine.load_per_core:.1f} per core)"
    return f"within {machine.slow_imports[module]:g} s{load}"


# ---- libraries ----------------------------------------------------------------------------------------------------


def python(machine: Machine) -> Iterator[DoctorResult]:
    """A supported version of Python."""
    version = dotted(machine.python)
    if not versions.PYTHON_FROM <= machine.python[:2] < versions.PYTHON_BELOW:
        fix = "install Python 3.11 or 3.12 (docs/install.md)"
        yield error(f"{version}: megafp8 needs {versions.PYTHONS}", fix)
    elif (3, 11) <= machine.python < (3, 11, 4):
        yield warning(
            f"{version}: Python 3.11.0 to 3.11.3 pickle enum members as calls of getattr. megafp8 reads such "
            "checkpoints; other safe loaders may refuse them", "install Python 3.11.4 or newer",
        )  # fmt: skip
    else:
        yield ok(version)


def torch(machine: Machine) -> Iterator[DoctorResult]:
    """torch is installed, can be imported and is recent enough."""
    version = machine.torch_version or machine.packages.get("torch")
    if version is None:
        yield error("is not installed", "pip install -c constraints.txt torch")
    elif problem := import_problem(machine, "torch", version, "pip install --force-reinstall torch"):
        yield problem
    elif version_numbers(version) < versions.TORCH_FROM:
        least = dotted(versions.TORCH_FROM)
        yield error(f"{version} is older than {least}", f"pip install --upgrade 'torch>={least}'")
    else:
        yield ok(version + (f", CUDA {machine.torch_cuda}" if machine.torch_cuda else ", built without CUDA"))


def megatron_core(machine: Machine) -> Iterator[DoctorResult]:
    """megatron-core is installed, in a version that the project's patches are written for."""
    version = machine.packages.get("megatron-core")
    fix = f"pip install 'megatron-core=={versions.megatron_core_for(machine.python)}'"
    if version is None:
        yield error("is not installed", fix)
    elif not any(matches_version(version, each) for each in versions.MEGATRON_CORE_VERSIONS):
        supported = " and ".join(versions.MEGATRON_CORE_VERSIONS)
        yield error(f"{version}: supported versions are {supported}", fix)
    elif problem := needs_torch(machine, "megatron.core", version, f"fix this error, then: {fix}"):
        yield problem
    else:
        yield ok(version)


def libraries(machine: Machine) -> Iterator[DoctorResult]:
    """The other required libraries are installed."""
    missing = [name for name in LIBRARIES if name not in machine.packages]
    if missing:
        yield error(f"not installed: {', '.join(missing)}", f"pip install {' '.join(missing)}")
    elif problem := import_problem(machine, "numpy", "numpy", "pip install --force-reinstall numpy"):
        yield problem
    else:
        found = [name for name in (*LIBRARIES, *OPTIONAL_LIBRARIES) if name in machine.packages]
        yield ok(", ".join(f"{name} {machine.packages[name]}" for name in found))


def transformer_engine(machine: Machine) -> Iterator[DoctorResult]:
    """Transformer Engine works or is absent. A broken one keeps megatron-core from being imported."""
    version = machine.packages.get("transformer-engine")
    fix = f"{transformer_engine_command(version or '')}, or: pip uninstall transformer-engine"
    parts = {name: machine.packages[name] for name in sorted(machine.packages) if TE_PARTS.match(name)}
    if version is None and machine.has_gpu:
        text = "is not installed: FP8 is emulated, which is slower than BF16"
        yield warning(text, transformer_engine_command())
    elif version is None:
        yield ok("not installed, and not needed without a GPU")
    elif not machine.has_te_torch_part:
        state = "is installed without its torch extension"
        if "transformer-engine-torch" not in machine.packages:
            state = "is the empty meta package, without transformer-engine-torch"
        yield error(f"{version} {state}; megatron-core cannot be imported", fix)
    elif set(parts.values()) - {version}:
        others = ", ".join(f"{name} {part}" for name, part in parts.items() if part != version)
        yield error(f"{version}, but {others}: the parts must have one version", fix)
    elif problem := needs_torch(
        machine, "transformer_engine.pytorch", version, fix.replace("install", "install --force-reinstall --no-deps", 1)
    ):
        yield problem
    else:
        yield ok(version)


def cuda_libraries(machine: Machine) -> Iterator[DoctorResult]:
    """torch, Transformer Engine and NVIDIA's libraries fit together, and each library is loaded once."""
    if machine.cuda_major is None:
        return
    suffix = re.compile(r"^(transformer-engine|nvidia-cudnn|nvidia-nccl)-cu(\d+)$")
    found = {name: int(match[2]) for name in machine.packages if (match := suffix.match(name))}
    others = sorted(name for name, major in found.items() if major != machine.cuda_major)
    text = f"torch is built for CUDA {machine.torch_cuda}, but {', '.join(others)}"
    fix = f"pip uninstall {' '.join(others)}"
    if any(name.startswith("transformer-engine") for name in others):
        yield error(f"{text} is not", f"{fix} && pip install 'transformer-engine[pytorch]'")
    elif others:
        yield warning(f"{text} is also installed", fix)
    elif twice := {name: folders for name, folders in machine.loaded.items() if len(folders) > 1 and name != "cuDNN"}:
        for name, folders in twice.items():
            yield error(
                f"two copies of {name} are loaded: {', '.join(folders)}",
                f"keep the one that torch brings: unset LD_LIBRARY_PATH, or remove {folders[-1]} from it",
            )  # fmt: skip
    else:
        yield from wheels_torch_was_built_with(machine)


def wheels_torch_was_built_with(machine: Machine) -> Iterator[DoctorResult]:
    """NVIDIA's wheels have the versions that torch's own requirements name: cuBLAS, cuDNN, NCCL, NVSHMEM, ..."""
    differing = {
        name: version for name, version in machine.torch_wheels.items()
        if not matches_version(machine.packages.get(name), version)
    }  # fmt: skip
    if differing:
        listed = ", ".join(f"{name} {machine.packages.get(name, 'missing')} ({differing[name]})" for name in differing)
        yield warning(
            f"not the versions that torch {machine.torch_version} was built with: {listed}",
            "pip install " + " ".join(f"{name}=={version}" for name, version in differing.items()),
        )  # fmt: skip
        return
    loaded = {name: version for name, version in machine.library_versions.items() if version is not None}
    versions_text = "".join(f", {name} {version}" for name, version in loaded.items())
    yield ok(f"all packages are for CUDA {machine.cuda_major}{versions_text}")


def cudnn(machine: Machine) -> Iterator[DoctorResult]:
    """There is only one cuDNN. With two, Transformer Engine may silently fall back to attention that is 30% slower."""
    if machine.cuda_major is None or "transformer-engine" not in machine.packages:
        return
    wheel, found = machine.wheel_cudnn, machine.found_cudnn
    shown = machine.cudnn or "of unknown version"
    fix = f"export CUDNN_HOME={wheel}" if wheel else "unset CUDNN_HOME CUDNN_PATH, and keep one cuDNN"
    loaded = machine.loaded.get("cuDNN", ())
    if len(loaded) > 1:
        yield error(f"two versions are loaded: {', '.join(loaded)}; attention falls back to slower kernels", fix)
    elif wheel and found and not found[0].startswith(wheel):
        yield error(
            f"torch uses {shown} in {wheel}, but Transformer Engine finds another in {found[0]} ({found[1]}): mixed "
            "versions make attention fall back to unfused, 30% slower", fix,
        )  # fmt: skip
    else:
        yield ok(shown + (f" in {wheel}" if wheel else ""))


def differences_from(expected: TestedSet, machine: Machine) -> list[str]:
    """The versions of a machine that are not those of a tested set, as text."""
    differences = [
        f"{name} {machine.packages.get(name, 'missing')} (tested {version})"
        for name, version in expected.packages.items()
        if not matches_version(machine.packages.get(name), version)
    ]
    if machine.python[:2] != expected.python:
        differences.append(f"Python {dotted(machine.python[:2])} (tested {dotted(expected.python)})")
    if machine.cudnn and expected.cudnn and not matches_version(machine.cudnn, expected.cudnn):
        differences.append(f"cuDNN {machine.cudnn} (tested {expected.cudnn})")
    return differences


def tested_set(machine: Machine) -> Iterator[DoctorResult]:
    """The installed versions have been tested together."""
    tested_sets = versions.GPU_TESTED_SETS if machine.has_gpu else versions.CPU_TESTED_SETS
    expected = min(tested_sets, key=lambda each: len(differences_from(each, machine)))
    differences = differences_from(expected, machine)
    if differences:
        constraints = "constraints-gpu.txt" if machine.has_gpu else "constraints.txt"
        fix = f"optional; for the tested versions: pip install -c {constraints} -e . (docs/install.md)"
        yield warning(f"differs from {expected.name}: {', '.join(differences)}", fix)
    else:
        yield ok(expected.name)


def support(machine: Machine) -> Iterator[DoctorResult]:
    """The support of the installed versions does not end soon."""
    if machine.today is None:
        return
    today = date.fromisoformat(machine.today)
    ending = versions.ending_support({**machine.packages, versions.PYTHON: dotted(machine.python)}, today)
    for each in ending:
        assert each.ends is not None
        verb = "ended" if each.ends < today else "ends"
        yield warning(f"{each.package} {each.version}: support {verb} on {each.ends}: {each.reason}", each.fix)
    if not ending:
        yield ok("of no installed version does it end soon")


# ---- GPUs ---------------------------------------------------------------------------------------------------------


def driver(machine: Machine) -> Iterator[DoctorResult]:
    """The driver is recent enough for torch's CUDA, and torch can use all GPUs of the driver."""
    if machine.driver_error is not None:
        usable = f"; torch sees {len(machine.gpus)}" if machine.gpus else ""
        yield (warning if machine.gpus else error)(f"broken driver: {machine.driver_error}{usable}", DRIVER_FIX)
        return
    if "CUDA" in machine.slow_imports:
        start = f"CUDA did not start {timeout_text(machine, 'CUDA')}: unknown whether it works"
        text = f"{gpu_names(machine.driver_gpus)}; {start}"
        yield warning(text, "run the doctor again on an idle machine; nvidia-smi shows the load of the GPUs")
        return
    if not machine.has_gpu:
        yield ok("none: training runs on the CPU, with emulated recipes")
        return
    least = facts.MINIMUM_DRIVER.get(machine.cuda_major or 0)
    if machine.torch_version is not None and machine.torch_cuda is None:
        text = f"{gpu_names(machine.driver_gpus)}, but torch {machine.torch_version} is built without CUDA"
        yield error(text, "pip uninstall torch && pip install -c constraints.txt torch")
    elif machine.driver and least and version_numbers(machine.driver)[0] < least:
        yield error(
            f"driver {machine.driver} is too old for torch's CUDA {machine.torch_cuda}, which needs {least}",
            f"update the NVIDIA driver to {least} or newer, or install a torch for an older CUDA",
        )  # fmt: skip
    elif machine.works("torch") and len(machine.gpus) < len(machine.driver_gpus):
        why = machine.cuda_error or f"CUDA_VISIBLE_DEVICES={machine.environment.get('CUDA_VISIBLE_DEVICES', 'not set')}"
        text = f"the driver has {gpu_names(machine.driver_gpus)}, but torch sees {len(machine.gpus)}: {why}"
        hidden = "CUDA_VISIBLE_DEVICES" in machine.environment and machine.cuda_error is None
        yield (warning if hidden else error)(text, "unset CUDA_VISIBLE_DEVICES" if hidden else "nvidia-smi -q")
    else:
        names = gpu_names(machine.driver_gpus or tuple(gpu.name for gpu in machine.gpus))
        yield ok(names + (f", driver {machine.driver}" if machine.driver else ""))


def links(machine: Machine) -> Iterator[DoctorResult]:
    """The GPUs of this machine are connected by NVLink."""
    if not machine.links:
        return
    slow = [link for link in machine.links if not link.startswith("NV")]
    if slow:
        yield warning(
            f"some GPUs have no NVLink between them ({', '.join(slow)}): tensor parallelism will be slow",
            "use --tensor-model-parallel-size 1, or only within GPUs connected by NV in nvidia-smi topo -m",
        )  # fmt: skip
    else:
        yield ok(f"NVLink ({', '.join(machine.links)})")


def triton(machine: Machine) -> Iterator[DoctorResult]:
    """Triton can compile: it builds a C launcher for each kernel against Python's headers."""
    if not machine.gpus:
        return
    if "triton" not in machine.packages:
        yield error("is not installed", "pip install triton")
    elif machine.compiler is None:
        yield error("cannot find a C compiler", "apt-get install gcc, or export CC=COMPILER")
    elif not machine.has_python_headers:
        yield error("cannot find Python.h", f"apt-get install python{dotted(machine.python[:2])}-dev")
    else:
        yield ok(f"{machine.packages['triton']}, {machine.compiler}")


def apex(machine: Machine) -> Iterator[DoctorResult]:
    """`apex` is NVIDIA's or absent: megatron-core imports it for the output layer's wgrad."""
    version = machine.packages.get("apex", "not installed")
    if machine.has_other_apex:
        pyramid = "the package apex on PyPI is a toolkit for Pyramid, and megatron-core imports it"
        yield warning(f"{version} is not NVIDIA's: {pyramid}", "pip uninstall apex")
    else:
        yield ok(f"{version}; not needed")


def switches(machine: Machine) -> Iterator[DoctorResult]:
    """No environment variable changes Transformer Engine's recipes or its choice of attention."""
    changed = [
        (variable, f"{recipe.name}: {effect}")
        for recipe in registry.recipes()
        for variable, effect in recipe.te_switches
        if machine.environment.get(variable) == "1"
    ]
    for name in ATTENTION_SWITCHES.values():
        if machine.environment.get(name, "1") != "1":
            changed.append((name, "contradicts --attention-backend auto, so that a run with it is refused"))
    for variable, effect in changed:
        value = machine.environment[variable]
        yield warning(f"{variable}={value} ({effect})", f"unset {variable}")
    if not changed:
        yield ok("no variable that changes recipes or attention is set")


# ---- the rest of the machine --------------------------------------------------------------------------------------


def shared_memory(machine: Machine) -> Iterator[DoctorResult]:
    """/dev/shm is large enough for data loader processes and NCCL."""
    size = machine.shared_memory_bytes
    if size is None:
        yield warning("/dev/shm does not exist", "mount -t tmpfs tmpfs /dev/shm, or --num-workers 0")
    elif size < MIN_SHARED_MEMORY_BYTES:
        yield warning(
            f"{size / MB:,.0f} MB: data loader processes and NCCL may run out of shared memory",
            "docker run --shm-size 8g (or --ipc host), or train with --num-workers 0",
        )  # fmt: skip
    else:
        yield ok(f"{size / GIB:,.1f} GiB")


def open_files(machine: Machine) -> Iterator[DoctorResult]:
    """The limit on open files is high enough for shards, data loaders and sockets."""
    limit = machine.open_files
    if limit is not None and 0 <= limit < MIN_OPEN_FILES:
        yield warning(f"at most {limit} per process", "ulimit -n 65536")
    else:
        yield ok("unlimited" if limit is None or limit < 0 else f"{limit:,}")


def disk(machine: Machine) -> Iterator[DoctorResult]:
    """The folder for checkpoints is writable, has free space and is fast enough."""
    if machine.disk_error is not None:
        problem = f"{machine.folder} cannot be written: {machine.disk_error}"
        yield error(problem, "free disk space, or choose another --folder")
        return
    free, speed = machine.disk_free_bytes or 0, machine.disk_bytes_per_s
    text = f"{free / GIB:,.0f} GiB free in {machine.folder}" + (f", writes {speed / MB:,.0f} MB/s" if speed else "")
    need, fix = "checkpoints need 14 to 18 bytes per parameter", "free disk space, or choose another --save"
    if free < FULL_BYTES:
        yield error(f"full: {free / MB:,.0f} MB free in {machine.folder}, but {need}", fix)
    elif free < MIN_FREE_BYTES:
        yield warning(f"{text}: {need}", fix)
    elif speed is not None and speed < MIN_DISK_BYTES_PER_S:
        yield warning(f"{text}: checkpoints will take long", "use a faster file system, or --async-save")
    else:
        yield ok(text)


# By the name in the report.
CHECKS: dict[str, Callable[[Machine], Iterator[DoctorResult]]] = {
    "Python": python, "torch": torch, "megatron-core": megatron_core, "libraries": libraries, "GPU": driver,
    "Transformer Engine": transformer_engine, "CUDA libraries": cuda_libraries, "cuDNN": cudnn, "Triton": triton,
    "Apex": apex, "GPU links": links, "tested set": tested_set, "support": support, "environment": switches,
    "shared memory": shared_memory, "open files": open_files, "disk": disk,
}  # fmt: skip


def run_checks(machine: Machine, num_gpus: int = 0) -> list[DoctorResult]:
    """Run all checks.

    Args:
        num_gpus: required number of GPUs.
    """
    results = [replace(result, check=name) for name, check in CHECKS.items() for result in check(machine)]
    # If torch's import timed out, use the driver's count.
    is_counted = not {"torch", "CUDA"} & set(machine.slow_imports)
    count = len(machine.gpus if is_counted else machine.driver_gpus)
    if count < num_gpus:
        text = f"{num_gpus} expected, {'torch sees' if is_counted else 'the driver has'} {count}"
        fix = "check nvidia-smi, fix the problem in the line above, or use another machine"
        results.append(error(text, fix, check="GPU"))
    return results


def recipe_support(machine: Machine) -> dict[str, str]:
    """How each recipe runs: `native`, `emulated`, or why it does not run."""
    if machine.slow_imports:
        return dict.fromkeys(registry.names(), "unknown: see above")
    if not (machine.works("torch") and machine.works("megatron.core")):
        return dict.fromkeys(registry.names(), "not available: see above")
    target = build_target(machine)
    has_kernels = target.kind == "cuda" and target.transformer_engine is not None
    return {
        recipe.name: "native" if has_kernels and recipe.is_native(target.compute_capability) else "emulated"
        for recipe in registry.recipes()
    }


def build_target(machine: Machine) -> Target:
    """The machine as a target of `device/capability.py`: that of its least capable GPU."""
    if not machine.gpus:
        return Target("cpu", "cpu")
    least = min(machine.gpus, key=lambda gpu: gpu.compute_capability)
    has_engine = machine.has_te_torch_part and machine.works("transformer_engine.pytorch")
    version = machine.packages.get("transformer-engine") if has_engine else None
    return Target(least.name, "cuda", least.compute_capability, version)


def gpu_names(gpus: tuple[str, ...]) -> str:
    """GPU names with their counts, such as `8 x NVIDIA H200`."""
    return ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)) or "no GPU"
