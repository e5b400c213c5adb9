"""How a process prepares its device."""

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
