"""The doctor's results, and the results of failed or slow imports."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Optional

from megafp8.launch.doctor.facts import Machine

OK, WARNING, ERROR = "ok", "warning", "error"
"""Error: training cannot run, or not as this machine should. Warning: it runs, but slower or untested."""


@dataclass(frozen=True, kw_only=True)
class DoctorResult:
    """The result of a check.

    Attributes:
        fix: how to fix it, preferably as a command; None if nothing is wrong.
    """

    check: str
    level: str
    text: str
    fix: Optional[str] = None


def ok(check: str, text: str) -> DoctorResult:
    """A result without a problem."""
    return DoctorResult(check=check, level=OK, text=text)


def warning(check: str, text: str, fix: str) -> DoctorResult:
    """A problem with which training still runs."""
    return DoctorResult(check=check, level=WARNING, text=text, fix=fix)


def error(check: str, text: str, fix: str) -> DoctorResult:
    """A problem with which training does not run."""
    return DoctorResult(check=check, level=ERROR, text=text, fix=fix)


DRIVER_LIBRARY = re.compile(r"lib(cuda|nvidia-[\w-]+)\.so")
NO_MEMORY = re.compile(r"MemoryError|Cannot allocate memory|exited with status -9\b")
REINSTALL_FIX = "install the NVIDIA driver (in a container: docker run --gpus all), or a CPU build of torch"
MEMORY_FIX = (
    "free memory, or raise the container's limit; dmesg | grep -i oom lists the processes that the kernel killed"
)


def import_problem(machine: Machine, check: str, module: str, version: str, reinstall: str) -> Optional[DoctorResult]:
    """The result of a failed or slow import; None if the import worked or was not tried.

    Args:
        reinstall: the command that reinstalls the library. Failures of the driver or of memory get another fix.
    """
    if module in machine.slow_imports:
        again = "run the doctor again on an idle machine; to profile the import: "
        return warning(
            check, f"{version} was not imported {timeout_text(machine, module)}: unknown whether it works",
            f"{again}python -X importtime -c 'import {module}'",
        )  # fmt: skip
    failure = machine.import_errors.get(module)
    if failure is None:
        return None
    fix = reinstall
    if DRIVER_LIBRARY.search(failure):
        fix = REINSTALL_FIX
    elif NO_MEMORY.search(failure):
        fix = MEMORY_FIX
    return error(check, f"{version} cannot be imported: {failure}", fix)


def timeout_text(machine: Machine, module: str) -> str:
    """The time limit of an import and the load, such as `within 120 s (load of 5.1 a core)`."""
    load = "" if machine.load_per_core is None else f" (load {machine.load_per_core:.1f} per core)"
    return f"within {machine.slow_imports[module]:g} s{load}"
