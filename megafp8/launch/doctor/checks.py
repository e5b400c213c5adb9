"""The doctor's checks: one function per check, from the facts of a machine to results."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from megafp8.device.capability import Target
from megafp8.launch.doctor import facts, versions
from megafp8.launch.doctor.facts import Machine
from megafp8.launch.doctor.results import DoctorResult, error, import_problem, ok, timeout_text, warning
from megafp8.launch.doctor.versions import TestedSet, dotted, matches_version, version_numbers
from megafp8.recipes import registry

LIBRARIES = (
    "numpy", "psutil", "pyyaml", "sentencepiece", "tensorboard", "matplotlib", "scipy", "jinja2", "tqdm",
    "packaging", "argcomplete", "google-crc32c",
)  # fmt: skip
MIN_SHARED_MEMORY_BYTES = 2**30
MIN_OPEN_FILES = 4096
MIN_FREE_BYTES, FULL_BYTES = 20 * 2**30, 2**30
MIN_DISK_BYTES_PER_S = 50e6
MB, GIB = 1e6, 2**30
DRIVER_FIX = (
    "for the reason: dmesg | grep -i nvrm; restart the machine or reinstall the driver (no GPU: remove nvidia-smi)"
)


Check = Callable[[Machine], Iterator[DoctorResult]]


# ---- libraries ----------------------------------------------------------------------------------------------------


def python(machine: Machine) -> Iterator[DoctorResult]:
    """A supported version of Python."""
    version = dotted(machine.python)
    if not versions.PYTHON_FROM <= machine.python[:2] < versions.PYTHON_BELOW:
        fix = "install python3.11, then: bash tests/run.sh"
        yield error("Python", f"{version}: megafp8 needs {versions.PYTHONS}", fix)
    elif (3, 11) <= machine.python < (3, 11, 4):
        text = (
            f"{version}: Python 3.11.0 to 3.11.3 pickle enum members as calls of getattr. megafp8 reads such "
            "checkpoints; other safe loaders may refuse them"
        )
        yield warning("Python", text, "install Python 3.11.4 or newer")
    else:
        yield ok("Python", version)


def torch(machine: Machine) -> Iterator[DoctorResult]:
    """torch is installed, can be imported and is recent enough."""
    version = machine.torch_version or machine.packages.get("torch")
    if version is None:
        yield error("torch", "is not installed", "pip install -c constraints.txt torch")
    elif problem := import_problem(machine, "torch", "torch", version, "pip install --force-reinstall torch"):
        yield problem
    elif version_numbers(version) < versions.TORCH_FROM:
        least = dotted(versions.TORCH_FROM)
        yield error("torch", f"{version} is older than {least}", f"pip install --upgrade 'torch>={least}'")
    else:
        yield ok("torch", version + (f", CUDA {machine.torch_cuda}" if machine.torch_cuda else ", built without CUDA"))


def megatron_core(machine: Machine) -> Iterator[DoctorResult]:
    """megatron-core is installed, in a version that the project's patches are written for."""
    version = machine.packages.get("megatron-core")
    fix = f"pip install 'megatron-core=={versions.megatron_core_for(machine.python)}'"
    then = f"fix this error, then: {fix}"
    if version is None:
        yield error("megatron-core", "is not installed", fix)
    elif not any(matches_version(version, each) for each in versions.MEGATRON_CORE_VERSIONS):
        supported = " and ".join(versions.MEGATRON_CORE_VERSIONS)
        yield error("megatron-core", f"{version}: supported versions are {supported}", fix)
    elif machine.works("torch") and (
        problem := import_problem(machine, "megatron-core", "megatron.core", version, then)
    ):
        # Without torch nothing can be imported, and the check of torch reports that.
        yield problem
    else:
        yield ok("megatron-core", version)


def libraries(machine: Machine) -> Iterator[DoctorResult]:
    """The other required libraries are installed."""
    missing = [name for name in LIBRARIES if name not in machine.packages]
    if missing:
        yield error("libraries", f"not installed: {', '.join(missing)}", f"pip install {' '.join(missing)}")
    elif problem := import_problem(machine, "libraries", "numpy", "numpy", "pip install --force-reinstall numpy"):
        yield problem
    else:
        yield ok("libraries", ", ".join(f"{name} {machine.packages[name]}" for name in LIBRARIES))


def transformer_engine(machine: Machine) -> Iterator[DoctorResult]:
    """Transformer Engine works or is absent. A broken one keeps megatron-core from being imported."""
    version, check = machine.packages.get("transformer-engine"), "Transformer Engine"
    remove = "pip uninstall transformer-engine"
    again = f"pip install --force-reinstall --no-deps 'transformer-engine[pytorch]=={version}', or: {remove}"
    if version is None:
        if machine.has_gpu:
            yield warning(
                check, "is not installed: FP8 is emulated, which is slower than BF16", "pip install 'megafp8[te]'"
            )  # fmt: skip
        else:
            yield ok(check, "not installed, and not needed without a GPU")
    elif not machine.has_te_torch_part:
        state = "is installed without its torch extension"
        if "transformer-engine-torch" not in machine.packages:
            state = "is the empty meta package, without transformer-engine-torch"
        yield error(
            check, f"{version} {state}; megatron-core cannot be imported",
            f"pip install 'transformer-engine[pytorch]=={version}', or: {remove}",
        )  # fmt: skip
    elif machine.works("torch") and (
        problem := import_problem(machine, check, "transformer_engine.pytorch", version, again)
    ):
        yield problem
    else:
        yield ok("Transformer Engine", version)


def cuda_libraries(machine: Machine) -> Iterator[DoctorResult]:
    """torch, Transformer Engine, cuDNN and NCCL are built for the same major version of CUDA."""
    if machine.cuda_major is None:
        return
    suffix = re.compile(r"^(transformer-engine|nvidia-cudnn|nvidia-nccl)-cu(\d+)$")
    found = {name: int(match[2]) for name in machine.packages if (match := suffix.match(name))}
    others = sorted(name for name, major in found.items() if major != machine.cuda_major)
    if any(name.startswith("transformer-engine") for name in others):
        yield error(
            "CUDA libraries", f"torch is built for CUDA {machine.torch_cuda}, but {', '.join(others)} is not",
            f"pip uninstall {' '.join(others)} && pip install 'transformer-engine[pytorch]'",
        )  # fmt: skip
    elif others:
        yield warning(
            "CUDA libraries",
            f"torch is built for CUDA {machine.torch_cuda}, but {', '.join(others)} is also installed",
            f"pip uninstall {' '.join(others)}",
        )  # fmt: skip
    else:
        nccl = f", NCCL {machine.nccl_version}" if machine.nccl_version else ""
        yield ok("CUDA libraries", f"all packages are for CUDA {machine.cuda_major}{nccl}")


def cudnn(machine: Machine) -> Iterator[DoctorResult]:
    """There is only one cuDNN. With two, Transformer Engine may silently fall back to attention that is 30% slower."""
    if machine.cuda_major is None or "transformer-engine" not in machine.packages:
        return
    wheel, found = machine.wheel_cudnn, machine.found_cudnn
    shown = machine.cudnn or "of unknown version"
    fix = f"export CUDNN_HOME={wheel}" if wheel else "unset CUDNN_HOME CUDNN_PATH, and keep one cuDNN"
    if len(machine.loaded_cudnn) > 1:
        yield error(
            "cuDNN",
            f"two versions are loaded: {', '.join(machine.loaded_cudnn)}; attention falls back to slower kernels",
            fix,
        )
    elif wheel and found and not found[0].startswith(wheel):
        yield error(
            "cuDNN",
            f"torch uses {shown} in {wheel}, but Transformer Engine finds another in {found[0]} ({found[1]}): mixed "
            "versions make attention fall back to unfused, 30% slower", fix,
        )  # fmt: skip
    else:
        yield ok("cuDNN", shown + (f" in {wheel}" if wheel else ""))


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
        fix = f"optional; to test this machine: {tested_sets[0].command}"
        yield warning("tested set", f"differs from {expected.name}: {', '.join(differences)}", fix)
    else:
        yield ok("tested set", expected.name)


# ---- GPUs ---------------------------------------------------------------------------------------------------------


def driver(machine: Machine) -> Iterator[DoctorResult]:
    """The driver is recent enough for torch's CUDA, and torch can use all GPUs of the driver."""
    if machine.driver_error is not None:
        usable = f"; torch sees {len(machine.gpus)}" if machine.gpus else ""
        text = f"broken driver: {machine.driver_error}{usable}"
        yield (warning if machine.gpus else error)("GPU", text, DRIVER_FIX)
        return
    if "CUDA" in machine.slow_imports:
        start = f"{gpu_names(machine.driver_gpus)}; CUDA did not start {timeout_text(machine, 'CUDA')}"
        text = f"{start}: unknown whether it works"
        yield warning("GPU", text, "run the doctor again on an idle machine; nvidia-smi shows the load of the GPUs")
        return
    if not machine.has_gpu:
        yield ok("GPU", "none: training runs on the CPU, with emulated recipes")
        return
    least = facts.MINIMUM_DRIVER.get(machine.cuda_major or 0)
    if machine.torch_version is not None and machine.torch_cuda is None:
        text = f"{gpu_names(machine.driver_gpus)}, but torch {machine.torch_version} is built without CUDA"
        yield error("GPU", text, "pip uninstall torch && pip install -c constraints.txt torch")
    elif machine.driver and least and version_numbers(machine.driver)[0] < least:
        yield error(
            "GPU", f"driver {machine.driver} is too old for torch's CUDA {machine.torch_cuda}, which needs {least}",
            f"update the NVIDIA driver to {least} or newer, or install a torch for an older CUDA",
        )  # fmt: skip
    elif machine.works("torch") and len(machine.gpus) < len(machine.driver_gpus):
        why = machine.cuda_error or f"CUDA_VISIBLE_DEVICES={machine.environment.get('CUDA_VISIBLE_DEVICES', 'not set')}"
        text = f"the driver has {gpu_names(machine.driver_gpus)}, but torch sees {len(machine.gpus)}: {why}"
        hidden = "CUDA_VISIBLE_DEVICES" in machine.environment and machine.cuda_error is None
        yield (warning if hidden else error)("GPU", text, "unset CUDA_VISIBLE_DEVICES" if hidden else "nvidia-smi -q")
    else:
        names = gpu_names(machine.driver_gpus or tuple(gpu.name for gpu in machine.gpus))
        yield ok("GPU", names + (f", driver {machine.driver}" if machine.driver else ""))


def links(machine: Machine) -> Iterator[DoctorResult]:
    """The GPUs of this machine are connected by NVLink."""
    if not machine.links:
        return
    slow = [link for link in machine.links if not link.startswith("NV")]
    if slow:
        yield warning(
            "GPU links", f"some GPUs have no NVLink between them ({', '.join(slow)}): tensor parallelism will be slow",
            "use --tensor-model-parallel-size 1, or only within GPUs connected by NV in nvidia-smi topo -m",
        )  # fmt: skip
    else:
        yield ok("GPU links", f"NVLink ({', '.join(machine.links)})")


def triton(machine: Machine) -> Iterator[DoctorResult]:
    """Triton can compile: it builds a C launcher for each kernel against Python's headers."""
    if not machine.gpus:
        return
    if "triton" not in machine.packages:
        yield error("Triton", "is not installed", "pip install triton")
    elif machine.compiler is None:
        yield error("Triton", "cannot find a C compiler", "apt-get install gcc, or export CC=COMPILER")
    elif not machine.has_python_headers:
        version = dotted(machine.python[:2])
        yield error("Triton", "cannot find Python.h", f"apt-get install python{version}-dev")
    else:
        yield ok("Triton", f"{machine.packages['triton']}, {machine.compiler}")


def apex(machine: Machine) -> Iterator[DoctorResult]:
    """`apex` is NVIDIA's or absent: megatron-core imports it for the output layer's wgrad."""
    version = machine.packages.get("apex", "not installed")
    if machine.has_other_apex:
        text = (
            f"{version} is not NVIDIA's: the package apex on PyPI is a toolkit for Pyramid, and megatron-core imports "
            "it"
        )
        yield warning("Apex", text, "pip uninstall apex")
    else:
        yield ok("Apex", f"{version}; not needed")


def switches(machine: Machine) -> Iterator[DoctorResult]:
    """No environment variable changes Transformer Engine's recipes or its choice of attention."""
    changed = [
        (variable, f"{recipe.name}: {effect}")
        for recipe in registry.recipes()
        for variable, effect in recipe.te_switches
        if machine.environment.get(variable) == "1"
    ]
    if machine.environment.get("NVTE_FUSED_ATTN") == "0":
        changed.append(("NVTE_FUSED_ATTN", "no fused attention"))
    for variable, effect in changed:
        value = machine.environment[variable]
        yield warning("environment", f"{variable}={value} ({effect})", f"unset {variable}")
    if not changed:
        yield ok("environment", "no variable that changes recipes or attention is set")


# ---- the rest of the machine --------------------------------------------------------------------------------------


def shared_memory(machine: Machine) -> Iterator[DoctorResult]:
    """/dev/shm is large enough for data loader processes and NCCL."""
    size = machine.shared_memory_bytes
    if size is None:
        yield warning("shared memory", "/dev/shm does not exist", "mount -t tmpfs tmpfs /dev/shm, or --num-workers 0")
    elif size < MIN_SHARED_MEMORY_BYTES:
        yield warning(
            "shared memory", f"{size / MB:,.0f} MB: data loader processes and NCCL may run out of shared memory",
            "docker run --shm-size 8g (or --ipc host), or train with --num-workers 0",
        )  # fmt: skip
    else:
        yield ok("shared memory", f"{size / GIB:,.1f} GiB")


def open_files(machine: Machine) -> Iterator[DoctorResult]:
    """The limit on open files is high enough for shards, data loaders and sockets."""
    limit = machine.open_files
    if limit is not None and 0 <= limit < MIN_OPEN_FILES:
        yield warning("open files", f"at most {limit} per process", "ulimit -n 65536")
    else:
        yield ok("open files", "unlimited" if limit is None or limit < 0 else f"{limit:,}")


def disk(machine: Machine) -> Iterator[DoctorResult]:
    """The folder for checkpoints is writable, has free space and is fast enough."""
    if machine.disk_error is not None:
        fix = "free disk space, or choose another --folder"
        yield error("disk", f"{machine.folder} cannot be written: {machine.disk_error}", fix)
        return
    free, speed = machine.disk_free_bytes or 0, machine.disk_bytes_per_s
    text = f"{free / GIB:,.0f} GiB free in {machine.folder}" + (f", writes {speed / MB:,.0f} MB/s" if speed else "")
    if free < FULL_BYTES:
        text = f"full: {free / MB:,.0f} MB free in {machine.folder}"
        yield error(
            "disk",
            text + ", but checkpoints need 14 to 18 bytes per parameter",
            "free disk space, or choose another --save",
        )
    elif free < MIN_FREE_BYTES:
        yield warning(
            "disk",
            text + ": checkpoints need 14 to 18 bytes per parameter",
            "free disk space, or choose another --save",
        )
    elif speed is not None and speed < MIN_DISK_BYTES_PER_S:
        yield warning("disk", text + ": checkpoints will take long", "use a faster file system, or --async-save")
    else:
        yield ok("disk", text)


CHECKS: tuple[Check, ...] = (
    python, torch, megatron_core, libraries, driver, transformer_engine, cuda_libraries, cudnn, triton, apex, links,
    tested_set, switches, shared_memory, open_files, disk,
)  # fmt: skip


def run_checks(machine: Machine, num_gpus: int = 0) -> list[DoctorResult]:
    """Run all checks.

    Args:
        num_gpus: required number of GPUs.
    """
    results = [result for check in CHECKS for result in check(machine)]
    # If torch's import timed out, use the driver's count.
    is_counted = not {"torch", "CUDA"} & set(machine.slow_imports)
    count = len(machine.gpus if is_counted else machine.driver_gpus)
    if count < num_gpus:
        text = f"{num_gpus} expected, {'torch sees' if is_counted else 'the driver has'} {count}"
        results.append(
            error("GPU", text, "check nvidia-smi, fix the problem in the line above, or use another machine")
        )
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
