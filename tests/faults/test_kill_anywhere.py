"""Kill any rank anywhere: the others end, no process is left, and the next start resumes without a difference.

One run is killed at each point and restarted each time until it finishes. Any difference that a kill or a start caused
would persist, because every later step depends on it. The final weights, optimizer state, scales, random states and
samples must equal those of the run without faults, bitwise.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from faulty_run import EVAL_INTERVAL, LAYOUTS, SAVE_INTERVAL, STEPS, FaultyRun, assert_died

from megafp8.resilience.fault_injection import POINTS, POINTS_BEFORE_STEPS

# Passed only when a checkpoint replaces another of its step, as in test_incomplete_checkpoints.py.
ELSEWHERE = {"save.between_renames"}
# Passed by rank 0 only.
ON_RANK_0 = {
    "save.before_manifest", "save.before_rename", "save.after_rename", "save.before_pointer", "save.after_pointer",
    "save.in_prune",
}  # fmt: skip
# The checkpoint has its final name here, so no start passes this step again: each point needs a step of its own.
NAMED = ("save.after_rename", "save.before_pointer", "save.after_pointer", "save.end", "save.in_prune")
KEPT = 2
HIT = [point for point in POINTS if point not in ELSEWHERE]
SEEDS = (1, 2, 3)


def kills(seed: int, ranks: dict[str, int]) -> list[str]:
    """A kill at each point, of the given rank, at a step drawn from those that pass it."""
    draw = random.Random(seed)
    saves = list(range(SAVE_INTERVAL, STEPS, SAVE_INTERVAL))
    pruning = draw.choice(saves[KEPT:])
    own = draw.sample([step for step in saves if step != pruning], len(NAMED) - 1)
    steps = dict(zip(NAMED, [*own, pruning], strict=True))

    def step_of(point: str) -> int:
        if point.startswith("save."):
            return steps.get(point) or draw.choice(saves)
        if point.startswith("evaluation."):
            return draw.randrange(EVAL_INTERVAL, STEPS, EVAL_INTERVAL)
        return draw.randint(1, STEPS)

    return [
        f"kill:rank={rank},at={point}" + ("" if point in POINTS_BEFORE_STEPS else f",step={step_of(point)}")
        for point, rank in ranks.items()
    ]


def run_through(run: FaultyRun, plan: list[str]) -> None:
    """Start a run until it finishes. Every kill of the plan happens, sometimes two in one start."""
    newest = 0
    for _ in range(len(plan) + 1):
        ended = run.start(";".join(plan))
        if set(ended.statuses) == {0}:
            break
        assert_died(ended)
        assert run.newest >= newest, "a checkpoint that was there is there"
        newest = run.newest
    assert set(ended.statuses) == {0}, ended.report()
    assert len(list(run.fired.iterdir())) == len(plan), ended.report()


def assert_equal(run: FaultyRun, unbroken: FaultyRun) -> None:
    """The final state and the recorded curves equal those of the run without faults."""
    assert run.fingerprint(STEPS) == unbroken.fingerprint(STEPS)
    assert run.losses() == unbroken.losses()


def some_rank(seed: int, points: list[str], world_size: int) -> dict[str, int]:
    """For each point one of the ranks that pass it."""
    draw = random.Random(seed)
    return {point: 0 if point in ON_RANK_0 else draw.randrange(world_size) for point in points}


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", ["dp2", "tp2-pp2", *(pytest.param(level, marks=pytest.mark.long) for level in ("O1", "O2")), "O3"]
)
def test_a_run_killed_at_every_point_ends_equal(
    layout: str, tmp_path: Path, cache: Path, unbroken: dict[str, FaultyRun]
) -> None:
    """The short form: at each point one rank; of all layouts but the first one, at every fourth point."""
    world_size = LAYOUTS[layout][0]
    points = HIT if layout == "dp2" else HIT[::4]
    run = FaultyRun(layout, tmp_path / "run", cache)
    run_through(run, kills(SEEDS[0], some_rank(SEEDS[0], points, world_size)))
    assert_equal(run, unbroken[layout])


EVERY = [
    pytest.param(layout, rank, seed, id=f"{layout}-rank{rank}-seed{seed}")
    for layout, (world_size, _) in LAYOUTS.items() for rank in range(world_size) for seed in SEEDS
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(("layout", "rank", "seed"), EVERY)
def test_a_run_with_every_rank_killed_at_every_point_ends_equal(
    layout: str, rank: int, seed: int, tmp_path: Path, cache: Path, unbroken: dict[str, FaultyRun]
) -> None:
    """The long form."""
    points = [point for point in HIT if rank == 0 or point not in ON_RANK_0]
    assert len(points) >= 12
    run = FaultyRun(layout, tmp_path / "run", cache)
    run_through(run, kills(seed, dict.fromkeys(points, rank)))
    assert_equal(run, unbroken[layout])
