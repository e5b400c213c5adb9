"""The supported versions and their ends, the sets of versions that were tested together, and comparison of numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from typing import Optional

PYTHON_FROM, PYTHON_BELOW = (3, 11), (3, 14)
PYTHONS = "3.11 to 3.13"
TORCH_FROM = (2, 6)
# Of megatron-core. Each Python gets the newest that is made for it, as `setup.py` and `constraints.txt` do.
MEGATRON_CORE, NEWER_MEGATRON_CORE, NEWER_FROM_PYTHON = "0.16.1", "0.19.2", (3, 12)
MEGATRON_CORE_VERSIONS = (MEGATRON_CORE, "0.19")


@dataclass(frozen=True, kw_only=True)
class TestedSet:
    """Versions that were tested together: a row of the table of docs/dev/upstream.md.

    Attributes:
        packages: version, or start of a version such as `2.11`, by package.
        cudnn: start of the version of cuDNN; None on a CPU.
        driver: start of the version of NVIDIA's driver. Another driver is no difference: it has a check of its own.
        command: what runs the tests.
    """

    name: str
    python: tuple[int, int]
    packages: Mapping[str, str]
    cudnn: Optional[str] = None
    driver: Optional[str] = None
    command: str

    __test__ = False  # keeps pytest from collecting it


_CHOSEN = "python -m pytest tests/unit/config tests/unit/checkpoint tests/unit/mcore tests/distributed/test_loop.py"
CPU_TESTED_SETS = tuple(
    TestedSet(name=name, python=python, packages={"torch": "2.13", "megatron-core": megatron_core}, command=command)
    for name, python, megatron_core, command in (
        ("CPU", (3, 11), MEGATRON_CORE, "bash tests/run.sh"),
        ("CPU, chosen tests", (3, 11), NEWER_MEGATRON_CORE, "bash tests/other_engine.sh"),
        ("CPU, Python 3.12, chosen tests", (3, 12), NEWER_MEGATRON_CORE, _CHOSEN),
        ("CPU, Python 3.12, 0.16.1, chosen tests", (3, 12), MEGATRON_CORE, _CHOSEN),
        ("CPU, Python 3.13, chosen tests", (3, 13), NEWER_MEGATRON_CORE, _CHOSEN),
    )
)
_ON_GPU = "python -m pytest -m gpu tests"
GPU_TESTED_SETS = tuple(
    TestedSet(
        name=name, python=(3, 12), cudnn="9.19", driver="580.159", command=command,
        packages={
            "torch": "2.11", "megatron-core": megatron_core, "transformer-engine": "2.20.2", "triton": "3.6",
        },
    )
    for name, megatron_core, command in (
        ("H200, CUDA 13.0", MEGATRON_CORE, _ON_GPU),
        ("H200, CUDA 13.0, chosen tests", NEWER_MEGATRON_CORE,
         f"{_ON_GPU}/gpu/test_step_graph.py tests/gpu/test_nccl.py tests/gpu/test_moe.py"),
    )
)  # fmt: skip


@dataclass(frozen=True)
class SupportedVersion:
    """A tested version: a row of the table of docs/dev/upstream.md.

    Attributes:
        package: its name on PyPI, or Python.
        version: its start, such as `3.11`.
        tested: day of the last run of a tested set with it.
        ends: last day of support; None where no end is decided.
        reason: why it ends then.
        fix: what to take in its place.
    """

    package: str
    version: str
    tested: date
    ends: Optional[date] = None
    reason: str = ""
    fix: str = ""


PYTHON = "Python"
_CPU_RUN, _OTHER_RUNS, _GPU_RUN = date(2026, 11, 30), date(2026, 11, 26), date(2026, 11, 30)
SUPPORTED_VERSIONS = (
    SupportedVersion(PYTHON, "3.11", _CPU_RUN, date(2027, 10, 31), "last security fixes (PEP 664)", "Python 3.13"),
    SupportedVersion(PYTHON, "3.12", _GPU_RUN, date(2028, 10, 31), "last security fixes (PEP 693)", "Python 3.13"),
    SupportedVersion(PYTHON, "3.13", _OTHER_RUNS, date(2029, 10, 31), "last security fixes (PEP 719)", "a later one"),
    SupportedVersion("torch", "2.11", _GPU_RUN),
    SupportedVersion("torch", "2.13", _CPU_RUN),
    SupportedVersion(
        "megatron-core", MEGATRON_CORE, _CPU_RUN, date(2027, 10, 31), "kept for Python 3.11",
        f"Python 3.12 or newer with megatron-core {NEWER_MEGATRON_CORE}",
    ),
    SupportedVersion("megatron-core", NEWER_MEGATRON_CORE, _OTHER_RUNS),
    SupportedVersion("transformer-engine", "2.20.2", _GPU_RUN),
)  # fmt: skip
NOTICE_DAYS = 180
"""The doctor warns from so many days before an end."""


def ending_support(installed: Mapping[str, str], today: date) -> list[SupportedVersion]:
    """The installed versions whose support has ended or ends within `NOTICE_DAYS`.

    Args:
        installed: versions by package, with that of Python.
    """
    return [
        each
        for each in SUPPORTED_VERSIONS
        if matches_version(installed.get(each.package), each.version)
        and each.ends is not None
        and (each.ends - today).days <= NOTICE_DAYS
    ]


def megatron_core_for(python: tuple[int, ...]) -> str:
    """The version of megatron-core that is installed for a Python."""
    return NEWER_MEGATRON_CORE if python[:2] >= NEWER_FROM_PYTHON else MEGATRON_CORE


def version_numbers(version: str) -> tuple[int, ...]:
    """The numbers of a version: (2, 11, 0) for 2.11.0+cu130."""
    return tuple(map(int, re.findall(r"\d+", version.split("+")[0])))


def matches_version(found: Optional[str], wanted: str) -> bool:
    """Whether a version is `wanted`, or starts with it."""
    return found is not None and version_numbers(found)[: len(version_numbers(wanted))] == version_numbers(wanted)


def dotted(version: tuple[int, ...]) -> str:
    """A version as text: 3.12 for (3, 12)."""
    return ".".join(map(str, version))
