"""Precision maps in complete runs: each linear has the recipe of the map in every layout; and precision schedules."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from megatron.core.utils import unwrap_model
from ranks import run_ranks
from small_run import (
    FOUR_LAYERS,
    VIRTUAL,
    build_run,
    curve_of,
    fingerprint,
    small_config,
    statistics_record_of,
    train,
    weights,
)
from test_calibration import calibrations
from test_checkpoint import PIPELINE, TENSOR, load_newest
from test_loop import curves as curves_of_records
from test_loop import run_loop
from test_quantizer_state import DELAYED, quantizer_states

from megafp8.analysis.runs import load_run
from megafp8.checkpoint.progress import HighPrecisionFallback, Progress
from megafp8.checkpoint.save import save_checkpoint
from megafp8.config import precision_map
from megafp8.config.schema import RunConfig
from megafp8.mcore.modules import named_linears
from megafp8.models.emulated_layers import emulated_linears
from megafp8.quantization.delayed_scaling import DelayedState
from megafp8.recipes import blockwise, mxfp8, tensorwise
from megafp8.recipes.base import OPERANDS_OF, Gemm, LinearRecipe
from megafp8.training.evaluation import evaluate
from megafp8.training.extensions.calibration import calibrate, needs_calibration
from megafp8.training.extensions.precision_schedule import changes_at
from megafp8.training.extensions.statistics import StatisticsCollector
from megafp8.training.run import Run

BF16 = "--bf16 --micro-batch-size 2"
TENSORWISE = f"{BF16} --fp8-format hybrid --fp8-recipe tensorwise"
MAP = (
    f"{FOUR_LAYERS} --precision *.linear_fc2=blockwise/e4m3 layers.1-2.*:dgrad,wgrad=bf16 "
    "layers.3.linear_qkv:dgrad=mxfp8/e4m3"
)
MIXED = (
    f"{DELAYED} {FOUR_LAYERS} --precision layers.0.*=bf16 layers.1.*:dgrad=nvfp4 layers.2.linear_fc1=mxfp8 "
    "output_layer=delayed layers.3.linear_fc2:wgrad=bf16"
)


def run_linears(run: Run) -> dict[str, object]:
    return {name: each for chunk in unwrap_model(run.training_state.chunks) for name, each in named_linears(chunk)}


# ---- the map ------------------------------------------------------------------------------------------------------


def composed(fprop: LinearRecipe, dgrad: LinearRecipe | None, wgrad: LinearRecipe | None) -> LinearRecipe:
    """By hand."""
    parts = {Gemm.FPROP: fprop, Gemm.DGRAD: dgrad, Gemm.WGRAD: wgrad}
    rules = [
        (operand, gemm, None if parts[gemm] is None else parts[gemm].rule(operand, gemm))
        for gemm, operands in OPERANDS_OF
        for operand in operands
    ]
    return LinearRecipe(name="by hand", rules=tuple(rules))


def by_hand(config: RunConfig, num_steps: int) -> list[float]:
    """A run without a map whose linears get the map's recipes one by one."""
    tensor, block = tensorwise.build("hybrid"), blockwise.build("e4m3")
    run = build_run(config)
    for name, linear in run_linears(run).items():
        own = block if name.endswith("fc2") else tensor
        if name.startswith(("layers.1.", "layers.2.")):
            linear.recipe = composed(own, None, None)
        elif name == "layers.3.linear_qkv":
            linear.recipe = composed(tensor, mxfp8.build("e4m3"), tensor)
        else:
            linear.recipe = own
    return train(run, num_steps).losses


def test_precision_map_equals_linears_configured_by_hand() -> None:
    mapped = run_ranks(1, curve_of, small_config("llama", f"{TENSORWISE} {MAP}"), 3)[0]
    expected = run_ranks(1, by_hand, small_config("llama", f"{TENSORWISE} {FOUR_LAYERS}"), 3)[0]
    plain = run_ranks(1, curve_of, small_config("llama", f"{TENSORWISE} {FOUR_LAYERS}"), 3)[0]
    assert mapped.losses == expected
    assert all(a != b for a, b in zip(mapped.losses, plain.losses, strict=True))


def recipes_here(config: RunConfig) -> dict[str, str | None]:
    found = {name: getattr(linear, "recipe", None) for name, linear in run_linears(build_run(config)).items()}
    return {name: None if recipe is None else recipe.name for name, recipe in found.items()}


@pytest.mark.parametrize("flags", [TENSOR, PIPELINE, VIRTUAL], ids=["tp2-sp", "pp2", "pp2-virtual2"])
def test_precision_map_is_the_same_in_every_layout(flags: str) -> None:
    """Layers are numbered over the complete model, on every stage and chunk."""
    config = small_config("llama", f"{MIXED} {flags}", 2)
    chosen = precision_map.resolve(config.model, config.precision)
    expected = {
        name: None if not choice.is_quantized
        else choice.recipes[0] if len(set(choice)) == 1
        else "/".join(each.recipe or "high" for each in choice)
        for name, choice in chosen.items()
    }  # fmt: skip
    ranks = run_ranks(2, recipes_here, config)
    assert {name: recipe for rank in ranks for name, recipe in rank.items()} == expected
    assert sum(map(len, ranks)) == len(expected) * (2 if flags == TENSOR else 1)


@pytest.mark.parametrize("style", ["llama", "gpt2"])
def test_quantized_output_layer_learns(style: str) -> None:
    """With its own weight, and with the embedding's, whose gradient has contributions from both."""
    quantized = run_ranks(1, curve_of, small_config(style, f"{BF16} --precision output_layer=tensorwise"), 3)[0]
    plain = run_ranks(1, curve_of, small_config(style, f"{BF16} --transformer-impl emulated"), 3)[0]
    for ours, theirs in zip(quantized.losses + quantized.grad_norms, plain.losses + plain.grad_norms, strict=True):
        assert ours != theirs and ours == pytest.approx(theirs, rel=3e-2)


def resumed(config: RunConfig, num_steps: int, first_step: int, folder: Path | None, save: Path | None) -> list:
    """Losses, weights and quantizer states of some steps, from a checkpoint if one is given."""
    run = build_run(config)
    if folder is not None:
        load_newest(run, folder)
    losses: list[float] = []
    for step in range(first_step, first_step + num_steps):
        progress = Progress(step - 1, (step - 1) * run.global_batch_size)
        if changes_at(run.config.precision, step) and needs_calibration(run, step):
            calibrate(run, progress)
        losses += train(run, 1, first_step=step).losses
    if save is not None:
        last = first_step + num_steps - 1
        save_checkpoint(save, config, run.training_state, Progress(last, last * run.global_batch_size))
    return [losses, fingerprint(weights(run)), fingerprint(quantizer_states(run))]


def test_resume_is_bit_equal(tmp_path: Path) -> None:
    size = 2
    config = small_config("gpt2", f"{MIXED} {TENSOR}", size)
    whole = run_ranks(size, resumed, config, 4, 1, None, None)
    first = run_ranks(size, resumed, config, 2, 1, None, tmp_path)
    second = run_ranks(size, resumed, config, 2, 3, tmp_path, None)
    for unbroken, before, after in zip(whole, first, second, strict=True):
        assert [before[0] + after[0], *after[1:]] == unbroken


def test_fp8_weights_with_several_recipes() -> None:
    flags = (
        f"{TENSORWISE} {FOUR_LAYERS} --use-distributed-optimizer --precision *.linear_fc2=blockwise layers.0.*=bf16 "
        "layers.1.*:wgrad=mxfp8 layers.2.linear_fc1=delayed output_layer=mxfp8"
    )
    plain = run_ranks(2, curve_of, small_config("llama", flags, 2), 3)
    assert run_ranks(2, curve_of, small_config("llama", f"{flags} --fp8-param-gather", 2), 3) == plain


def recipes_of_statistics(config: RunConfig) -> tuple[dict[str, str], set[str], dict[str, str]]:
    found = statistics_record_of(build_run(config))
    assert found is not None
    formats = {name: stats.format for name, stats in found.tensors.items()}
    return found.recipes, set(found.tensors), formats


@pytest.mark.parametrize("style", ["llama", "gpt2"])
def test_statistics_have_the_recipe_of_each_linear(style: str) -> None:
    flags = f"{TENSORWISE} {MAP} --fp8-log-interval 1 --precision output_layer=mxfp8/e4m3 layers.0.*=bf16"
    recipes, tensors, formats = run_ranks(1, recipes_of_statistics, small_config(style, flags))[0]
    assert recipes["layers.3.linear_qkv"] == "tensorwise/mxfp8/tensorwise"
    assert recipes["layers.3.linear_fc2"] == "blockwise" and "layers.3.linear_fc1" not in recipes
    assert not any(name.startswith("layers.0.") for name in tensors)
    assert {name for name in tensors if name.startswith("layers.1.linear_qkv.")} == {
        "layers.1.linear_qkv.input.row", "layers.1.linear_qkv.weight.row"
    }  # fmt: skip
    assert formats["layers.3.linear_qkv.grad_output.row"] == "e4m3"
    assert formats["layers.3.linear_qkv.grad_output.column"] == "e5m2"
    assert {"output_layer.input.row", "output_layer.weight.column", "output_layer.grad_output.row"} <= tensors


# ---- the schedule -------------------------------------------------------------------------------------------------


def curves(config: RunConfig, num_steps: int) -> list[float]:
    return resumed(config, num_steps, 1, None, None)[0]


def test_precision_schedule_entries_start_at_their_steps() -> None:
    def curve(flags: str) -> list[float]:
        return run_ranks(1, curves, small_config("llama", flags), 4)[0]

    high, low = curve(BF16), curve(TENSORWISE)
    first, second = (curve(f"{TENSORWISE} --fp8-schedule {text}") for text in ("bf16:2,fp8:3,bf16", "fp8:2,bf16"))
    assert first[:2] == high[:2] and first[2] not in (high[2], low[2])
    assert second[:2] == low[:2] and second[2] not in (low[2], high[2])


@pytest.mark.parametrize("style", ["llama", "gpt2"])
def test_high_precision_steps_equal_plain_layers_on_two_ranks(style: str) -> None:
    """Activations are gathered in BF16, and biases are added afterwards. The third step is quantized."""
    flags = f"{TENSOR} --precision output_layer=mxfp8 --fp8-schedule bf16:2,fp8"
    scheduled = run_ranks(2, curves, small_config(style, f"{TENSORWISE} {flags}", 2), 3)[0]
    plain = run_ranks(2, curves, small_config(style, f"{BF16} {TENSOR}", 2), 3)[0]
    assert scheduled[:2] == plain[:2] and scheduled[2] != plain[2]


def test_high_precision_steps_keep_the_quantizer_state() -> None:
    def body() -> list[str]:
        run = build_run(small_config("llama", f"{MIXED} --fp8-schedule fp8:2,bf16:4,fp8"))
        found = []
        for step in range(1, 6):
            train(run, 1, first_step=step)
            found.append(fingerprint(quantizer_states(run)))
        return found

    one, two, three, four, five = run_ranks(1, body)[0]
    assert one != two == three == four != five


@functools.cache
def unbroken() -> tuple[RunConfig, list]:
    """Without a stop."""
    config = small_config("llama", f"{DELAYED} --fp8-schedule bf16:1,fp8:3,bf16:5,fp8")
    return config, run_ranks(1, resumed, config, 6, 1, None, None)[0]


@pytest.mark.parametrize("at", [1, 2, 4])
def test_resume_within_each_schedule_entry_is_bit_equal(at: int, tmp_path: Path) -> None:
    config, whole = unbroken()
    before = run_ranks(1, resumed, config, at, 1, None, tmp_path)[0]
    after = run_ranks(1, resumed, config, 6 - at, at + 1, tmp_path, None)[0]
    assert [before[0] + after[0], *after[1:]] == whole


PHASES = "fp8:1,fp8[layers.1.*=bf16]:2,fp8[*:fprop=bf16;layers.0.*=bf16]:4,fp8"


@pytest.mark.parametrize(
    ("recipe", "entries"),
    [
        (TENSORWISE, "*:fprop=bf16"),
        (TENSORWISE, "*.linear_fc2=mxfp8/e4m3 layers.1.*=bf16"),
        (f"{BF16} --fp4-format e2m1", "*:fprop=bf16 layers.1.*:wgrad=bf16"),
        (TENSORWISE, "*:dgrad,wgrad=bf16"),
    ],
)
def test_a_phase_computes_as_a_run_with_its_map(recipe: str, entries: str, tmp_path: Path) -> None:
    """From the same checkpoint. The phases before and after it are those of a run without entries."""
    family = "fp4" if "fp4" in recipe else "fp8"
    schedule = f"{family}:2,{family}[{';'.join(entries.split())}]:4,{family}"
    config = small_config("llama", f"{recipe} --fp8-schedule {schedule}")
    mapped = small_config("llama", f"{recipe} --precision {entries}")
    plain = small_config("llama", recipe)
    whole = run_ranks(1, resumed, config, 5, 1, None, None)[0]
    parts = [
        run_ranks(1, resumed, plain, 2, 1, None, tmp_path / "two")[0],
        run_ranks(1, resumed, mapped, 2, 3, tmp_path / "two", tmp_path / "four")[0],
        run_ranks(1, resumed, plain, 1, 5, tmp_path / "four", None)[0],
    ]
    assert whole == [[loss for part in parts for loss in part[0]], *parts[-1][1:]]
    assert parts[1][0] != run_ranks(1, resumed, plain, 2, 3, tmp_path / "two", None)[0][0]


@pytest.mark.parametrize(("layout", "size"), [("", 1), (PIPELINE, 2)])
def test_delayed_scaling_of_a_phase_equals_linears_moved_to_high_precision(layout: str, size: int) -> None:
    """Updates of the others do not wait for linears that pause, whose histories stay and are used afterwards."""
    flags = f"{DELAYED} {FOUR_LAYERS} {layout}"

    def scheduled() -> list:
        run = build_run(small_config("llama", f"{flags} --fp8-schedule fp8:2,fp8[layers.1.*=bf16]:4,fp8", size))
        losses, states = train(run, 2).losses, [state_of(run, "layers.1.linear_fc1")]
        losses += train(run, 2, first_step=3).losses
        states, all_states = [*states, state_of(run, "layers.1.linear_fc1")], fingerprint(quantizer_states(run))
        train(run, 1, first_step=5)
        return [losses, all_states, *states, state_of(run, "layers.1.linear_fc1")]

    def moved() -> list:
        run = build_run(small_config("llama", flags, size))
        losses = train(run, 2).losses
        names = [f"layers.1.{name}" for name in precision_map.LINEARS]
        run.change_linears([HighPrecisionFallback(name, 2, "") for name in names])
        return [losses + train(run, 2, first_step=3).losses, fingerprint(quantizer_states(run))]

    for here, there in zip(run_ranks(size, scheduled), run_ranks(size, moved), strict=True):
        assert here[:2] == there
        before, paused, after = here[2:]
        assert before == paused and (before is None or paused != after)


def test_scales_that_a_phase_lacks_are_calibrated() -> None:
    def body() -> list[bool]:
        run = build_run(small_config("llama", f"{DELAYED} --fp8-schedule fp8[layers.1.*=bf16]:2,fp8"))
        train(run, 2)
        found = [needs_calibration(run, step) for step in (2, 3)]
        calibrate(run, Progress(2, 2 * run.global_batch_size))
        return [*found, needs_calibration(run, 3)]

    assert run_ranks(1, body) == [[False, True, False]]


FPROP = "fp8:2,fp8[layers.*:fprop=bf16]"


def test_a_phase_may_take_delayed_scaling_from_a_linear_with_random_rounding() -> None:
    """The random numbers and the amax history of a linear are one state."""
    flags = f"{DELAYED} --precision layers.*:dgrad,wgrad=nvfp4"

    def body(flags: str) -> list[float]:
        return train(build_run(small_config("llama", flags)), 4).losses

    plain, phased = (run_ranks(1, body, each)[0] for each in (flags, f"{flags} --fp8-schedule {FPROP}"))
    assert plain[:2] == phased[:2] and plain[2:] != phased[2:]


def state_of(run: Run, name: str) -> str | None:
    """Of a linear's delayed scaling; None on ranks that do not have it."""
    linear = run_linears(run).get(name)
    return None if linear is None else fingerprint(dict(linear.quantizer_state.named_buffers()))


@pytest.mark.parametrize("at", [1, 2, 3])
def test_resume_within_each_phase_of_the_map_is_bit_equal(at: int, tmp_path: Path) -> None:
    config = small_config("llama", f"{DELAYED} --fp8-schedule {PHASES}")
    whole = run_ranks(1, resumed, config, 5, 1, None, None)[0]
    before = run_ranks(1, resumed, config, at, 1, None, tmp_path)[0]
    after = run_ranks(1, resumed, config, 5 - at, at + 1, tmp_path, None)[0]
    assert [before[0] + after[0], *after[1:]] == whole


def test_statistics_are_those_of_the_phase() -> None:
    def body() -> list[set[str]]:
        config = small_config("llama", f"{TENSORWISE} --fp8-log-interval 1 --fp8-schedule {PHASES}")
        run = build_run(config)
        collector = StatisticsCollector(run)
        records = [statistics_record_of(run, step, collector) for step in (1, 2, 3, 5)]
        # Where fprop is in high precision, the codes of a weight are those for dgrad.
        of_weights = [stats for name, stats in records[2].tensors.items() if ".weight" in name]
        assert of_weights and all(stats.codes_changed_fraction for stats in of_weights)
        return [set(record.tensors) for record in records]

    one, two, three, last = run_ranks(1, body)[0]
    assert one == last and {name for name in one if not name.startswith("layers.1.")} == two
    assert three and all(name.startswith("layers.1.") and not name.endswith("input.row") for name in three)


def test_stage_without_delayed_scaling_needs_no_calibration() -> None:
    def body() -> tuple[bool, bool, int]:
        run = build_run(small_config("llama", f"{BF16} --precision layers.0.*=delayed {PIPELINE}", 2))
        before = needs_calibration(run)
        calibrate(run, Progress())
        num = sum(isinstance(module, DelayedState) for chunk in run.training_state.chunks for module in chunk.modules())
        return before, needs_calibration(run), num

    assert run_ranks(2, body) == [(True, False, 4), (True, False, 0)]


@pytest.mark.parametrize(("entry", "number"), [("*=bf16", 0), ("*=mxfp8", 9)])
def test_all_linears_or_none_may_be_quantized(entry: str, number: int) -> None:
    def body() -> int:
        run = build_run(small_config("llama", f"{TENSORWISE} --precision {entry}"))
        return len(emulated_linears(run.training_state.chunks))

    assert run_ranks(1, body) == [number]


def test_calibration_at_the_first_quantized_step(tmp_path: Path) -> None:
    """The start of each schedule entry is reported, and a run in two parts has the same records."""
    flags = f"{DELAYED} --fp8-schedule bf16:2,fp8:4,bf16"
    run_loop(tmp_path / "unbroken", flags, 1)
    run_loop(tmp_path / "parts", f"{flags} --exit-interval 2", 1)
    run_loop(tmp_path / "parts", flags, 1)
    unbroken, parts = (load_run(tmp_path / name) for name in ("unbroken", "parts"))
    assert curves_of_records(unbroken) == curves_of_records(parts)
    events = [(event.step, event.detail) for event in unbroken.events if event.name == "precision"]
    assert events == [(2, "quantized, starting at step 3"), (4, "high, starting at step 5")]
    assert calibrations(tmp_path / "unbroken") == calibrations(tmp_path / "parts") == [2]


def test_validation_uses_the_precision_of_the_last_step() -> None:
    def losses(flags: str) -> list[float]:
        run = build_run(small_config("llama", f"{flags} --eval-iters 1"))
        return [evaluate(run, "valid", run.datasets[1], step, 0).loss for step in (0, 2, 3)]

    scheduled, high, low = (
        run_ranks(1, losses, flags)[0] for flags in (f"{TENSORWISE} --fp8-schedule bf16:2,fp8", BF16, TENSORWISE)
    )
    assert scheduled == [high[0], high[1], low[2]] and high[2] != low[2]
