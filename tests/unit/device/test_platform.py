"""How a process prepares its device."""

import io
import os
import subprocess
import sys

import pytest
import torch

from megafp8.device import platform

PROBE = """
import os, torch
from megafp8.device.platform import enable_determinism
enable_determinism()
print(torch.are_deterministic_algorithms_enabled())
print(os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"], os.environ["NCCL_ALGO"])
"""


@pytest.mark.parametrize(("given", "kept"), [({}, "Ring"), ({"NCCL_ALGO": "Tree"}, "Tree")])
def test_deterministic_mode_sets_missing_variables(given: dict, kept: str) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("NCCL", "NVTE", "CUBLAS"))} | given
    said = subprocess.run([sys.executable, "-c", PROBE], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["True", "0", kept]


@pytest.mark.parametrize(
    ("num_threads", "environment", "useful", "expected"),
    [
        (None, {}, 64, 4),  # 8 cores for two ranks
        (None, {}, 3, 3),
        (None, {"OMP_NUM_THREADS": ""}, 64, 4),
        (None, {"OMP_NUM_THREADS": "1"}, 64, None),  # as read by torch
        (None, {"MKL_NUM_THREADS": "2"}, 64, None),
        (5, {"OMP_NUM_THREADS": "1"}, 3, 5),
    ],
)
def test_threads_of_a_rank(
    num_threads: int | None, environment: dict[str, str], useful: int, expected: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for name in platform.THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in (environment | {"LOCAL_WORLD_SIZE": "2"}).items():
        monkeypatch.setenv(name, value)
    found: list[int] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(torch, "set_num_threads", found.append)
    platform.set_num_threads(num_threads, useful)
    assert found == ([] if expected is None else [expected])


X86 = "model name\t: A CPU\nflags\t\t: fpu avx512f {}\nvmx flags\t: amx_bf16\n\nmodel name\t: another\n"
ARM = "BogoMIPS\t: 50.00\nFeatures\t: fp asimd {}\n"


@pytest.mark.parametrize(
    ("text", "name", "has_bf16_units"),
    [
        (X86.format("avx512_bf16"), "A CPU", True),
        (X86.format("amx_bf16 amx_tile"), "A CPU", True),
        (X86.format("avx512vl"), "A CPU", False),
        (ARM.format("bf16"), "CPU", True),
        (ARM.format("sve"), "CPU", False),
        ("", "CPU", False),
    ],
)
def test_what_a_cpu_is(text: str, name: str, has_bf16_units: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "open", lambda path, encoding: io.StringIO(text), raising=False)
    assert platform.cpu_name() == name
    cpu = platform.Platform("cpu", torch.device("cpu"), name, "gloo")
    assert cpu.has_bf16_units() == has_bf16_units


@pytest.mark.parametrize("variable", platform.THREAD_VARIABLES)
def test_threads_are_those_of_the_environment(variable: str) -> None:
    """Without them it would be all cores. (torch itself uses at most the existing cores.)"""
    probe = "import torch; from megafp8.device.platform import set_num_threads; set_num_threads(None, 64); "
    environment = {name: value for name, value in os.environ.items() if name not in platform.THREAD_VARIABLES}
    said = subprocess.run(
        [sys.executable, "-c", probe + "print(torch.get_num_threads())"], env=environment | {variable: "1"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert said.stdout.split() == ["1"]


@pytest.mark.parametrize(
    ("rank", "flags", "is_silent"),
    [("0", {}, False), ("1", {}, True), ("1", {"verbose": True}, False), ("1", {"logging_level": 20}, False)],
)
def test_warnings_come_from_one_rank(rank: str, flags: dict, is_silent: bool) -> None:
    """In a process of its own, since it changes the filters of the process."""
    probe = (
        "import logging, warnings; from megafp8.config.schema import LoggingConfig; "
        f"from megafp8.device.platform import silence_other_ranks; silence_other_ranks(LoggingConfig(**{flags!r})); "
        "warnings.warn('python'); logging.warning('logged'); logging.error('an error')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", probe], env=os.environ | {"RANK": rank}, capture_output=True, text=True, check=True
    )
    found = ["python" in ended.stderr, "logged" in ended.stderr, "an error" in ended.stderr]
    assert found == [not is_silent, not is_silent, True]
