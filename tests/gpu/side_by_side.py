"""Many small concurrent runs of `pretrain_gpt.py`, their ranks forked from one process with all imports done.

`run_all` starts it with FOLDER and NUM_GPUS. FOLDER/launches.json lists the runs, and FOLDER/ends.json gets their
results. The ranks of a run have different GPUs and meet at an address as torchrun's do, so they use NCCL. Several runs
share a GPU, since most of their time is startup. Without GPUs they are CPU ranks. It is a separate program because a
process that forks GPU ranks must not have used a GPU, as a test process has.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from benchmarks.ports import free_ports

# Also without GPUs, with as many places as the largest run has ranks.
RUNS_ON_A_GPU = 3
RUN_S = 120.0
HERE = Path(__file__).resolve()


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One start of a run.

    Attributes:
        flags: without `--save`, which becomes `run_folder`.
        after: name of a launch that must have ended first.
        plan: of faults (`megafp8/resilience/fault_injection.py`).
        alone: no other run shares its GPUs.
    """

    name: str
    num_ranks: int
    flags: str
    after: Optional[str] = None
    plan: str = ""
    alone: bool = False

    @property
    def share(self) -> int:
        """How many of the `RUNS_ON_A_GPU` places of each of its GPUs it takes."""
        return RUNS_ON_A_GPU if self.alone else 1


@dataclass(frozen=True, kw_only=True)
class End:
    """How it ended; see `forked_runs.Ended`."""

    statuses: tuple[int, ...]
    seconds: float
    seconds_after_first: float
    output: str


def run_all(folder: Path, launches: list[Launch], num_gpus: int) -> dict[str, End]:
    """Start all of them in a separate process, and wait. Returns by name how each one ended."""
    (folder / "launches.json").write_text(json.dumps([dataclasses.asdict(launch) for launch in launches]))
    paths = os.pathsep.join((str(HERE.parents[2]), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")))
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    if num_gpus == 0:
        environment |= {"CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(
        [sys.executable, HERE, folder, str(num_gpus)], env=environment, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, timeout=RUN_S * (1 + len(launches)),
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-4000:]
    ends = json.loads((folder / "ends.json").read_text())
    return {name: End(**end | {"statuses": tuple(end["statuses"])}) for name, end in ends.items()}


def run_folder(folder: Path, name: str) -> Path:
    """The folder where a run saves."""
    return folder / name.replace(" ", "_").replace(",", "") / "saved"


class Gpus:
    """How many of its places are taken on each GPU."""

    def __init__(self, names: list[str]):
        self.names, self.taken = names, [0] * len(names)

    def take(self, num_ranks: int, share: int = 1) -> Optional[list[int]]:
        """The least busy GPUs, adjacent, one for each rank; None if none have so many free places."""
        blocks = [range(i, i + num_ranks) for i in range(0, len(self.names) - num_ranks + 1, num_ranks)]
        busy = {block: max(self.taken[gpu] for gpu in block) for block in blocks}
        block = min(blocks, key=busy.__getitem__)
        if busy[block] + share > RUNS_ON_A_GPU:
            return None
        for gpu in block:
            self.taken[gpu] += share
        return list(block)

    def give_back(self, gpus: list[int], share: int = 1) -> None:
        """Free the places of a run that has ended."""
        for gpu in gpus:
            self.taken[gpu] -= share


def start_and_wait(folder: Path, num_gpus: int) -> None:
    """In the process that forks: start runs as GPUs become free until all have ended."""
    import forked_runs

    forked_runs.prepare()
    launches = [Launch(**launch) for launch in json.loads((folder / "launches.json").read_text())]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(str(gpu) for gpu in range(num_gpus))
    gpus = Gpus(visible.split(",")[:num_gpus] if num_gpus else [""] * max(launch.num_ranks for launch in launches))
    if num_gpus:
        for name in ("megafp8.te.layers", "megafp8.kernels.adam"):
            importlib.import_module(name)
    waiting, ends = list(launches), dict[str, End]()
    running: dict[str, tuple[forked_runs.ForkedRun, list[int], int]] = {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(forked_runs.all_mock_documents())  # some of them are compared with the command
        while waiting or running:
            for launch in [launch for launch in waiting if launch.after is None or launch.after in ends]:
                taken = gpus.take(launch.num_ranks, launch.share)
                if taken is not None:
                    run = start(folder, launch, ",".join(gpus.names[gpu] for gpu in taken) if num_gpus else "")
                    stack.callback(run.kill)
                    running[launch.name] = run, taken, launch.share
                    waiting.remove(launch)
            time.sleep(0.1)
            for name, (run, taken, share) in list(running.items()):
                if run.is_over(RUN_S):
                    ends[name] = end_of(run)
                    gpus.give_back(taken, share)
                    del running[name]
                    # After each, so that a call that is killed leaves what ended before.
                    results = {name: dataclasses.asdict(end) for name, end in ends.items()}
                    (folder / "ends.json").write_text(json.dumps(results))


def start(folder: Path, launch: Launch, devices: str):  # noqa: ANN201 - forked_runs is imported late
    """Fork the ranks of a launch."""
    import forked_runs

    saved = run_folder(folder, launch.name)
    saved.mkdir(parents=True)
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0]), "CUDA_VISIBLE_DEVICES": devices}
    flags = f"{launch.flags} --save {saved}"
    return forked_runs.ForkedRun(launch.num_ranks, flags, launch.plan, None, saved.parent, environment)


def end_of(run) -> End:  # noqa: ANN001
    """The result of a finished run."""
    ended = run.wait(RUN_S)
    return End(
        statuses=ended.statuses, seconds=ended.seconds, seconds_after_first=ended.seconds_after_first,
        output=ended.report(),
    )  # fmt: skip


if __name__ == "__main__":
    start_and_wait(Path(sys.argv[1]), int(sys.argv[2]))
