"""Quantization statistics of complete runs: equal in every layout, equal to slow references, no effect on training."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from small_run import build_run, fingerprint, small_config, statistics_record_of, statistics_step, weights

from megafp8.analysis.runs import load_run
from megafp8.config.settings import with_values
from megafp8.errors import NumericsError
from megafp8.metrics.records import QuantizationRecord
from megafp8.optimizer.fused_adam import FusedAdamOptimizer
from megafp8.quantization.linear_plan import LinearPlan
from megafp8.training.evaluation import build_batches
from megafp8.training.extensions.statistics import StatisticsCollector
from megafp8.training.extensions.statistics_hooks import HookedLinear, signal_and_noise
from megafp8.training.pretrain import train
from megafp8.training.run import Run
from megafp8.training.step import clear_gradients, forward_backward

TENSORWISE = "--bf16 --fp8-format hybrid --fp8-recipe tensorwise --fp8-amax-reduction all"
DELAYED = "--bf16 --fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 4 --fp8-amax-compute-algo max"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
BLOCKWISE, MXFP8 = (f"--bf16 --fp8-format e4m3 --fp8-recipe {recipe}" for recipe in ("blockwise", "mxfp8"))
NVFP4 = "--bf16 --fp4-format e2m1"
PLAIN = "--bf16 --transformer-impl local"
TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel"
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 20000"
LENGTH = "--lr-warmup-iters 0 --eval-iters 0 --no-progress-bar"
E5M2_STEP = 0.25  # gradients are rounded to such steps on their way, and other scales round otherwise
SCALE_DB = 1.0  # rounding errors depend on the position of values between powers of two, which another scale changes
STATISTICS = "--fp8-log-interval 1"


def first_step_statistics(flags: str, world_size: int = 1) -> QuantizationRecord:
    """Rank 0's quantization statistics."""
    config = small_config("llama", f"{LENGTH} {STATISTICS} {flags}", world_size)
    found = run_ranks(world_size, lambda: statistics_record_of(build_run(config)))
    assert not any(found[1:]), "rank 0 has it all"
    assert found[0] is not None
    return found[0]


# --- no effect on training --------------------------------------------------------------------------------------------


def run_loop(folder: Path, flags: str, world_size: int) -> str:
    config = small_config("llama", f"{LENGTH} --train-iters 5 --save {folder} {flags}", world_size)

    def start() -> str:
        run = build_run(config)
        train(run)
        modules = [module for chunk in run.training_state.chunks for module in chunk.modules()]
        assert not [module for module in modules if getattr(module, "observer", None) is not None]
        if "local" in flags and run.config.logging.fp8_log_interval is not None:
            assert not [each for each in StatisticsCollector(run).linears if each.module._forward_pre_hooks]
        return fingerprint(weights(run))

    return run_ranks(world_size, start)[0]


@pytest.mark.parametrize(
    ("world_size", "flags", "tried"),
    [
        pytest.param(1, f"{NVFP4} --micro-batch-size 2", "tensorwise", id="stochastic-rounding"),
        pytest.param(1, f"{DELAYED} {RECOMPUTE}", "blockwise,mxfp8", id="delayed-recompute"),
        pytest.param(2, f"{TENSORWISE} {OVERLAP} --fp8-param-gather", "mxfp8", id="dp2-fp8-weights-overlap"),
        pytest.param(1, PLAIN, "mxfp8,nvfp4", id="high-precision"),
    ],
)
def test_statistics_do_not_change_training(world_size: int, flags: str, tried: str, tmp_path: Path) -> None:
    plain = run_loop(tmp_path / "plain", flags, world_size)
    with_statistics = run_loop(
        tmp_path / "statistics", f"{flags} --fp8-log-interval 2 --fp8-what-if {tried}", world_size
    )
    runs = load_run(tmp_path / "plain"), load_run(tmp_path / "statistics")
    assert [step.loss for step in runs[0].steps] == [step.loss for step in runs[1].steps]
    assert with_statistics == plain
    assert not runs[0].quantization_records and [record.step for record in runs[1].quantization_records] == [2, 4]
    for record in runs[1].quantization_records:
        assert set(record.what_if) == set(tried.split(","))
        assert bool(record.tensors) == ("local" not in flags)
        assert record.update_to_weight > 0
    last = runs[1].events[-1]
    assert last.name == "health" and last.detail.startswith("2 statistics steps, ")


def test_other_steps_do_no_statistics_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """No linear calls an observer, no table is created and nothing is recorded."""
    config = small_config("llama", f"{LENGTH} {TENSORWISE} --fp8-log-interval 3")
    shown: list[int] = []
    now = [0]
    plain = LinearPlan.quantize_for

    def counted(plan: LinearPlan, *args: Any) -> Any:
        if plan.observer is not None:
            shown.append(now[0])
        return plain(plan, *args)

    def steps() -> list[int]:
        run = build_run(config)
        collector = StatisticsCollector(run)
        for step in range(1, 5):
            now[0] = step
            statistics_record_of(run, step, collector)
        return shown

    monkeypatch.setattr(LinearPlan, "quantize_for", counted)
    (found,) = run_ranks(1, steps)
    assert set(found) == {3}


def test_a_rank_may_have_no_gradient_of_the_observed_linears() -> None:
    """The fused optimizer's gradient factor is on the GPU, here on the meta device, which cannot be read."""
    config = small_config("llama", f"{LENGTH} {TENSORWISE} {STATISTICS}")

    def gradient_factors() -> list[float]:
        run = build_run(config)
        optimizer = FusedAdamOptimizer.__new__(FusedAdamOptimizer)
        optimizer.grad_factor = torch.ones(1, device="meta")
        training_state = dataclasses.replace(run.training_state, optimizer=optimizer)
        collector = StatisticsCollector(dataclasses.replace(run, training_state=training_state))
        assert collector.start_if_due(1) == collector.start_if_due(1) != []  # the key of their CUDA graph
        collector.statistics.before_update(16.0, 1.0)
        table, linears = collector.statistics.table, collector.plan.linears
        return [table.total(linears, field) for field in ("few_gradient", "all_gradient")]

    assert run_ranks(1, gradient_factors) == [[0.0, 0.0]]


# --- equal in every layout --------------------------------------------------------------------------------------------


def check_close(found: QuantizationRecord, expected: QuantizationRecord, names: str = "") -> None:
    """Tensors agree up to the effect of another summation order."""
    assert list(found.tensors) == list(expected.tensors)
    for name, stats in expected.tensors.items():
        if names in name:
            other = found.tensors[name]
            assert other.num_values == stats.num_values, name
            assert other.amax == pytest.approx(stats.amax, rel=E5M2_STEP), name
            assert other.quant_scale_min == pytest.approx(stats.quant_scale_min, rel=E5M2_STEP), name
            assert other.sqnr_db == pytest.approx(stats.sqnr_db, abs=SCALE_DB), name
            assert other.mean_local_sqnr_db == pytest.approx(stats.mean_local_sqnr_db, abs=SCALE_DB), name


def test_pipeline_parallel_statistics_equal_one_rank() -> None:
    one = first_step_statistics(f"{TENSORWISE} --micro-batch-size 2")
    two = first_step_statistics(f"{TENSORWISE} --micro-batch-size 2 --pipeline-model-parallel-size 2", 2)
    assert two.tensors == one.tensors
    assert two.gradient_noise == pytest.approx(one.gradient_noise, rel=1e-6)
    assert len(one.tensors) == 2 * 4 * 3


def test_tensor_parallel_statistics_equal_one_rank() -> None:
    one, two = first_step_statistics(TENSORWISE), first_step_statistics(f"{TENSORWISE} {TENSOR}", 2)
    check_close(two, one, "weight")
    for name, stats in one.tensors.items():
        if name.endswith("weight"):
            assert two.tensors[name].exponent_counts == stats.exponent_counts
    whole = {name: stats for name, stats in one.tensors.items() if "linear_proj.grad_output" not in name}
    whole = {name: stats for name, stats in whole.items() if "linear_fc2.grad_output" not in name}
    # Gradients of row-parallel layers are gathered before they are quantized: each rank counts all of them.
    check_close(
        dataclasses.replace(two, tensors={name: two.tensors[name] for name in whole}),
        dataclasses.replace(one, tensors=whole),
    )
    assert two.update_to_weight == pytest.approx(one.update_to_weight, rel=0.01)
    assert two.gradient_noise == pytest.approx(one.gradient_noise, rel=0.05)


@pytest.mark.parametrize("flags", ["", OVERLAP], ids=["plain", "sharded-optimizer"])
def test_data_parallel_statistics_equal_one_rank(flags: str) -> None:
    """One microbatch of the complete batch on one rank, or its two parts on two ranks. Each rank has its own scales."""
    one = first_step_statistics(f"{TENSORWISE} --micro-batch-size 8")
    two = first_step_statistics(f"{TENSORWISE} --micro-batch-size 4 {flags}", 2)
    assert one.gradient_noise is None, "there is no smaller batch"
    assert two.gradient_noise > 0
    for name, stats in one.tensors.items():
        other = two.tensors[name]
        copies = 2 if name.endswith("weight") else 1
        assert other.num_values == copies * stats.num_values
        assert other.amax == pytest.approx(stats.amax, rel=E5M2_STEP)
        assert other.sqnr_db == pytest.approx(stats.sqnr_db, abs=SCALE_DB)
    assert two.update_to_weight == pytest.approx(one.update_to_weight, rel=1e-3)
    assert two.codes_changed_fraction == pytest.approx(one.codes_changed_fraction, rel=0.02)


# --- equal to slow references -----------------------------------------------------------------------------------------


def linear_weights(run: Run) -> list[torch.Tensor]:
    return [linear.weight for linear in StatisticsCollector(run).linears]


def slow_norms(run: Run, *num_microbatches: int) -> list[float]:
    """Squared norms of the linears' mean gradients over the first microbatches of a batch, and over the next ones."""
    batches = build_batches(run, run.datasets[0], 0, run.global_batch_size, num_workers=0)
    found = []
    for count in num_microbatches:
        clear_gradients(run)
        forward_backward(run, batches, count, forward_only=False)
        found.append(sum(weight.main_grad.double().square().sum().item() for weight in linear_weights(run)))
    return found


@pytest.mark.parametrize("flags", [TENSORWISE, f"{TENSORWISE} --no-gradient-accumulation-fusion", PLAIN])
def test_gradient_noise_follows_from_two_batch_sizes(flags: str) -> None:
    config = small_config("llama", f"{LENGTH} {STATISTICS} {flags} --fp8-what-if mxfp8 --micro-batch-size 2")

    def both() -> tuple[QuantizationRecord, float, float]:
        run = build_run(config)
        (few,), (all,) = slow_norms(run, 1), slow_norms(run, 4)
        return statistics_record_of(run), few, all

    ((record, few, all),) = run_ranks(1, both)
    signal, noise = signal_and_noise(few, all, 2, 8)
    assert record.gradient_signal == pytest.approx(signal, rel=1e-4)
    assert record.gradient_noise == pytest.approx(noise, rel=1e-4)
    if signal > 0 and noise > 0:  # both are estimates
        assert record.gradient_noise_scale == pytest.approx(noise / signal, rel=1e-4)
        assert record.gradient_snr == pytest.approx(8 * signal / noise, rel=1e-4)
    else:
        assert record.gradient_noise_scale is None and record.gradient_snr is None


@pytest.mark.parametrize("flags", ["", OVERLAP], ids=["plain", "sharded-optimizer"])
def test_gradient_noise_is_averaged_over_data_ranks(flags: str) -> None:
    """One microbatch per rank: its own gradient is measured before the reduction."""
    half = "--bf16 --transformer-impl local --fp8-what-if mxfp8 --micro-batch-size 4"

    def slow() -> tuple[float, float]:
        run = build_run(small_config("llama", f"{LENGTH} {STATISTICS} {half}"))
        return sum(slow_norms(run, 1, 1)) / 2, *slow_norms(run, 2)

    ((few, all),) = run_ranks(1, slow)
    record = first_step_statistics(f"{half} {flags}", 2)
    signal, noise = signal_and_noise(few, all, 4, 8)
    assert record.gradient_signal == pytest.approx(signal, rel=1e-2)
    assert record.gradient_noise == pytest.approx(noise, rel=1e-2)


def test_signal_and_noise_of_known_gradients() -> None:
    """E |G_b|^2 = |G|^2 + tr(S) / b, solved for |G|^2 = 3 and tr(S) = 20."""
    assert signal_and_noise(3 + 20 / 2, 3 + 20 / 16, 2, 16) == pytest.approx((3, 20))


def test_update_statistics_are_of_the_master_weights() -> None:
    config = small_config("llama", f"{LENGTH} {STATISTICS} {TENSORWISE}")

    def both() -> tuple[QuantizationRecord, float, float]:
        run = build_run(config)
        before = [weight.main_param.clone() for weight in linear_weights(run)]
        collector = StatisticsCollector(run)
        codes = [linear.weight_codes() for linear in collector.linears]
        record = statistics_record_of(run, 1, collector)
        after = [weight.main_param for weight in linear_weights(run)]
        update = sum((new - old).double().square().sum() for new, old in zip(after, before, strict=True))
        size = sum(old.double().square().sum() for old in before)
        now = [linear.weight_codes() for linear in collector.linears]
        changed = sum((old != new).sum().item() for old, new in zip(codes, now, strict=True))
        return record, math.sqrt(update / size), changed / sum(each.numel() for each in codes)

    ((record, ratio, changed),) = run_ranks(1, both)
    assert record.update_to_weight == pytest.approx(ratio, rel=1e-5)
    assert record.codes_changed_fraction == changed
    assert 0 < changed < 1


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "mxfp8"])
def test_hook_statistics_equal_those_of_emulated_layers(recipe: str) -> None:
    """The hooks on Transformer Engine's layers, applied to emulated layers."""
    flags = f"--bf16 --fp8-format e4m3 --fp8-recipe {recipe} --fp8-what-if nvfp4 --hidden-size 128"
    config = small_config("llama", f"{LENGTH} {STATISTICS} {flags}")

    def statistics(hooked: bool) -> QuantizationRecord:
        run = build_run(config)
        collector = StatisticsCollector(run)
        if hooked:
            collector.linears = [HookedLinear(each.name, each.module, each.recipe) for each in collector.linears]
        return statistics_record_of(run, 1, collector)

    (shown,), (hooked,) = (run_ranks(1, statistics, hooked) for hooked in (False, True))
    assert hooked.tensors == shown.tensors and hooked.what_if == shown.what_if
    assert hooked.gradient_noise == shown.gradient_noise


# --- health of real runs ----------------------------------------------------------------------------------------------


def health_of(folder: Path, flags: str, steps: int = 4) -> list[str]:
    """The health warnings of a run in which every step is a statistics step."""
    config = small_config("llama", f"{LENGTH} {STATISTICS} --train-iters {steps} --save {folder} {flags}")
    run_ranks(1, lambda: train(build_run(config)) and None)
    return [event.detail for event in load_run(folder).events if event.name == "health"]


@pytest.mark.parametrize("flags", [TENSORWISE, DELAYED, BLOCKWISE, MXFP8, NVFP4], ids=lambda flags: flags.split()[-1])
def test_a_healthy_run_has_no_findings(flags: str, tmp_path: Path) -> None:
    (summary,) = health_of(tmp_path, flags)
    assert re.fullmatch(r"4 statistics steps, \d+ tensors: nothing to report", summary)


def test_a_tiny_learning_rate_stalls_weights(tmp_path: Path) -> None:
    told, summary = health_of(tmp_path, f"{TENSORWISE} --lr 1e-10 --min-lr 0")
    assert told.startswith("stalled weights: layers.0.linear_qkv.weight: an update changes it by ")
    assert "stalled weights (8 tensors, first at step 2)" in summary


def test_a_scale_without_updates_is_stale(tmp_path: Path) -> None:
    """Scales of 1 without calibration, and amaxes that are not recorded, as if histories were lost."""
    flags = f"{DELAYED} --fp8-delayed-start te --train-iters 3 --save {tmp_path}"
    config = small_config("llama", f"{LENGTH} {STATISTICS} {flags}")

    def start() -> None:
        run = build_run(config)
        for linear in StatisticsCollector(run).linears:
            linear.module.amax_exchange.forward_ran = linear.module.amax_exchange.backward_ran = lambda state: None
        train(run)

    run_ranks(1, start)
    told = [event.detail for event in load_run(tmp_path).events if event.name == "health"]
    assert any(detail.startswith("stale delayed scales: ") and "range is unused" in detail for detail in told), told


def test_the_first_layer_with_a_nan_is_named(tmp_path: Path) -> None:
    config = small_config("llama", f"{LENGTH} {STATISTICS} {TENSORWISE} --no-check-for-nan-in-loss-and-grad")

    def start() -> list[str]:
        run = build_run(config)
        collector = StatisticsCollector(run)
        with torch.no_grad():
            next(each.weight for each in collector.linears if each.name == "layers.1.linear_proj")[3, 5] = math.nan
        batches = build_batches(run, run.datasets[0], 0, run.global_batch_size, num_workers=0)
        _, records = statistics_step(run, batches, 1, collector)
        return [each.detail for each in records[1:]]

    (told,) = run_ranks(1, start)
    expected = "non-finite values: layers.1.linear_proj.weight: 1 values"
    assert any(each.startswith(expected) for each in told)


def test_a_run_without_statistics_reports_why(tmp_path: Path) -> None:
    (summary,) = health_of(tmp_path, f"{TENSORWISE} --fp8-log-interval 5")
    assert summary.startswith(
        "no quantization statistics: none of the steps 1 to 4 is a multiple of --fp8-log-interval 5"
    )


@pytest.mark.parametrize("flags", ["--fp8-log-interval 100 --fp8-what-if mxfp8", ""], ids=["what-if", "no-statistics"])
def test_nonfinite_values_in_high_precision_give_one_finding(flags: str, tmp_path: Path) -> None:
    """The weights are so large that the next forward pass overflows. The report has a fix."""
    config = small_config("llama", f"{LENGTH} {PLAIN} --clip-grad 0 --train-iters 3 --save {tmp_path} {flags}")
    config = with_values(config, {"optimizer.lr": 1e16})  # no flag gives it

    def start() -> str:
        with pytest.raises(NumericsError) as caught:
            train(build_run(config))
        return str(caught.value)

    (text,) = run_ranks(1, start)
    assert "loss is not finite; its weights are finite, and bad gradients follow from the loss; " in text
    assert "fix: " in text and "--clip-grad 1" in text and "--fp8-recipe" not in text
    assert ("--fp8-log-interval 100 --fp8-what-if tensorwise to find the first linear" in text) == (not flags)
    told = [event.detail for event in load_run(tmp_path).events if event.name == "health"]
    assert len(told) == bool(flags)
    first = r"non-finite values: layers\.0\.\S+: .* in the order of the forward pass"
    assert all(re.match(first, each) for each in told)


@pytest.mark.parametrize("interval", [1, 100], ids=["statistics-step", "plain-step"])
def test_a_run_stopped_by_nonfinite_values_names_their_source(interval: int, tmp_path: Path) -> None:
    """A step without statistics runs again. A weight of layer 0 is NaN, and its own linear is the first to meet it."""
    flags = f"{TENSORWISE} --pipeline-model-parallel-size 2 --fp8-log-interval {interval}"
    config = small_config("llama", f"{LENGTH} {flags} --train-iters 3 --save {tmp_path}", 2)

    def start() -> str:
        run = build_run(config)
        for linear in StatisticsCollector(run).linears:
            if linear.name == "layers.0.linear_fc2":
                with torch.no_grad():
                    linear.weight[0, 0] = linear.weight.main_param[0, 0] = math.nan
        with pytest.raises(NumericsError):
            train(run)
        return ""

    run_ranks(2, start)
    run = load_run(tmp_path)
    (event,) = (event for event in run.events if event.name == "health")
    assert event.step == 1 and "layers.0.linear_fc2.weight: 1 values are not finite" in event.detail
    (record,) = run.quantization_records
    assert record.tensors["layers.0.linear_fc2.input"].num_non_finite == 0
    assert record.tensors["layers.1.linear_qkv.input"].num_non_finite > 0
