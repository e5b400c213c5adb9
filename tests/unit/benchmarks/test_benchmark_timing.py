"""Alternating timing, medians with their uncertainty, tables."""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmarks import timing


def test_sides_alternate_in_changing_order() -> None:
    calls: list[str] = []
    sides = {name: lambda name=name: calls.append(name) for name in "ab"}
    times = timing.take_turns(sides, rounds=3, warmup=1)
    assert calls == ["a", "b", "a", "b", "b", "a", "a", "b"]
    assert all(len(times[name].wall_ms) == len(times[name].cpu_ms) == 3 for name in "ab")


def test_cpu_time_leaves_out_waiting() -> None:
    times = timing.take_turns({"waits": lambda: time.sleep(0.02)}, rounds=3, warmup=0)
    assert times["waits"].median_wall_ms >= 20
    assert times["waits"].median_cpu_ms < 10
    assert timing.lost_fraction(times) > 0.5
    assert timing.clock_to_trust(times) == "cpu"


def test_ratio_is_taken_round_by_round() -> None:
    """The machine slows down tenfold. The ratio stays constant, unlike the ratio of the medians."""
    reference = [1.0, 1.0, 1.0, 10.0, 10.0]
    mine = [2.0, 2.0, 20.0 / 10, 20.0, 20.0]
    assert timing.ratio_of(mine, reference).median == 2.0


def test_median_interval_covers_95_percent() -> None:
    generator = random.Random(0)
    hits = 0
    for _ in range(1000):
        ratio = timing.ratio_of([generator.lognormvariate(0.0, 0.1) for _ in range(25)], [1.0] * 25)
        hits += ratio.low <= 1.0 <= ratio.high
    assert 940 <= hits <= 990


def test_interval_of_few_rounds_is_their_range() -> None:
    ratio = timing.ratio_of([1.0, 3.0], [1.0, 1.0])
    assert (ratio.low, ratio.median, ratio.high) == (1.0, 2.0, 3.0)


def test_unequal_rounds_are_refused() -> None:
    with pytest.raises(ValueError):
        timing.ratio_of([1.0], [1.0, 2.0])


def test_table_is_aligned_markdown() -> None:
    text = timing.format_table(("mode", "ms"), [("bf16", 1234.5), ("fp8", 9.876), ("none", None)])
    assert text.splitlines() == ["| mode |    ms |", "|------|------:|", "| bf16 | 1,234 |", "| fp8  |  9.88 |",
                                 "| none |       |"]  # fmt: skip


def test_profile_counts_calls_below_a_folder() -> None:
    folder = Path(statistics.__file__).parent.name
    calls = timing.profile_calls(lambda: [statistics.median([1, 2]) for _ in range(3)], 2, folder)
    found = {name: count for name, count, _ in calls}
    assert found["statistics.py median"] == 3


def test_json_holds_dataclasses(tmp_path: Path) -> None:
    path = tmp_path / "new" / "result.json"
    timing.write_json(path, {"ratio": timing.Ratio(1.0, 0.5, 2.0), "path": tmp_path})
    written = json.loads(path.read_text())
    assert {"cuDNN", "NCCL", "driver"} <= written.pop("cuda_versions").keys()
    assert written == {"ratio": {"median": 1.0, "low": 0.5, "high": 2.0}, "path": str(tmp_path)}
