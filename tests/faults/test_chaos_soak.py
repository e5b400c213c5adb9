"""A supervised run with many faults ends as one without. The long form is a benchmark."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest

from benchmarks import chaos_soak
from megafp8.resilience.fault_injection import POINTS, POISONS, read_plan


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_faults_are_drawn(seed: int) -> None:
    """The requested number of faults, of every kind, each at a step of its own; equal for equal seeds."""
    drawn = chaos_soak.draw_faults(seed, 2000, 200)
    plan = read_plan(";".join(entry for _, entry in drawn))
    assert drawn == chaos_soak.draw_faults(seed, 2000, 200) != chaos_soak.draw_faults(seed + 1, 2000, 200)
    assert len(plan) == 200
    assert {name for name, _ in drawn} == set(chaos_soak.KINDS)
    assert len({fault.step for fault in plan}) == 200
    assert len({fault.at for fault in plan}) >= 18 and {fault.at for fault in plan} <= {*POINTS, *POISONS}
    for fault in plan:
        if fault.at.startswith("save."):
            assert fault.step is not None and fault.step % chaos_soak.SAVE_INTERVAL == 0
        if fault.at.startswith("evaluation."):
            assert fault.step is not None and fault.step % chaos_soak.EVAL_INTERVAL == 0


def test_recovery_time_starts_at_the_fault() -> None:
    """Also across a start that made no step. A slow rank ends nothing."""
    starts = [
        {"started_at": 0.0, "ended_at": 10.0, "recovery_s": None},
        {"started_at": 11.0, "ended_at": 12.0, "recovery_s": None},
        {"started_at": 13.0, "ended_at": 30.0, "recovery_s": 4.0},
        {"started_at": 31.0, "ended_at": 40.0, "recovery_s": 3.0},
    ]
    times = [(9.5, "kill"), (9.8, "slow"), (11.5, "kill")]
    assert chaos_soak.recovery_times(starts, times) == [12.0 + 4.0 - 9.5, 3.0]


@pytest.mark.slow
def test_a_short_soak(tmp_path: Path) -> None:
    """In a child process, which may end all of its descendants."""
    path = tmp_path / "figures.json"
    arguments = f"--seed 3 --steps 26 --faults 7 --fork --folder {tmp_path / 'runs'} --json {path}"
    child = multiprocessing.get_context("fork").Process(
        target=lambda: exit(chaos_soak.main(arguments.split())), name="soak"
    )
    child.start()
    child.join(300)
    child.kill()
    assert child.exitcode == 0, (tmp_path / "runs/soak/output.txt").read_text()[-4000:]
    figures = json.loads(path.read_text())
    assert figures["is_equal"] and sum(figures["faults_struck"].values()) == 7
    failed_saves = figures["faults_struck"]["disk"]
    assert figures["lost_steps"]["max"] <= chaos_soak.SAVE_INTERVAL * (1 + failed_saves) + 1
    assert figures["starts"] > 4 and 0 < figures["effective_time"] < 1
