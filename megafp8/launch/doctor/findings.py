"""What a check has to say.

What an import that failed or did not end says of: the library, the driver, the memory, or a busy machine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Optional

from megafp8.launch.doctor.facts import Machine

OK, WARNING, ERROR = "ok", "warning", "error"
"""Error: training cannot run here, or not as the machine is meant to. Warning: it runs slower, or untried."""


@dataclass(frozen=True, kw_only=True)
class DoctorFinding:
    """What a check has to say.

    Attributes:
        mend: a command, or a sentence where no command mends it; None where nothing is wrong.
    """

    check: str
    level: str
    text: str
    mend: Optional[str] = None


def ok(check: str, text: str) -> DoctorFinding:
    """Nothing is wrong."""
    return DoctorFinding(check=check, level=OK, text=text)


def warning(check: str, text: str, mend: str) -> DoctorFinding:
    """Training runs, and could do better."""
    return DoctorFinding(check=check, level=WARNING, text=text, mend=mend)


def error(check: str, text: str, mend: str) -> DoctorFinding:
    """Training does not run."""
    return DoctorFinding(check=check, level=ERROR, text=text, mend=mend)


DRIVER_LIBRARY = re.compile(r"lib(cuda|nvidia-[\w-]+)\.so")
NO_MEMORY = re.compile(r"MemoryError|Cannot allocate memory|ended with status -9\b")
REINSTALL_FIX = "install NVIDIA's driver (a container: docker run --gpus all), or a torch without CUDA"
MEMORY_FIX = "free memory, or allow the container more; dmesg | grep -i oom names what the kernel has ended"


def import_finding(machine: Machine, check: str, module: str, version: str, reinstall: str) -> Optional[DoctorFinding]:
    """What is wrong with the import of a module; None where nothing is, or it was not tried.

    Args:
        reinstall: the command for a broken library. Where another installation would change nothing, another is given.
    """
    if module in machine.slow_imports:
        again = "run the doctor again on an idle machine; what takes the time: "
        return warning(
            check, f"{version} was not imported {within(machine, module)}: not known whether it works",
            f"{again}python -X importtime -c 'import {module}'",
        )  # fmt: skip
    failure = machine.import_errors.get(module)
    if failure is None:
        return None
    mend = reinstall
    if DRIVER_LIBRARY.search(failure):
        mend = REINSTALL_FIX
    elif NO_MEMORY.search(failure):
        mend = MEMORY_FIX
    return error(check, f"{version} cannot be imported: {failure}", mend)


def within(machine: Machine, module: str) -> str:
    """`within 120 s (load of 5.1 a core)`."""
    load = "" if machine.load_per_core is None else f" (load of {machine.load_per_core:.1f} a core)"
    return f"within {machine.slow_imports[module]:g} s{load}"
