"""`megafp8 coordinate-check`: with muP no activation grows with the width, without it they do."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from forked_script import run_script

from megafp8.analysis.coordinates import GROWS, MUP, STANDARD, Coordinate, fit_slopes
from megafp8.cli.coordinate_check import build_parser, plan
from megafp8.config import flags
from megafp8.config.schema import RunConfig
from megafp8.errors import ConfigError

SCRIPT = "tools/coordinate_check.py"


@pytest.mark.slow
def test_widths_with_and_without_mup(tmp_path: Path) -> None:
    words = f"--widths 64 128 256 --recipes bf16 --seeds 3 --steps 3 --output-dir {tmp_path} -- --num-threads 1"
    result = run_script(SCRIPT, *words.split(), timeout_s=600)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "bf16.svg").exists() and "bf16, standard: grows: " in result.stdout
    with (tmp_path / "coordinates.csv").open(encoding="utf-8") as stream:
        found = list(csv.DictReader(stream))
    assert len(found) == 2 * 3 * 3 * 3 * 6  # parametrizations, seeds, widths, steps, activations
    slopes = {(each.parametrization, each.activation): each for each in fit_slopes(list(map(read_row, found)))}
    for (parametrization, activation), slope in slopes.items():
        if parametrization == MUP:
            assert slope.verdict != GROWS and slope.change.mean < 0.1, (activation, slope)
    for activation in ("attention output", "MLP output", "residual stream"):
        assert abs(slopes[MUP, activation].change.mean) < 0.15, slopes[MUP, activation]
    for activation in ("MLP output", "residual stream", "logits"):
        assert slopes[STANDARD, activation].verdict == GROWS, slopes[STANDARD, activation]
        assert slopes[STANDARD, activation].change.mean > 0.5
    # 1 / sqrt(width) by the initial weights; updates change them by as much in all widths, after more steps than here.
    assert slopes[MUP, "logits"].size.mean == pytest.approx(-0.5, abs=0.05)
    assert slopes[MUP, "logits"].change.mean > -0.4


def read_row(row: dict[str, str]) -> Coordinate:
    recipe, parametrization, seed, width, step, activation, size, change = row.values()
    return Coordinate(recipe, parametrization, int(seed), int(width), int(step), activation, float(size), float(change))


def test_the_table_of_an_earlier_check_stays(tmp_path: Path) -> None:
    (tmp_path / "coordinates.csv").touch()
    with pytest.raises(ConfigError, match="coordinates.csv is there: give another --output-dir"):
        plan(build_parser().parse_args(["--output-dir", str(tmp_path)]))


def planned(words: str) -> dict[tuple[str, str, int, int], RunConfig]:
    models = plan(build_parser().parse_args(words.split()))
    return {key: flags.parse_with_problems(words)[0].config for key, words in models.items()}


def test_the_smallest_width_is_the_base_of_mup() -> None:
    models = planned("--widths 256 64 --recipes mxfp8 --seeds 2")
    assert list(models)[:2] == [("mxfp8", STANDARD, 1, 64), ("mxfp8", STANDARD, 1, 256)] and len(models) == 8
    wide, control = models["mxfp8", MUP, 2, 256], models["mxfp8", STANDARD, 2, 256]
    assert (wide.model.mup_base_hidden_size, wide.model.mup_base_head_dim) == (64, 32)
    assert (wide.model.num_attention_heads, wide.model.ffn_hidden_size, wide.training.seed) == (8, 1024, 2)
    assert not control.model.use_mup and control.precision == wide.precision and wide.precision.fp8_recipe == "mxfp8"


def test_heads_may_grow_instead_of_their_number() -> None:
    wide = planned("--widths 64 256 --recipes bf16 -- --num-attention-heads 2")["bf16", MUP, 1, 256].model
    assert (wide.num_attention_heads, wide.mup_base_head_dim) == (2, 32)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--widths 64", "give at least two"),
        ("--seeds 0", "--seeds 0: must be at least 1"),
        ("--steps 1", "--steps 1: must be at least 2"),
        ("--recipes fp7", "fp7: unknown"),
        ("-- --hidden-size 64", "--hidden-size after --: set by the check"),
        ("-- --num-experts 4", "--num-experts is not supported with --use-mup"),
        ("--widths 48 96", "--widths 48: no multiple of 32"),
        ("--widths 0 64", "--widths 0: must be at least 1"),
        ("-- --mup-base-head-dim 7", "--mup-base-head-dim after --: set by the check"),
    ],
)
def test_wrong_flags(words: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        plan(build_parser().parse_args(words.split()))
