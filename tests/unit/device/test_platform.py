"""How a process prepares its device."""

import io
import json
import os
import subprocess
import sys

import pytest
import torch

from megafp8.device import platform

PROBE = """
import os, torch
from megafp8.device.platform import enable_determinism
for given in ({}, {"NCCL_ALGO": "Tree"}):
    for name in [name for name in os.environ if name.startswith(("NCCL", "NVTE", "CUBLAS"))]:
        del os.environ[name]
    torch.use_deterministic_algorithms(False)
    os.environ |= given
    enable_determinism()
    print(torch.are_deterministic_algorithms_enabled())
    print(os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"], os.environ["NCCL_ALGO"])
"""


def test_deterministic_mode_sets_missing_variables() -> None:
    said = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["True", "0", "Ring", "True", "0", "Tree"]


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


SILENCE_PROBE = """
import json, logging, os, sys, warnings
from megafp8.config.schema import LoggingConfig
from megafp8.device.platform import silence_other_ranks
for rank, flags in json.loads(sys.argv[1]):
    if os.fork() == 0:
        os.environ["RANK"] = rank
        silence_other_ranks(LoggingConfig(**flags))
        warnings.warn("python"), logging.warning("logged"), logging.error("an error")
        sys.exit()
    assert os.wait()[1] == 0
    print("next", file=sys.stderr)
"""


def test_warnings_come_from_one_rank() -> None:
    """Each case in a process of its own, since it changes the filters of the process."""
    cases = [("0", {}), ("1", {}), ("1", {"verbose": True}), ("1", {"logging_level": 20})]
    command = [sys.executable, "-c", SILENCE_PROBE, json.dumps(cases)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    for case, text in zip(cases, ended.stderr.split("next\n")[:-1], strict=True):
        is_silent = case == ("1", {})
        found = ["python" in text, "logged" in text, "an error" in text]
        assert found == [not is_silent, not is_silent, True], (case, text)
