"""A real Slurm on this machine for the duration of a test: a controller and two nodes, in a folder of their own.

An installed Slurm or munge is not touched: configuration, key, socket, state, logs and ports belong to the test. Nodes
have names that only Slurm resolves, and addresses of their own on this machine.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Optional

import psutil

from benchmarks.ports import free_ports
from megafp8.utils.process import set_parent_death_signal

NODES, ADDRESSES = ("megafp8-node1", "megafp8-node2"), ("127.0.0.1", "127.0.0.2")
# Timeout of Slurm's commands. It starts in a second, but a busy machine may take longer.
PATIENCE_S = 120.0
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=2
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SlurmdTimeout=5
KillWait=5
NodeName={first} NodeHostname={host} NodeAddr={address1} Port={port1} CPUs=4 RealMemory=1000
NodeName={second} NodeHostname={host} NodeAddr={address2} Port={port2} CPUs=4 RealMemory=1000
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=INFINITE PriorityTier=10
"""


def why_not() -> Optional[str]:
    """Why Slurm cannot run here; None if it can."""
    missing = [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed (Debian: munge slurm-wlm)"
    return None if os.geteuid() == 0 else "a controller and nodes on one machine need root"


@contextlib.contextmanager
def slurm_cluster(folder: Path) -> Iterator[Cluster]:
    """A cluster. None of its processes outlives the block."""
    cluster = Cluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.end()


class Cluster:
    """A controller and two nodes.

    Args:
        folder: empty, for all files; its path must be short enough for a socket.
    """

    def __init__(self, folder: Path):
        self.folder, self.configuration = folder, folder / "slurm.conf"
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        self.environment = inherited | {"SLURM_CONF": str(self.configuration)}

    def start(self) -> None:
        """Start everything, and wait until both nodes accept jobs."""
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        controller, port1, port2 = free_ports(3)
        self.configuration.write_text(
            CONFIGURATION.format(
                folder=self.folder, host=socket.gethostname().split(".")[0], controller=controller, port1=port1,
                port2=port2, first=NODES[0], second=NODES[1], address1=ADDRESSES[0], address2=ADDRESSES[1],
            )
        )  # fmt: skip
        self.launch(
            "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={self.folder}/munge.sock",
            f"--pid-file={self.folder}/munged.pid", f"--log-file={self.folder}/munged.log",
            f"--seed-file={self.folder}/munge.seed",
        )  # fmt: skip
        wait_until(lambda: (self.folder / "munge.sock").exists(), "munge's socket")
        self.launch("slurmctld", "-D")
        for node in NODES:
            self.boot(node)

    def boot(self, node: str) -> None:
        """Start a node's daemon, and wait until it accepts jobs."""
        self.launch("slurmd", "-D", "-N", node)
        wait_until(lambda: self.ask("sinfo", "-h", "-n", node, "-o", "%t") in ("idle", "mix", "alloc"), f"node {node}")

    def launch(self, *command: str) -> None:
        """Start a daemon in the foreground, which ends with this process."""
        with open(self.folder / "daemons.log", "a") as log:
            subprocess.Popen(
                command, env=self.environment, stdout=log, stderr=log, start_new_session=True,
                preexec_fn=functools.partial(set_parent_death_signal, signal.SIGTERM),
            )  # fmt: skip

    def ask(self, *command: str) -> str:
        """The output of one of Slurm's commands."""
        return subprocess.run(command, env=self.environment, capture_output=True, text=True).stdout.strip()

    def job(self, number: int) -> dict[str, str]:
        """The fields of a job by scontrol."""
        words = self.ask("scontrol", "show", "job", str(number), "--oneliner").split()
        return dict(word.partition("=")[::2] for word in words)

    def wait_for_state(self, number: int, *states: str) -> str:
        """Until a job is in one of these states."""
        wait_until(lambda: self.job(number).get("JobState") in states, f"job {number} to be {' or '.join(states)}",
                   lambda: f"{self.job(number)}\n{self.output(number)}")  # fmt: skip
        return self.job(number)["JobState"]

    def wait_for_requeue(self, number: int, restarts: int = 1) -> None:
        """Wait until a job is in the queue again. Then end the two minutes that Slurm lets it wait there.

        A start within the second of the requeue would be refused: for a node the job is one that was killed.
        """
        wait_until(lambda: (job := self.job(number)).get("JobState") == "PENDING" and job["Restarts"] == str(restarts),
                   f"job {number} to be requeued", lambda: f"{self.job(number)}\n{self.output(number)}")  # fmt: skip
        self.ask("scontrol", "update", f"JobId={number}", "StartTime=now+2")

    def output(self, number: int) -> str:
        """What a job has printed."""
        path = Path(self.job(number).get("StdOut", ""))
        return path.read_text() if path.is_file() else ""

    def processes(self, node: Optional[str] = None) -> Iterator[psutil.Process]:
        """All processes of the cluster, or of one node: its daemon and what it started."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if self.owns(process, node):
                    yield process

    def owns(self, process: psutil.Process, node: Optional[str]) -> bool:
        """Whether a process belongs to the cluster, and to this node if one is named."""
        if process.name() == "slurmstepd":  # its title overwrote its environment, but it has a log open
            logs = {Path(file.path) for file in process.open_files()}
            return bool(logs & {self.folder / f"slurmd-{name}.log" for name in ([node] if node else NODES)})
        environment = process.environ()
        if environment.get("SLURM_CONF") != str(self.configuration):
            return False
        return node is None or environment.get("SLURMD_NODENAME") == node or node in process.cmdline()

    def cut_power(self, node: str) -> None:
        """Kill a node's daemon and everything that it started, all together."""
        victims = list(self.processes(node))
        for process in victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(victims, timeout=10)

    def end(self) -> None:
        """Kill what is left, daemons first, so that nothing new is started."""
        for _ in range(3):
            left = list(self.processes())
            for process in sorted(left, key=lambda process: not process.name().startswith("slurm")):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=10)


def wait_until(is_true: Callable[[], bool], what: str, told: Callable[[], str] = str) -> None:
    """Poll a condition until it holds, with a generous timeout."""
    deadline = time.monotonic() + PATIENCE_S
    while not is_true():
        assert time.monotonic() < deadline, f"waited {PATIENCE_S:.0f} s for {what}\n{told()}"
        time.sleep(0.2)
