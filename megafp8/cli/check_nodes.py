"""Look at every node of a Slurm job before it trains, and name those that it should not run on.

    srun --ntasks-per-node 1 python launcher/check_nodes.py measure FOLDER --gpus 8 --nodes n1 n2 n3
    python launcher/check_nodes.py judge FOLDER --gpus 8 --nodes n1 n2 n3 --requeue

`measure` runs once on each node and leaves a report in FOLDER, which all nodes see: what tools/doctor.py says (GPUs,
driver, libraries, disk), versions, memory of the GPUs that others use, their errors and clocks, the machine's clock,
all-reduces among its GPUs and with its two neighbours, by NCCL or gloo, and the rendezvous of all nodes as torchrun
makes it. Nodes know their places by SLURM_NODEID. `judge` runs once, when all have ended.
Exit status 0: all are well; 70: some are not, or gave no report. With --requeue the job then goes back into the queue,
and gets other nodes.
"""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from megafp8.cli.common import build_command_parser, returns_exit_status, stderr_log
from megafp8.errors import INTERNAL
from megafp8.launch import node_check
from megafp8.launch.slurm import requeue
from megafp8.utils.files import path_argument

NODE = "SLURM_NODEID"
log = stderr_log("nodes: ")


def build_parser() -> argparse.ArgumentParser:
    parser = build_command_parser(__doc__)
    parser.add_argument("what", choices=("measure", "judge"), help="on every node, or once afterwards")
    parser.add_argument(
        "folder", type=path_argument, metavar="FOLDER", help="for the reports; of this start of the job alone"
    )
    parser.add_argument("--nodes", nargs="+", required=True, metavar="NODE", help="all of the job, in one order")
    parser.add_argument(
        "--addresses", nargs="+", default=[], metavar="HOST",
        help="where they are reached, in the same order (default: their names)",
    )  # fmt: skip
    parser.add_argument("--gpus", type=int, default=0, metavar="N", help="GPUs that each must have (default: none)")
    parser.add_argument("--port", type=int, default=29600, metavar="N", help="the first of 100 that may be used")
    parser.add_argument(
        "--timeout-s", type=float, default=node_check.COLLECTIVE_TIMEOUT_S, metavar="S",
        help="for each all-reduce (default %(default)g)",
    )  # fmt: skip
    parser.add_argument(
        "--requeue", action="store_true", help="where nodes are bad, put the job back into the queue without them"
    )
    parser.add_argument("--max-requeues", type=int, default=100, metavar="N", help="in all (default %(default)s)")
    return parser


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
