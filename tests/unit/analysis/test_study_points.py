"""The folder of a study becomes points, and points become a small file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from megafp8.analysis.study_points import load_points
from megafp8.errors import DataError


def config(seed: int, lr: float = 1.0) -> dict:
    return {"training": {"seed": seed}, "optimizer": {"lr": lr}, "checkpoint": {"save": f"{seed}"}, "logging": {}}


@pytest.fixture
def study(write_run: Callable[..., Path], tmp_path: Path) -> Path:
    """Three finished runs and a failed one."""
    for name, seed, lr in (("a", 1, 1.0), ("b", 2, 1.0), ("c", 1, 2.0), ("d", 2, 2.0)):
        speeds = [1.0] * 12 + [50.0] * 8
        folder = write_run(
            name, [3.0] * 20, validations={10: 2.5, 20: 2.0 + lr}, speeds=speeds, config=config(seed, lr),
            num_parameters=1000, flops_per_token=6000.0, world_size=2,
        )  # fmt: skip
        state = {"state": "failed" if name == "d" else "done", "world_size": 2, "started_at": 0, "updated_at": 0,
                 "process": {"host": "h", "place": "p", "pid": 1, "started": 1}}  # fmt: skip
        (folder / "run_state.json").write_text(json.dumps(state))
    runs = [{"id": name, "label": f"run-{name}", "folder": name, "choice": {"recipe": "plain"}} for name in "abcde"]
    (tmp_path / "study.json").write_text(json.dumps({"name": "small", "runs": runs}))
    return tmp_path


def test_runs_that_are_done_are_points(study: Path) -> None:
    found = load_points(study)
    assert found.name == "small" and found.missing == ("run-d (failed)", "run-e (waiting)")
    one = found.points[0]
    assert (one.label, one.recipe, one.seed, one.parameters, one.world_size) == ("run-a", "plain", 1, 1000, 2)
    assert (one.tokens, one.flops, one.loss) == (20_000, 6000.0 * 20_000, 3.0)
    assert one.tokens_per_second == 50.0  # the first steps are warm-up


def test_settings_are_equal_except_for_the_seed(study: Path) -> None:
    first, second, other = load_points(study).points
    assert first.settings == second.settings != other.settings


def test_points_are_read_back(study: Path, tmp_path: Path) -> None:
    found = load_points(study)
    path = tmp_path / "points.json"
    path.write_text(found.to_json())
    assert load_points(path) == found


def test_a_folder_without_a_study_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no study in .*: no study.json, which megafp8 study writes"):
        load_points(tmp_path)
    wrong = tmp_path / "points.json"
    wrong.write_text('{"name": "x", "points": ["x"], "missing": []}')
    with pytest.raises(DataError, match="not the points.json of a report"):
        load_points(wrong)
    wrong.write_text('{"name": "x", "points": [{"loss": 1}], "missing": []}')
    with pytest.raises(DataError, match="not the points.json of a report"):
        load_points(wrong)


def test_a_study_without_finished_runs(tmp_path: Path) -> None:
    runs = [{"id": "a", "label": "run-a", "folder": "a", "choice": {}}]
    (tmp_path / "study.json").write_text(json.dumps({"name": "small", "runs": runs}))
    with pytest.raises(DataError, match="none of the study's 1 runs is done"):
        load_points(tmp_path)
