"""The guard: silent in clean runs, warns of planted faults, and moves a layer to high precision on all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Optional

import pytest
import torch
from planted_runs import train_with
from ranks import run_ranks
from small_run import build_run, fingerprint, small_config, weights

from benchmarks.guard_calibration import FAULTS, planted, statistics_of
from benchmarks.layer_faults import Fault
from megafp8.analysis.runs import load_run
from megafp8.checkpoint.metadata import extension_states, load_common_state
from megafp8.checkpoint.progress import SMOOTHED, Progress
from megafp8.metrics.layer_statistics import GRADIENT_SNR, GROWTH, INPUT_STATISTICS, LIMITS
from megafp8.metrics.records import GuardRecord
from megafp8.metrics.sinks.jsonl import current_records, read_records
from megafp8.models.layer_runtime import emulated_linears_by_name
from megafp8.resilience import fault_injection
from megafp8.training.evaluation import build_batches
from megafp8.training.extensions.guard import (
    ALL_LAYERS,
    Key,
    Trends,
    layer_warnings,
    mean_warnings,
    recorded,
    updated_trends,
)

RECIPES = {
    "tensorwise": "--bf16 --fp8-format hybrid --fp8-recipe tensorwise",
    "delayed": (
        "--bf16 --fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 8 --fp8-amax-compute-algo max "
        "--fp8-delayed-start te"
    ),
    "blockwise": "--bf16 --fp8-format e4m3 --fp8-recipe blockwise",
}
LOOP = "--lr-warmup-iters 1 --eval-iters 0 --no-progress-bar --save-interval 100"
EVERY_SECOND_STEP = "--fp8-guard-interval 2 --fp8-guard"
OUTLIERS = MappingProxyType({"layers.1.linear_fc2": 3})


def enlarge_channel(values: torch.Tensor) -> None:
    """Make one channel 1000 times as large, in place."""
    values[..., 0] *= 1e3


def add_outliers(run: Any, name: str, first_bad_step: int, enlarge: Callable[[torch.Tensor], None]) -> None:
    """The input of a linear has outliers from a step of this process on."""
    linears, num_passes = dict(emulated_linears_by_name(run.training_state.chunks)), [0]
    if name not in linears:
        return

    def spoil(module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        num_passes[0] += 1
        if num_passes[0] <= (first_bad_step - 1) * run.num_microbatches:
            return args
        spoiled = args[0].clone()
        enlarge(spoiled)
        return (spoiled, *args[1:])

    linears[name].register_forward_pre_hook(spoil)


def run_loop(
    folder: Path,
    flags: str,
    world_size: int = 1,
    first_bad_steps: Mapping[str, int] = OUTLIERS,
    style: str = "llama",
    enlarge: Callable[[torch.Tensor], None] = enlarge_channel,
    fault: Optional[Fault] = None,
) -> list[tuple[Progress, str]]:
    """The training loop with the guard, and with outliers in the inputs of linears from these steps on."""
    config = small_config(style, f"{LOOP} --save {folder} --load {folder} {flags}", world_size)

    def start() -> tuple[Progress, str]:
        run = build_run(config)
        for name, step in first_bad_steps.items():
            add_outliers(run, name, 1 if list(folder.glob("iter_*")) else step, enlarge)
        return train_with(run, fault), fingerprint(weights(run))

    return run_ranks(world_size, start)


def one_step(flags: str) -> dict[Key, float]:
    """The statistics of a step of one rank."""
    config = small_config("llama", flags)

    def find() -> dict[Key, float]:
        run = build_run(config)
        return statistics_of(run, build_batches(run, run.datasets[0], 0, 8, num_workers=0))

    return run_ranks(1, find)[0]


def events(folder: Path) -> list[tuple[int, str, str]]:
    names = ("guard", "layer moved", "layer smoothed")
    return [(e.step, e.name, e.detail) for e in load_run(folder).events if e.name in names]


def guard_state(progress: Progress) -> Mapping[str, Any]:
    return progress.extensions["LayerGuard"]


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_clean_runs_raise_no_alarm(recipe: str, tmp_path: Path) -> None:
    run_loop(tmp_path, f"{recipe} {EVERY_SECOND_STEP} bf16-layer --train-iters 6", first_bad_steps={})
    assert events(tmp_path) == []


def test_every_planted_fault_exceeds_its_limit() -> None:
    def find() -> dict[str, float]:
        run = build_run(small_config("llama", f"{RECIPES['tensorwise']} --qk-layernorm --fp8-guard warn"))
        batches, found = build_batches(run, run.datasets[0], 0, 100 * 8, num_workers=0), {}
        for fault, statistic in FAULTS.items():
            with planted(run, fault, layer=1):
                values = statistics_of(run, batches)
            found[fault] = max(value for (name, _), value in values.items() if name == statistic)
        return found

    (found,) = run_ranks(1, find)
    # With normalized queries and keys their weights cannot inflate the logits, which is why it is a suggestion.
    below = {fault for fault, statistic in FAULTS.items() if found[fault] <= LIMITS[statistic].value}
    assert below == {"inflated QK"}, found


def test_warning_changes_nothing(tmp_path: Path) -> None:
    flags = f"{RECIPES['tensorwise']} --train-iters 4"
    ((_, guarded),) = run_loop(tmp_path / "warn", f"{flags} {EVERY_SECOND_STEP} warn")
    ((_, plain),) = run_loop(tmp_path / "off", flags)
    assert guarded == plain
    found = events(tmp_path / "warn")
    assert found and all(event[:2] == (4, "guard") for event in found)
    assert any(detail.startswith("outlier share of layers.1.linear_fc2.input is ") for *_, detail in found)


def test_weights_in_parts_have_the_alignment_of_complete_ones() -> None:
    """FSDP2's ranks hold rows of a weight."""

    def alignments(flags: str) -> list[dict[str, float]]:
        config = small_config("llama", f"{RECIPES['tensorwise']} --fp8-guard warn {flags}", 2)

        def find() -> dict[str, float]:
            run = build_run(config)
            values = statistics_of(run, build_batches(run, run.datasets[0], 0, 8, num_workers=0))
            return {layer: value for (name, layer), value in values.items() if name == "SwiGLU alignment"}

        return run_ranks(2, find)

    complete = alignments("--no-use-distributed-optimizer")
    assert min(complete[0].values()) > 0
    for gather in ("", "--fp8-param-gather"):
        assert alignments(f"--use-torch-fsdp2 --no-gradient-accumulation-fusion {gather}") == complete


def test_logits_are_those_of_the_scale_and_cap_of_the_run() -> None:
    def bound(flags: str) -> float:
        return one_step(f"{RECIPES['tensorwise']} --fp8-guard warn {flags}")["attention logits", "layers.0"]

    scaled = 4 * bound("")  # 16 channels per head
    assert bound("--softmax-scale 1") == pytest.approx(scaled)
    capped = bound("--softmax-scale 1 --attention-logit-softcapping 20")
    assert capped == pytest.approx(20 * math.tanh(scaled / 20)) and capped < scaled


def test_run_in_bf16_is_warned(tmp_path: Path) -> None:
    """Of what does not depend on quantization."""
    flags, fault = f"--bf16 {EVERY_SECOND_STEP} warn --train-iters 22", Fault("inflated-qk", first_step=18, growth=8)
    ((progress, _),) = run_loop(tmp_path, flags, first_bad_steps={}, style="gpt2", fault=fault)
    found = events(tmp_path)
    assert found and all(detail.startswith(("attention logits of layers.", MEAN)) for *_, detail in found)
    assert {statistic for statistic, *_ in guard_state(progress)["layer_trends"]} == set(GROWTH)


MEAN = "attention logits of all layers grew from "


def run_inflated_qk(folder: Path, warmup_steps: int, flags: str = "") -> Progress:
    """A run in BF16 whose attention logits grow from step 18 on, but not beyond the fixed limit."""
    flags = f"--bf16 {EVERY_SECOND_STEP} warn --train-iters 31 --lr-warmup-iters {warmup_steps} {flags}"
    fault = Fault("inflated-qk", first_step=18, growth=1.7)
    ((progress, _),) = run_loop(folder, flags, first_bad_steps={}, style="gpt2", fault=fault)
    return progress


def is_growth(values: Mapping[int, float], step: int) -> bool:
    """Whether the largest logits of a step are an alarm beside those of two statistics steps before."""
    limit = GROWTH["attention logits"][1]
    return (
        limit.floor < values[step] < LIMITS["attention logits"].value and values[step] > limit.factor * values[step - 4]
    )


def test_growth_in_the_warmup_is_no_alarm(tmp_path: Path) -> None:
    after = run_inflated_qk(tmp_path / "after", warmup_steps=1)
    assert any(" grew from " in detail for *_, detail in events(tmp_path / "after"))
    assert guard_state(after)["layer_trends"]
    within = run_inflated_qk(tmp_path / "within", warmup_steps=11)
    assert events(tmp_path / "within") == [] and within.extensions == {}
    values = logits(tmp_path / "within")
    assert all(is_growth(values, step) for step in (26, 28, 30))


def test_growth_is_compared_with_values_20_steps_after_the_warmup(tmp_path: Path) -> None:
    """Also in a run that is interrupted before and after the first of these values."""
    straight = run_inflated_qk(tmp_path / "straight", warmup_steps=5)
    found, values = events(tmp_path / "straight"), logits(tmp_path / "straight")
    assert all(is_growth(values, step) for step in (26, 28, 30))
    assert found and min(step for step, *_ in found) == 28, "step 26 has the first value that others are compared with"
    for interval in (19, 27):
        folder = tmp_path / f"resumed_after_{interval}"
        run_inflated_qk(folder, 5, f"--exit-interval {interval}")
        resumed = run_inflated_qk(folder, 5)
        assert resumed == straight and events(folder) == found


def test_fixed_limits_hold_in_the_warmup(tmp_path: Path) -> None:
    run_loop(tmp_path, f"{RECIPES['tensorwise']} {EVERY_SECOND_STEP} warn --lr-warmup-iters 5 --train-iters 6")
    assert min(step for step, *_ in events(tmp_path)) == 4


def guard_records(folder: Path) -> list[GuardRecord]:
    """Those of a run, without the ones that a resumption repeated."""
    records = current_records(read_records(folder / "records.jsonl"))
    return [record for record in records if isinstance(record, GuardRecord)]


def logits(folder: Path) -> dict[int, float]:
    """The largest attention logits of a run by step, from its records."""
    return {record.step: max(record.statistics["attention logits"].values()) for record in guard_records(folder)}


@pytest.mark.parametrize("flags", ["", "--tensor-model-parallel-size 2"])
def test_statistics_are_recorded(flags: str, tmp_path: Path) -> None:
    """Every statistics step has a record, once, also where a resumption repeats it."""
    world_size = 2 if flags else 1
    command = f"{RECIPES['tensorwise']} {flags} {EVERY_SECOND_STEP} warn --train-iters 6"
    run_loop(tmp_path / "straight", command, world_size, {})
    run_loop(tmp_path / "resumed", f"{command} --exit-interval 3", world_size, {})
    run_loop(tmp_path / "resumed", command, world_size, {})
    records = guard_records(tmp_path / "straight")
    assert [record.step for record in records] == [2, 4, 6]
    assert guard_records(tmp_path / "resumed") == records
    # The moments have too few updates yet.
    assert all(set(record.statistics) == set(LIMITS) - {GRADIENT_SNR} for record in records)
    for statistic, values in records[0].statistics.items():
        ends = [f".linear_{kind}.input" for kind in ("qkv", "proj", "fc1", "fc2")]
        ends = ends if statistic in INPUT_STATISTICS else [""]
        assert set(values) == {f"layers.{layer}{end}" for layer in (0, 1) for end in ends}
        assert all(0 <= value < math.inf for value in values.values())
    # What was not taken has no entry.
    assert recorded({("residual", "layers.0"): 1.23456789, ("residual", "layers.1"): -1.0}) == {
        "residual": {"layers.0": 1.23457}
    }


@pytest.mark.parametrize("layout", ["--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"])
def test_layer_moves_on_all_ranks(layout: str, tmp_path: Path) -> None:
    flags = f"{RECIPES['delayed']} {layout} {EVERY_SECOND_STEP} bf16-layer --train-iters 6"
    answers = run_loop(tmp_path, flags, 2)
    linears = [[linear.name for linear in progress.history.moved_linears] for progress, _ in answers]
    names = [f"layers.1.linear_{kind}" for kind in ("qkv", "proj", "fc1", "fc2")]
    assert linears == [names, names]
    (moved,) = [event for event in events(tmp_path) if event[1] == "layer moved"]
    assert moved[0] == 4 and moved[2].startswith("layers.1 is in high precision from step 5 on: ")


def test_inputs_of_a_moved_layer_give_no_warning(tmp_path: Path) -> None:
    flags = f"{RECIPES['tensorwise']} {EVERY_SECOND_STEP} bf16-layer --train-iters 6"
    late = {f"layers.{layer}.linear_proj": 5 for layer in (0, 1)}
    run_loop(tmp_path, flags, first_bad_steps=OUTLIERS | late)
    details = {step: [detail for at, _, detail in events(tmp_path) if at == step] for step in (4, 6)}
    assert any("layers.1.linear_fc2.input" in detail for detail in details[4])
    assert any("layers.0.linear_proj.input" in detail for detail in details[6])
    assert not any("layers.1" in detail for detail in details[6])


def test_linears_in_high_precision_are_not_watched() -> None:
    entries = "layers.0.linear_fc1=bf16 layers.1.linear_fc2=bf16 layers.*.linear_qkv:fprop,wgrad=bf16"
    precision = " ".join(f"--precision {entry}" for entry in entries.split())
    values = one_step(f"{RECIPES['tensorwise']} --fp8-guard warn {precision}")
    inputs = {name for statistic, name in values if statistic == "kurtosis"}
    watched = "layers.0.linear_proj layers.0.linear_fc2 layers.1.linear_proj layers.1.linear_fc1"
    assert inputs == {f"{name}.input" for name in watched.split()}
    assert values["SwiGLU alignment", "layers.0"] > 0, "its output is quantized"
    assert values["SwiGLU alignment", "layers.1"] == -1


def test_moved_layer_is_resumed(tmp_path: Path) -> None:
    flags = f"{RECIPES['delayed']} {EVERY_SECOND_STEP} bf16-layer --train-iters 6"
    ((progress, straight),) = run_loop(tmp_path / "straight", flags)
    run_loop(tmp_path / "resumed", f"{flags} --exit-interval 5")
    ((resumed_progress, resumed),) = run_loop(tmp_path / "resumed", flags)
    assert len(progress.history.moved_linears) == 4
    assert (progress, straight) == (resumed_progress, resumed), "to the bit"


def test_resumed_run_warns_of_nothing_again(tmp_path: Path) -> None:
    flags = f"{RECIPES['tensorwise']} {EVERY_SECOND_STEP} warn --train-iters 6"
    run_loop(tmp_path / "resumed", f"{flags} --exit-interval 5")
    before = events(tmp_path / "resumed")
    ((resumed_progress, _),) = run_loop(tmp_path / "resumed", flags)
    ((progress, _),) = run_loop(tmp_path / "straight", flags)
    assert before and events(tmp_path / "resumed") == events(tmp_path / "straight")
    assert progress == resumed_progress and set(guard_state(progress)["warnings"]) >= {
        ("outlier share", "layers.1.linear_fc2.input")
    }


def test_rollback_keeps_the_warnings_and_restores_the_trends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From step 29 to the checkpoint of step 26, and on from step 30. The warning came at step 28."""
    plan = fault_injection.FaultPlan(fault_injection.read_plan("nan:step=29,at=step.loss"), rank=0)
    for name in ("point", "poison"):
        monkeypatch.setattr(fault_injection, name, getattr(plan, name))
    back = "--save-interval 2 --spike-policy rollback --spike-rollback-steps 2 --spike-skip-batches 4 --train-iters 32"
    flags, late = f"{RECIPES['tensorwise']} {EVERY_SECOND_STEP} warn {back}", {"layers.1.linear_fc2": 27}
    ((progress, _),) = run_loop(tmp_path, flags, first_bad_steps=late)
    failed, there, saved = (
        extension_states(load_common_state(tmp_path / name))["LayerGuard"]
        for name in ("iter_0000028.retired", "iter_0000026", "iter_0000030")
    )
    assert failed["warnings"] and not there["warnings"] and failed["layer_trends"] != there["layer_trends"]
    assert saved == {"layer_trends": there["layer_trends"], "warnings": failed["warnings"]}
    assert guard_state(progress)["warnings"][: len(failed["warnings"])] == failed["warnings"]
    details = [detail for _, _, detail in events(tmp_path)]
    assert len(details) == len(guard_state(progress)["warnings"]), "each once"


def test_smoothed_linear_is_resumed(tmp_path: Path) -> None:
    flags = f"{RECIPES['tensorwise']} {EVERY_SECOND_STEP} smooth-swiglu --train-iters 25"
    ((progress, straight),) = run_loop(tmp_path / "straight", flags)
    run_loop(tmp_path / "resumed", f"{flags} --exit-interval 23")
    ((resumed_progress, resumed),) = run_loop(tmp_path / "resumed", flags)
    assert [(linear.name, linear.form) for linear in progress.history.moved_linears] == [
        ("layers.1.linear_fc2", SMOOTHED)
    ]
    assert guard_state(progress)["layer_trends"], "growth is compared with the values before the restart"
    assert (progress, straight) == (resumed_progress, resumed), "to the bit"
    ((_, plain),) = run_loop(tmp_path / "warn", flags.replace("smooth-swiglu", "warn"))
    assert plain != straight
    (smoothed,) = [event for event in events(tmp_path / "straight") if event[1] == "layer smoothed"]
    assert smoothed[0] == 4 and smoothed[2].startswith("layers.1.linear_fc2 has a scale per channel from step 5 on: ")


def test_linear_is_smoothed_on_all_ranks(tmp_path: Path) -> None:
    flags = f"{RECIPES['tensorwise']} --tensor-model-parallel-size 2 {EVERY_SECOND_STEP} smooth-swiglu --train-iters 6"
    answers = run_loop(tmp_path, flags, 2)
    assert [[linear.name for linear in progress.history.moved_linears] for progress, _ in answers] == [
        ["layers.1.linear_fc2"]
    ] * 2


def test_a_smoothed_input_is_judged_after_its_scales(tmp_path: Path) -> None:
    """Values that one scale for the tensor would put below the normal numbers are no warning any more."""
    fault = Fault("aligned-swiglu", first_step=3, growth=16)
    flags = f"{RECIPES['tensorwise']} {EVERY_SECOND_STEP} smooth-swiglu --train-iters 8"
    run_loop(tmp_path, flags, first_bad_steps={}, fault=fault)
    found = events(tmp_path)
    smoothed = {detail.split()[0] for step, name, detail in found if (step, name) == (4, "layer smoothed")}
    assert smoothed == {"layers.0.linear_fc2", "layers.1.linear_fc2"}
    assert max(step for step, *_ in found) == 4, found


def test_smoothing_that_does_not_help_is_reported_with_suggestions(tmp_path: Path) -> None:
    """A token with large values has the largest value of every channel."""
    flags = f"{RECIPES['tensorwise']} {EVERY_SECOND_STEP} smooth-swiglu --train-iters 6"

    def enlarge_token(values: torch.Tensor) -> None:
        values[0, 0] *= 1e7

    run_loop(tmp_path, flags, enlarge=enlarge_token)
    before, after = ([event for event in events(tmp_path) if event[0] == step] for step in (4, 6))
    assert any(name == "layer smoothed" and detail.startswith("layers.1.linear_fc2 ") for _, name, detail in before)
    (detail,) = [detail for _, _, detail in after if "linear_fc2" in detail]
    assert detail.startswith("subnormal share of layers.1.linear_fc2.smoothed_input is ")
    assert detail.endswith("; try: --fp8-guard bf16-layer; the layer in high precision with --precision")


def test_growth_is_found_below_the_limit() -> None:
    key, other = ("attention logits", "layers.0"), ("residual", "layers.0")
    trends = {key: (50.0, 100.0), other: (1.0, 1.0)}
    assert [found for found, _ in layer_warnings({key: 199.0, other: 9.0}, trends)] == []  # not four times; small
    ((found, detail),) = layer_warnings({key: 201.0, other: 9.0}, trends)
    assert found == key and detail == "attention logits of layers.0 grew from 50 to 201 in 2 intervals"
    ((_, detail),) = layer_warnings({key: 15.1}, {key: (3.3,)})
    assert detail == "attention logits of layers.0 grew from 3.3 to 15.1 in 1 interval"
    assert list(layer_warnings({key: 201.0}, {})) == []
    assert list(layer_warnings({key: 14.9}, {key: (3.0, 5.0)})) == [], "small"
    assert list(layer_warnings({key: 15.1}, {key: (1.0, 3.4, 6.0)})) == [], (
        "less than 4.5 times the smaller of two values"
    )
    ((_, detail),) = layer_warnings({key: 15.1}, {key: (1.0, 3.3, 6.0)})
    assert detail == "attention logits of layers.0 grew from 3.3 to 15.1 in 2 intervals"
    values = {key: float("inf"), ("kurtosis", "layers.0.linear_qkv.input"): 3.0, other: -1.0}
    assert updated_trends(values, {key: (1.0, 2.0, 3.0, 4.0, 5.0), other: (7.0,)}) == {
        key: (2.0, 3.0, 4.0, 5.0, 3e38), other: (7.0,),
    }  # fmt: skip


def test_growth_of_the_mean_over_the_layers() -> None:
    """That of two layers in 20 steps, which is below the limits of each."""
    keys = [("attention logits", f"layers.{layer}") for layer in range(2)]
    trends = dict.fromkeys(keys, (1.0, 4.0, 5.0))

    def found(now: tuple[float, ...], interval: int, trends: Trends = trends) -> list[tuple[Key, str]]:
        return list(mean_warnings(dict(zip(keys, now, strict=False)), trends, interval))

    text = "attention logits of all layers grew from {} to 12.8 in 20 steps"
    assert found((11.0, 15.0), 20) == [(("attention logits", ALL_LAYERS), text.format(5))]
    assert found((11.0, 15.0), 10) == [(("attention logits", ALL_LAYERS), text.format(4))]
    assert found((10.0, 15.4), 20) == [], "2.48 times"
    assert found((9.0, 11.0), 20, dict.fromkeys(keys, (1.0,))) == [], "below 10"
    assert found((100.0,), 20) == [], "one layer"
    assert found((100.0, -1.0), 20) == [], "the other one was not taken"
    assert found((100.0, 100.0), 20, {}) == []
    assert found((math.inf, 10.0), 20)[0][1].endswith("to inf in 20 steps")
