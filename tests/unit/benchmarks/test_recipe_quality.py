"""What the benchmark of recipes makes of its runs; the runs themselves only in the slow test."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmarks import recipe_quality  # noqa: E402
from benchmarks.recipe_quality import BASELINE, CONTROL, RECIPES, Failed, Result, summarize  # noqa: E402
from megafp8.config import flags, serialize  # noqa: E402
from megafp8.device.capability import EMULATED_RECIPES  # noqa: E402
from megafp8.errors import ConfigError  # noqa: E402
from megafp8.telemetry.records import EvalRecord, RunRecord, StepRecord  # noqa: E402
from megafp8.telemetry.sinks.jsonl import JsonlSink  # noqa: E402

FORMAT_SETTINGS = {"precision.fp8_format", "precision.fp8_recipe", "precision.fp8_delayed_start"}
TRAINABLE = [recipe for recipe in RECIPES if not recipe_quality.reasons_against(recipe)]


def result(recipe: str, seed: int, loss: float, step_ms: float = 100.0) -> Result:
    return Result(recipe, seed, loss, math.exp(loss), step_ms)


class FakeRuns:
    """Writes the records of a run instead of training it."""

    def __init__(self, loss: float = 4.0):
        self.loss = loss
        self.commands: list[list[str]] = []

    def __call__(self, argv: Sequence[str]) -> None:
        self.commands.append(list(argv))
        place = Path(argv[argv.index("--save") + 1])
        assert not place.exists(), "what a killed run left has to go first"
        sink = JsonlSink(place / "records.jsonl")
        sink.write(RunRecord(config_hash="0", config={}, world_size=1, layout={}, recipe="x", device_name="cpu"))
        common = {"loss": self.loss, "consumed_tokens": 100}
        for step in range(1, 41):
            step_ms = 1e6 if step <= 10 else 50.0 + step
            sink.write(StepRecord(**common, step=step, consumed_samples=1, learning_rate=1e-3, step_ms=step_ms,
                                  tokens_per_second=1.0))  # fmt: skip
        perplexity = math.exp(self.loss)
        sink.write(EvalRecord(**common, step=40, split="valid", perplexity=perplexity, num_tokens=9, eval_ms=1.0))
        sink.close()


def test_gaps_are_taken_within_a_seed() -> None:
    """Seed 2 is an easier one for both: no gap."""
    results = [result(BASELINE, 1, 4.0), result(BASELINE, 2, 3.0, step_ms=50.0), result("mxfp8-e4m3", 2, 3.03, 100.0),
               result("mxfp8-e4m3", 1, 4.0, 150.0)]  # fmt: skip
    baseline, mxfp8 = summarize(results)
    assert (baseline.recipe, baseline.mean_gap_fraction, baseline.step_ratio) == (BASELINE, 0, 1)
    assert mxfp8.seeds == (1, 2)
    assert mxfp8.gaps_fraction == pytest.approx((0, 0.01))
    assert mxfp8.mean_gap_fraction == pytest.approx(0.005)
    assert mxfp8.spread_fraction == pytest.approx(0.01 / math.sqrt(2))
    assert mxfp8.step_ratio == pytest.approx(1.75)
    assert mxfp8.mean_loss == pytest.approx(3.515)


def test_seeds_without_a_baseline_do_not_count() -> None:
    results = [result("mxfp8-e4m3", 1, 5.0), result(BASELINE, 2, 4.0), result("mxfp8-e4m3", 2, 4.0),
               result("blockwise-e4m3", 3, 4.0)]  # fmt: skip
    rows = summarize(results)
    assert [(row.recipe, row.seeds) for row in rows] == [(BASELINE, (2,)), ("mxfp8-e4m3", (2,))]
    assert rows[1].spread_fraction is None


@pytest.mark.parametrize("recipe", TRAINABLE)
def test_command_lines_differ_in_nothing_but_the_precision(recipe: str) -> None:
    configs = [
        flags.parse(recipe_quality.command_of(name, 3, 300, Path("runs"))[1:]).config for name in (BASELINE, recipe)
    ]
    differences = {line.split(":")[0] for line in serialize.diff(*configs)}
    allowed = {"training.micro_batch_size"} if recipe == CONTROL else FORMAT_SETTINGS
    assert {name for name in differences if not name.startswith(("checkpoint.", "precision.fp4"))} <= allowed
    assert (recipe == BASELINE) == (not differences & allowed) or recipe.startswith("nvfp4")


def test_every_emulated_recipe_is_in_the_table() -> None:
    assert {recipe.split("-")[0] for recipe in TRAINABLE} >= set(EMULATED_RECIPES)


def test_a_finished_run_is_not_made_again_and_an_unfinished_one_is(tmp_path: Path) -> None:
    runs = FakeRuns()
    first = recipe_quality.train(BASELINE, 1, 40, tmp_path, runs)
    assert recipe_quality.train(BASELINE, 1, 40, tmp_path, runs) == first
    assert len(runs.commands) == 1
    assert first.step_ms == pytest.approx(75.5), "the first ten steps do not count"
    (tmp_path / f"{BASELINE}-seed1" / "finished").unlink()
    recipe_quality.train(BASELINE, 1, 40, tmp_path, runs)
    assert len(runs.commands) == 2


def test_other_flags_are_another_run(tmp_path: Path) -> None:
    runs = FakeRuns()
    recipe_quality.train(BASELINE, 1, 40, tmp_path, runs)
    recipe_quality.train(BASELINE, 1, 50, tmp_path, runs)
    recipe_quality.train(BASELINE, 2, 50, tmp_path, runs)
    assert len(runs.commands) == 3


def test_a_failing_run_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    runs = FakeRuns()

    def start(argv: Sequence[str]) -> None:
        if "mxfp8" in argv:
            raise Failed("it broke")
        runs(argv)

    outcomes = dict(recipe_quality.train_all([BASELINE, "mxfp8-e4m3"], [1, 2], 40, tmp_path, 2, start))
    assert isinstance(outcomes["mxfp8-e4m3, seed 2"], Failed)
    assert isinstance(outcomes["bf16, seed 2"], Result)
    assert len(outcomes) == 4


def test_table_and_picture(tmp_path: Path) -> None:
    losses = {BASELINE: 4.0, CONTROL: 4.002, "tensorwise-hybrid": 4.04}
    rows = summarize([result(recipe, seed, loss + seed / 1e3) for recipe, loss in losses.items() for seed in (1, 2, 3)])
    text = recipe_quality.table(rows)
    assert "+1.00%" in text and "baseline" in text
    assert text.count("\n") == 4
    recipe_quality.plot_gaps(rows, tmp_path / "gaps.png")
    assert (tmp_path / "gaps.png").stat().st_size > 10_000


def test_what_cannot_be_trained_is_left_out_or_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recipe_quality, "reasons_against", lambda name: ["no such thing"] if name == "nvfp4" else [])
    assert "nvfp4" not in recipe_quality.choose(None)
    assert "left out: nvfp4: no such thing" in capsys.readouterr().err
    assert recipe_quality.choose(["mxfp8-e4m3"]) == [BASELINE, "mxfp8-e4m3"]
    with pytest.raises(ConfigError, match="nvfp4: no such thing"):
        recipe_quality.choose(["nvfp4"])


@pytest.mark.slow
def test_it_runs(tmp_path: Path) -> None:
    arguments = ["--recipes", "tensorwise-hybrid", "--seeds", "1", "--train-iters", "2", "--folder", str(tmp_path)]
    assert recipe_quality.main(arguments) == 0
    content = json.loads((tmp_path / "recipe_quality.json").read_text())
    assert [row["recipe"] for row in content["rows"]] == [BASELINE, "tensorwise-hybrid"]
    assert all(0 < run["loss"] < 12 for run in content["runs"])
    assert (tmp_path / "recipe_quality.md").exists() and (tmp_path / "recipe_quality.png").exists()
