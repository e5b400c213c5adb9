import json
import math
import re

import pytest

from megafp8.analysis import tables
from megafp8.analysis.compare import compare_runs
from megafp8.analysis.runs import Unfinished, load_run, load_runs
from megafp8.errors import DataError


@pytest.fixture
def pair(write_run):
    baseline = write_run(
        "bf16",
        [4.0] * 8,
        validations={4: 3.0, 8: 2.0},
        speeds=[1.0] * 2 + [100.0, 100.0, 100.0, 110.0, 90.0, 500.0],
        step_fields={"memory_peak_bytes": 3 * 2**20, "model_tflops_per_device": 400.0},
    )
    fp8 = write_run(
        "fp8",
        [4.0] * 8,
        validations={8: 2.01},
        speeds=[1.0] * 2 + [150.0] * 6,
        step_fields={"memory_peak_bytes": 2 * 2**20},
        recipe="fp8 hybrid tensorwise",
        config={"precision": {"fp8_format": "hybrid"}, "checkpoint": {"save": "elsewhere"}},
    )
    return load_runs([baseline, fp8])


def test_gap_speed_and_memory(pair) -> None:
    comparison = compare_runs(pair, warmup_steps=2)
    base, fp8 = comparison.rows
    assert (base.name, base.recipe, base.steps, base.consumed_tokens) == ("bf16", "bf16", 8, 8000)
    assert (base.relative_gap_fraction, base.speed_ratio, base.tokens_per_second) == (0.0, 1.0, 100.0)
    assert (base.model_tflops_per_device, base.memory_peak_bytes) == (400.0, 3 * 2**20)
    assert fp8.relative_gap_fraction == pytest.approx(0.005)
    assert fp8.perplexity == pytest.approx(math.exp(2.01))
    assert (fp8.tokens_per_second, fp8.speed_ratio) == (150.0, 1.5)
    assert fp8.model_tflops_per_device is None


@pytest.mark.parametrize(
    ("recipe", "is_diverged", "verdict"),
    [("fp8", True, "beyond"), ("fp8", False, "not decided"), ("bf16", True, "not decided")],
)
def test_a_failed_seed_is_not_hidden_by_finished_ones(write_run, recipe: str, is_diverged: bool, verdict: str) -> None:
    seeds = {seed: {"seed": seed} for seed in (1, 2)}
    folders = [
        write_run(f"{name}/seed{seed}", [4.0] * 8, validations={8: 2.0}, recipe=name, config={"training": seeds[seed]})
        for name in ("bf16", "fp8") for seed in (1, 2)
    ]  # fmt: skip
    runs = load_runs(folders)
    assert [row.verdict for row in compare_runs(runs, baseline="bf16").recipes] == ["", "within"]
    reason = "step 7: loss is not finite"
    failed = Unfinished(recipe=recipe, name=f"{recipe}/seed3", reason=reason, is_diverged=is_diverged)
    comparison = compare_runs(runs, baseline="bf16", unfinished=[failed])
    assert [row.verdict for row in comparison.recipes] == ["", verdict]
    assert comparison.warnings == (f"{recipe}/seed3 is not done and not in the figures: step 7: loss is not finite",)


def test_a_recipe_without_a_finished_run_has_a_row(pair) -> None:
    reasons = {"mxfp8/seed1": "died at step 3", "mxfp8/seed2": "it never began"}
    waiting = [Unfinished(recipe="mxfp8", name=name, reason=reason) for name, reason in reasons.items()]
    gone = Unfinished(recipe="nvfp4", name="nvfp4", reason="step 7: loss is not finite", is_diverged=True)
    comparison = compare_runs(pair, unfinished=[*waiting, gone])
    assert {row.name: row.verdict for row in comparison.recipes[2:]} == {"mxfp8": "not decided", "nvfp4": "beyond"}
    text = tables.to_text(comparison)
    cells = {line.split()[0]: line.split() for line in text.splitlines()[4:8]}
    assert cells["mxfp8"][1:] == ["0/2", "-", "-", "not", "decided", "-", "-"]
    assert cells["nvfp4"][1] == "0/1" and "beyond" in cells["nvfp4"]
    content = json.loads(tables.to_json(comparison))
    assert content["recipes"][2]["validation_loss"] is None and content["recipes"][2]["num_missing"] == 2
    assert [each["name"] for each in content["unfinished"]] == ["mxfp8/seed1", "mxfp8/seed2", "nvfp4"]
    for output in (text, tables.to_markdown(comparison)):
        assert "mxfp8/seed2 is not done and not in the figures: it never began" in output


def test_a_control_is_labelled_control_for_any_gap(write_run) -> None:
    names = ("bf16", "bf16-control")
    folders = [
        write_run(f"{name}/seed{seed}", [4.0] * 8, validations={8: 2.0 + 0.001 * (name == names[1]) * seed},
                  config={"training": {"seed": seed, "micro_batch_size": names.index(name)}})
        for name in names for seed in (1, 2)
    ]  # fmt: skip
    comparison = compare_runs(load_runs(folders))
    assert [row.verdict for row in comparison.recipes] == ["", "control"]
    for output in (tables.to_text(comparison), tables.to_markdown(comparison)):
        assert " control " in output and " within " not in output.split("\n\n")[0]
        assert "In one seed they differ by up to 0.10%" in output


def test_skipped_steps_are_reported(write_run) -> None:
    skipping = write_run("a", [1.0] * 4, validations={4: 1.0}, step_fields={"is_skipped": True})
    comparison = compare_runs(load_runs([skipping, write_run("b", [1.0] * 4, validations={4: 1.0})]))
    assert comparison.warnings == ("a left its weights as they were in 4 of its steps",)


def test_runs_of_other_lengths_have_no_verdict(write_run) -> None:
    seeds = {seed: {"seed": seed} for seed in (1, 2)}
    folders = [
        write_run(f"{name}/seed{seed}", [4.0] * 8, validations={at: 2.0}, recipe=name, config={"training": seeds[seed]})
        for name, at in (("bf16", 8), ("fp8", 4)) for seed in (1, 2)
    ]  # fmt: skip
    assert [row.verdict for row in compare_runs(load_runs(folders)).recipes] == ["", "not decided"]


def test_another_baseline_inverts_the_signs(pair) -> None:
    comparison = compare_runs(pair, baseline="fp8", warmup_steps=2)
    assert comparison.baseline == "fp8"
    assert comparison.rows[0].relative_gap_fraction == pytest.approx(-0.01 / 2.01)
    assert comparison.rows[0].speed_ratio == pytest.approx(100 / 150)
    with pytest.raises(DataError, match=r"baseline 'x' is none of the runs; they are bf16, fp8"):
        compare_runs(pair, baseline="x")


def test_warm_up_takes_at_most_50_percent_of_a_run(write_run) -> None:
    run = load_run(write_run("a", [1.0] * 4, validations={4: 1.0}, speeds=[1.0, 1.0, 7.0, 7.0]))
    assert compare_runs([run], warmup_steps=100).rows[0].tokens_per_second == 7.0


def test_differences_are_listed_without_output_paths(pair) -> None:
    assert compare_runs(pair).differences == ("fp8: precision.fp8_format: None -> hybrid",)
    assert compare_runs(pair).warnings == ()


def test_unpaired_runs_give_a_warning(write_run) -> None:
    runs = load_runs(
        [
            write_run("a", [1.0] * 4, validations={4: 1.0}),
            write_run("b", [1.0] * 3, validations={3: 1.0}, num_eval_tokens=400, device_name="NVIDIA H200"),
        ]
    )
    comparison = compare_runs(runs)
    assert comparison.differences == ("b: devices: 1 x cpu -> 1 x NVIDIA H200",)
    assert comparison.warnings[0].startswith("b was last validated after 3,000 tokens, a after 4,000")
    assert comparison.warnings[1].startswith("b was validated on 400 tokens, a on 500")


def test_a_run_without_validation_is_an_error(write_run) -> None:
    runs = load_runs([write_run("a", [1.0], validations={1: 1.0}), write_run("b", [1.0])])
    with pytest.raises(DataError, match="run b .* no validation"):
        compare_runs(runs)
    with pytest.raises(DataError, match="nothing to compare"):
        compare_runs([])


def test_text_columns_are_aligned(pair) -> None:
    lines = tables.to_text(compare_runs(pair, warmup_steps=2)).splitlines()
    assert lines[0].startswith("One seed, so no interval: fp8 +0.50%")
    header, rule, base, fp8 = lines[2:6]
    assert " ".join(header.split()) == ("run validation loss gap bound 0.5% training gap recipe perplexity")
    assert lines[7].split()[0] == "run" and max(map(len, lines[1:11])) <= tables.MAX_COLUMNS
    assert base.index("baseline") + len("baseline") == fp8.index("+0.50%") + len("+0.50%")
    assert len(rule) == len(header) == len(base) == len(fp8)
    assert "1.50x" in lines[10]
    assert lines[12].startswith("One seed gives no interval")
    assert lines[13] == "fp8: precision.fp8_format: None -> hybrid"


def test_markdown_is_a_table(pair) -> None:
    lines = tables.to_markdown(compare_runs(pair)).splitlines()
    assert len({line.count("|") for line in lines[2:6]}) == 1
    assert re.match(r"\|-+\|-+:\|-+:\|", lines[3])
    assert "- fp8: precision.fp8_format: None -> hybrid" in lines


def test_unmeasured_columns_are_omitted(write_run) -> None:
    text = tables.to_text(compare_runs([load_run(write_run("a", [1.0], validations={1: 1.0}))]))
    assert "TFLOP/s" not in text
    assert "MiB" not in text


def test_json_is_strict_although_a_run_diverged(write_run) -> None:
    runs = load_runs(
        [write_run("a", [1.0], validations={1: 1.0}), write_run("b", [1.0], validations={1: float("nan")})]
    )
    content = json.loads(tables.to_json(compare_runs(runs)), parse_constant=lambda text: pytest.fail(text))
    assert content["baseline"] == "a"
    assert content["rows"][1]["validation_loss"] is None
    assert "nan" in tables.to_text(compare_runs(runs))
