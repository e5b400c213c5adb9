"""Trains the runs of a comparison on this machine, with progress: whole runs, or trunks and their forks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType

from megafp8.errors import INTERNAL, PREEMPTED, ConfigError, NumericsError
from megafp8.launch.compared_runs import visible_devices
from megafp8.launch.forks import ForkRuns, discard_partial_forks, discard_weights, has_result
from megafp8.launch.process_pool import OUTPUT_FILE, PooledRun, ProcessPool, RunOutcome
from megafp8.resilience.run_state import finished_state
from megafp8.utils.best_effort import best_effort


def share_devices(parallel: int, ranks: int, num_gpus: int, runs_per_gpu: int = 1) -> tuple[list[str], list[str]]:
    """Return the GPUs for the concurrent runs, and the flags of every run: without GPUs a share of the cores.

    Raises:
        ConfigError: there are fewer GPUs than ranks.
    """
    if runs_per_gpu > 1 and not num_gpus:
        raise ConfigError(f"--runs-per-gpu {runs_per_gpu}: this machine has no GPU; give --parallel")
    if not num_gpus:
        threads = max(1, len(os.sched_getaffinity(0)) // max(1, parallel * ranks))
        return [], ["--num-threads", str(threads)]
    if runs_per_gpu > 1 and ranks > 1:
        raise ConfigError(f"--runs-per-gpu {runs_per_gpu} is for runs of one rank, not --nproc-per-node {ranks}")
    if parallel * ranks > num_gpus * runs_per_gpu:
        raise ConfigError(
            f"--parallel {parallel} with --nproc-per-node {ranks} takes {parallel * ranks} GPUs; there are {num_gpus}"
            + (f", with --runs-per-gpu {runs_per_gpu}" if runs_per_gpu > 1 else "")
        )
    # A GPU once for each of its runs, all GPUs before a second run on one.
    return (visible_devices(num_gpus) * runs_per_gpu)[: parallel * ranks], []


class Display:
    """Prints a line when a run starts or ends, and a progress bar over all steps on a terminal."""

    def __init__(self, num_runs: int, steps_of_run: int, starts: Mapping[str, int]):
        from tqdm import tqdm

        self._starts = starts
        self._steps_of_run, self._num_runs, self._ended = steps_of_run, num_runs, 0
        self._bar = tqdm(
            total=num_runs * steps_of_run, unit="step", dynamic_ncols=True, disable=None, smoothing=0.05,
            bar_format="{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} steps [{elapsed}<{remaining}{postfix}]",
        )  # fmt: skip

    def started(self, run: PooledRun, gpus: Sequence[str]) -> None:
        """Report that a run started."""
        self._bar.write(f"started  {run.name}", file=sys.stderr)

    def ended(self, outcome: RunOutcome) -> None:
        """Report how a run ended."""
        self._ended += 1
        head, count = outcome.run.name, f"({self._ended} of {self._num_runs})"
        if outcome.is_done:
            self._bar.write(f"done     {head} in {outcome.seconds:.0f} s {count}", file=sys.stderr)
            return
        if outcome.is_stopped:
            self._bar.write(f"stopped  {head} {count}: {outcome.reason}", file=sys.stderr)
            return
        text = "\n".join(f"    {line}" for line in outcome.tail.splitlines())
        log = outcome.run.folder / OUTPUT_FILE
        self._bar.write(f"FAILED   {head} {count}: {outcome.reason}\n{text}\n    all of it: {log}", file=sys.stderr)

    def stepped(self, steps: Mapping[str, int]) -> None:
        """Update the bar with the steps of the running runs."""
        self._bar.set_postfix_str(", ".join(f"{name} {step}" for name, step in steps.items()), refresh=False)
        done = (max(0, step - self._starts.get(name, 0)) for name, step in steps.items())
        self._bar.n = self._ended * self._steps_of_run + sum(done)
        self._bar.refresh()

    def close(self) -> None:
        """Close the bar."""
        self._bar.close()


def due(runs: Sequence[PooledRun]) -> list[PooledRun]:
    """Those without a result."""
    return [run for run in runs if not has_result(run)]


def train(
    runs: Sequence[PooledRun], parallel: int, gpus: Sequence[str], steps_of_run: int,
    on_end: Callable[[RunOutcome], None] = lambda outcome: None, starts: Mapping[str, int] = MappingProxyType({}),
    results: Collection[int] = (), noun: str = "runs",
) -> int:  # fmt: skip
    """Run what is not done yet, or has no result; return the exit status of all runs together.

    Args:
        starts: steps from which runs start that fork, by their names.
        results: exit statuses of runs that failed with a result.
        noun: what the runs are called.
    """
    sys.stdout, sys.stderr = best_effort(sys.stdout), best_effort(sys.stderr)  # the terminal may be closed
    waiting = due(runs) if results else [run for run in runs if finished_state(run.folder) is None]
    if len(waiting) < len(runs):
        print(f"{len(runs) - len(waiting)} of {len(runs)} {noun} are done already", file=sys.stderr)
    display = Display(len(waiting), steps_of_run, starts)

    def ended(outcome: RunOutcome) -> None:
        display.ended(outcome)
        on_end(outcome)

    batch = ProcessPool(parallel, gpus, on_start=display.started, on_end=ended, on_steps=display.stepped)
    try:
        outcomes = batch.run(waiting)
    finally:
        display.close()
    if batch.is_stopping:
        print("stopped by a signal; the same command resumes", file=sys.stderr)
        return PREEMPTED
    failed = [each for each in outcomes if not each.is_done and each.exit_status not in results]
    if failed:
        names = ", ".join(each.run.name for each in failed)
        print(f"{len(failed)} of {len(runs)} runs are not done: {names}", file=sys.stderr)
    num_without_memory = sum("out of memory" in each.reason + each.tail for each in failed)
    if num_without_memory and len(set(gpus)) < len(gpus):
        advice = "with fewer --runs-per-gpu the same command trains what is left"
        print(f"{num_without_memory} of them lacked memory: {advice}", file=sys.stderr)
    return INTERNAL if failed else 0


def effort_of_forks(runs: ForkRuns) -> str:
    """How many runs are to be trained, and how many steps."""
    trunks, forks = len(due(runs.trunks)), len(due(runs.forks))
    num_steps = trunks * runs.last_step + forks * runs.length
    return f"{trunks} trunks of {runs.last_step:,} steps and {forks} forks of {runs.length}, {num_steps:,} steps"


def train_forks(runs: ForkRuns, parallel: int, gpus: Sequence[str]) -> int:
    """Train the trunks, then their forks; return the exit status. A fork that diverges has a result."""
    discard_partial_forks(runs.forks)
    of_trunks = train(runs.trunks, parallel, gpus, runs.last_step)
    if of_trunks == PREEMPTED:
        return of_trunks
    # Those of a trunk that failed have nothing to fork from.
    ready = {run.folder.name for run in runs.trunks if finished_state(run.folder) is not None}
    forks = [run for run in runs.forks if run.folder.name.rpartition("-")[0] in ready]
    of_forks = train(
        forks, parallel, gpus, runs.length,
        on_end=lambda outcome: discard_weights(outcome.run) if outcome.is_done else None,
        starts={run.name: int(run.name.rpartition("-step")[2]) for run in forks},
        results=(NumericsError.exit_status,), noun="forks",
    )  # fmt: skip
    return of_forks if of_forks == PREEMPTED else of_trunks or of_forks
