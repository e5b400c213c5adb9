"""torchrun is killed while its ranks start: no rank may be left, whatever it was doing."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import random
import time
from collections.abc import Callable
from multiprocessing.synchronize import Event
from pathlib import Path

import psutil
import pytest
from ranks import become_child

from megafp8.launch.supervisor import PR_SET_CHILD_SUBREAPER

ROOT = Path(__file__).resolve().parents[2]
RANKS = 2
# Generous: a killed rank is gone immediately; one that was just started detects the loss by itself.
BOUND_S = 60.0
# Replaces torch: an import that never ends.
ENDLESS = """
import os, time
open(os.path.join({folder!r}, "importing" + os.environ["RANK"]), "w").close()
while True:
    time.sleep(1)
"""
FLAGS = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 2 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 63 --bf16 "
    "--train-iters 100000 --num-workers 0 --num-threads 1"
)


def be_agent(output: Path, python_path: str) -> None:
    """`torchrun --nproc-per-node 2 pretrain_gpt.py FLAGS`, without the seconds of torchrun's own imports."""
    from torch.distributed.run import main

    stream = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(stream, number)
    os.environ |= {"PYTHONPATH": python_path, "OMP_NUM_THREADS": "1"}
    main(["--standalone", "--nproc-per-node", str(RANKS), str(ROOT / "pretrain_gpt.py"), *FLAGS.split()])


def kill_the_agent(killed: Event, output: Path, python_path: str, is_time: Callable[[], bool], delay_s: float) -> None:
    """Start torchrun, kill it when its ranks run and the delay has passed, and end with its last descendant.

    Processes that torchrun leaves behind become children of this process, as under the supervisor.
    """
    become_child()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    agent = multiprocessing.get_context("fork").Process(target=be_agent, args=(output, python_path))
    agent.start()
    while agent.is_alive() and not (num_started(agent.pid) == RANKS and is_time()):
        time.sleep(0.005)
    time.sleep(delay_s)
    agent.kill()
    killed.set()
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
    os._exit(0)


def num_started(agent: int) -> int:
    """Ranks that have executed their own program. Until then a rank holds torchrun's open files, including its
    listening socket, and for the others torchrun seems to be alive."""
    count = 0
    for child in psutil.Process(agent).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            count += any(word.endswith("pretrain_gpt.py") for word in child.cmdline()[1:4])
    return count


def left_after_kill(
    output: Path, python_path: str, is_time: Callable[[], bool] = lambda: True, delay_s: float = 0.0
) -> list[str]:
    """Command lines of what remains of a killed torchrun after `BOUND_S`. They are then killed too."""
    import torch.distributed.run  # noqa: F401, the forked agent has it then

    context = multiprocessing.get_context("fork")
    killed = context.Event()
    process = context.Process(target=kill_the_agent, args=(killed, output, python_path, is_time, delay_s))
    process.start()
    killed.wait()
    process.join(BOUND_S)
    told: list[str] = []
    while process.is_alive():
        left = psutil.Process(process.pid).children(recursive=True)
        told += [" ".join(each.cmdline()[:3]) for each in left]
        for each in left:
            each.kill()
        process.join(1)
    return told


@pytest.fixture
def endless(tmp_path: Path) -> str:
    """PYTHONPATH of ranks whose import of torch does not end."""
    (tmp_path / "path/torch").mkdir(parents=True)
    (tmp_path / "path/torch/__init__.py").write_text(ENDLESS.format(folder=str(tmp_path)))
    return f"{tmp_path / 'path'}{os.pathsep}{ROOT}"


def test_ranks_that_import_end_with_torchrun(tmp_path: Path, endless: str) -> None:
    marks = [tmp_path / f"importing{rank}" for rank in range(RANKS)]
    assert left_after_kill(tmp_path / "output", endless, lambda: all(mark.exists() for mark in marks)) == []
    assert all(mark.exists() for mark in marks), (tmp_path / "output").read_text()


def test_a_kill_at_any_time_of_the_start_leaves_no_rank(tmp_path: Path, endless: str) -> None:
    """While Python starts in them, before and after the request to the kernel."""
    drawn = random.Random(17)
    for number, delay_s in enumerate([0.0, *(drawn.uniform(0.0, 0.3) for _ in range(3))]):
        assert left_after_kill(tmp_path / f"output{number}", endless, delay_s=delay_s) == [], delay_s


@pytest.mark.slow
def test_real_imports_end_with_torchrun(tmp_path: Path) -> None:
    delay_s = random.Random(71).uniform(0.5, 3.0)
    assert left_after_kill(tmp_path / "output", str(ROOT), delay_s=delay_s) == []
