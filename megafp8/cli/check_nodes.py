"""Check the nodes of a Slurm job before training, and report those that are not usable.

    srun --ntasks-per-node 1 megafp8 check-nodes measure FOLDER --gpus 8 --nodes n1 n2 n3
    megafp8 check-nodes judge FOLDER --gpus 8 --nodes n1 n2 n3 --requeue

`measure` runs once on each node and writes a report to FOLDER, which all nodes share: the checks of megafp8 doctor
(GPUs, driver, libraries, disk), versions, GPU memory used by others, errors and clocks of the GPUs, the system clock,
all-reduces among the GPUs of the node and with its two neighbors (NCCL or Gloo), and torchrun's rendezvous of all
nodes. SLURM_NODEID gives the index of a node. `judge` runs once afterwards and evaluates the reports.
Exit status: 0 if all nodes are usable; 70 if not, or if a report is missing. With --requeue, the job is then requeued
without these nodes.
"""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from megafp8.cli.command_flags import add_flags, argument, float_flag, int_flag, switch
from megafp8.cli.common import build_command_parser, returns_exit_status, stderr_log
from megafp8.errors import INTERNAL
from megafp8.launch import node_check
from megafp8.launch.slurm import requeue
from megafp8.utils.files import path_argument

NODE = "SLURM_NODEID"
log = stderr_log("nodes: ")


def build_parser() -> argparse.ArgumentParser:
    return add_flags(
        build_command_parser(__doc__),
        argument("what", "measure: on every node; judge: once afterwards", choices=("measure", "judge")),
        argument("folder", "folder of the reports, a new one for each start of the job", type=path_argument,
                 metavar="FOLDER"),
        argument("--nodes", "all nodes of the job, in the same order everywhere", nargs="+", required=True,
                 metavar="NODE"),
        argument("--addresses", "addresses of the nodes, in the same order (default: their names)", nargs="+",
                 default=[], metavar="HOST"),
        int_flag("--gpus", "required GPUs per node (default: 0)", default=0),
        int_flag("--port", "first of 100 ports to use (default: %(default)s)", default=29600),
        float_flag("--timeout-s", "timeout of each all-reduce, in seconds (default: %(default)g)",
                   default=node_check.COLLECTIVE_TIMEOUT_S, metavar="S"),
        switch("--requeue", "requeue the job without unusable nodes"),
        int_flag("--max-requeues", "maximum number of requeues (default: %(default)s)", default=100),
    )  # fmt: skip


@returns_exit_status("check-nodes")
def main(argv: Sequence[str]) -> int:
    """Measure this node, or evaluate the reports of all; return the exit status."""
    arguments = build_parser().parse_args(argv)
    folder: Path = arguments.folder
    if arguments.what == "measure":
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # the warning of the time limit is for the run
        folder.mkdir(parents=True, exist_ok=True)
        report = node_check.measure_node(
            arguments.nodes[int(os.environ.get(NODE, "0"))], arguments.nodes, folder, num_gpus=arguments.gpus,
            port=arguments.port, timeout_s=arguments.timeout_s, addresses=arguments.addresses,
        )  # fmt: skip
        node_check.write_report(folder, report)
        return 0
    reports = [node_check.read_report(folder, node) for node in arguments.nodes]
    wrong = node_check.evaluate_nodes(arguments.nodes, reports)
    for node, problems in wrong.items():
        for problem in problems:
            log(f"{node}: {problem}")
    if not wrong:
        log(node_check.healthy_summary(arguments.nodes, reports))
        return 0
    if len(reports) == 1 and not (reports[0] and node_check.gpu_problems(reports[0])):
        log("this may be wrong with every node: only for its GPUs would a single node be exchanged")
    elif len(wrong) == len(arguments.nodes) > 1:
        log("this is wrong with every node, so that others would hardly be better")
    elif arguments.requeue:
        requeue(arguments.max_requeues, log, exclude=list(wrong))
    return INTERNAL
