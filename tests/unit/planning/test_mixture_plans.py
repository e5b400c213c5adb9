"""Plans of mixtures: hand-computed sizes of the exchange and of expert GEMMs, expert-parallel layouts, multi-latent
attention."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from megafp8.config import dimensions, flags, iterations, mixture
from megafp8.config.settings import with_values
from megafp8.device.gpus import GPUS
from megafp8.errors import ConfigError
from megafp8.planning import communication, layouts
from megafp8.planning.communication import RankGroup
from megafp8.planning.mixture_time import (
    BF16_HOST_EXPERT_S,
    addition_s,
    exchange_s,
    exchanged_bytes,
    expert_gemms,
    expert_warnings,
    experts_time,
    rows_per_rank,
)
from megafp8.planning.plan import assumptions, make_plan
from megafp8.planning.planned_run import CALIBRATION, PlannedRun, layer_linears
from megafp8.planning.step_time import (
    bytes_by_group,
    layer_time,
    layers_of_stage,
    stage_time,
    step_time,
    weight_casts_s,
)
from megafp8.resources.automatic import with_choices

ALLTOALL = {"parallel.moe_token_dispatcher_type": "alltoall", "parallel.expert_model_parallel_size": 8}


def run_of(preset: str, changes: dict[str, Any], *, gpus: int = 64, text: str = "") -> PlannedRun:
    """A run with the planner's assumptions and automatic settings on H100s, micro batch 1."""
    parsed = flags.parse(f"--model-preset {preset} {text}".split())
    values = assumptions(parsed, gpus) | {"training.micro_batch_size": 1} | changes
    config = with_choices(with_values(parsed.config, values), GPUS["h100"], gpus)
    padded = dimensions.padded_vocab_size(config, config.model.vocab_size or 0)
    return PlannedRun(config=config, gpu=GPUS["h100"], world_size=gpus, padded_vocab=padded)


def test_expert_gemms_and_exchange_of_qwen3() -> None:
    run = run_of("qwen3-30b-a3b", ALLTOALL)
    # 4096 tokens x 8 experts of a token; 128 / 8 = 16 experts a rank.
    assert rows_per_rank(run.config) == 32_768
    shapes = {(gemm.linear, gemm.kind): gemm.shape for gemm in expert_gemms(run)}
    assert shapes["linear_fc1", "fprop"] == (2048, 2 * 768, 2048)
    assert shapes["linear_fc2", "dgrad"] == (2048, 768, 2048)
    # Dispatch, combine and their gradients: 7/8 of the rows leave the rank, 2048 channels of two bytes.
    assert exchanged_bytes(run.config) == 4 * 28_672 * 2048 * 2
    in_fp8 = ALLTOALL | {"parallel.moe_dispatch_in_fp8": True}
    assert exchanged_bytes(run_of("qwen3-30b-a3b", in_fp8).config) == 28_672 * 2048 * (3 * 2 + 1)
    # 16 of 128 experts on a rank: it has none of a token's 8 with probability C(112, 8) / C(128, 8) = 0.33257.
    flex = run_of("qwen3-30b-a3b", ALLTOALL | {"parallel.moe_token_dispatcher_type": "flex"})
    assert exchanged_bytes(flex.config) == pytest.approx(4 * 4096 * 7 * (1 - 0.33257) * 2048 * 2, rel=1e-4)
    assert 0 < exchange_s(flex) < exchange_s(run)
    microbatches = iterations.num_microbatches(run.config, 64)
    assert bytes_by_group(run)["expert parallel"] == 48 * microbatches * 4 * 28_672 * 2048 * 2


def test_experts_are_divided_over_tensor_parallel_ranks() -> None:
    changes = {**ALLTOALL, layouts.TENSOR: 2, layouts.SEQUENCE: True}
    whole = run_of("mixtral-8x7b", {**changes, layouts.EXPERT_TENSOR: 1})
    split = run_of("mixtral-8x7b", {**changes, layouts.EXPERT_TENSOR: 2})
    # 2048 tokens of a rank x 2 experts, on one expert a rank; divided experts get the rows of both ranks.
    assert [rows_per_rank(run.config) for run in (whole, split)] == [4096, 8192]
    assert [expert_gemms(run)[0].shape for run in (whole, split)] == [(4096, 28_672, 4096), (8192, 14_336, 4096)]
    assert exchanged_bytes(whole.config) == exchanged_bytes(split.config)
    assert exchange_s(split) > exchange_s(whole), "rows are gathered and reduced as well"


def test_all_to_all_takes_the_slower_of_nvlink_and_network() -> None:
    run = run_of("qwen3-30b-a3b", {})
    gpu = run.gpu
    nvlink = gpu.link_bytes_per_s * run.calibration.nvlink_fraction
    starts_s = communication.COLLECTIVE_START_S
    inside = communication.all_to_all_s(run, RankGroup(8, 1), 8e9)
    assert inside == pytest.approx(7e9 / nvlink + starts_s + communication.NVLINK_STEP_S)
    across = communication.all_to_all_s(run, RankGroup(16, 1), 16e9)
    network = gpu.network_bytes_per_s * communication.NETWORK_FRACTION
    assert across == pytest.approx(8e9 / network + starts_s + communication.NETWORK_STEP_S)
    assert communication.all_to_all_s(run, RankGroup(1, 1), 1e9) == 0


def test_one_launch_spares_the_host() -> None:
    one_rank = run_of("qwen3-30b-a3b", {})
    te = run_of("qwen3-30b-a3b", {"parallel.moe_expert_kernels": "te"})
    assert experts_time(one_rank, "bf16").host == 0
    assert experts_time(te, "bf16").host == pytest.approx(128 * BF16_HOST_EXPERT_S)
    assert layer_time(te, "bf16", 48, True)["host"][0] > 0
    assert experts_time(te, "bf16").forward.fprop > experts_time(one_rank, "bf16").forward.fprop


def test_one_launch_reads_and_writes_weight_gradients() -> None:
    """In FP32."""
    one_rank = run_of("qwen3-30b-a3b", {})
    assert addition_s(one_rank) == pytest.approx(one_rank.memory_s(8 * 128 * 3 * 2048 * 768))
    assert addition_s(run_of("qwen3-30b-a3b", {"parallel.moe_expert_kernels": "te"})) == 0


def test_codes_of_one_launch_are_written_in_place_of_numbers() -> None:
    """Only the amaxes are read first: of tokens and the halves of fc1's result, forward; of one more half, backward."""
    launches = 2 * CALIBRATION.cast_start_s
    for recipe, is_read in (("delayed", 0), ("blockwise", 0), ("tensorwise", 1)):
        fp8 = {"precision.fp8_format": "e4m3", "precision.fp8_recipe": recipe}
        one_launch = run_of("qwen3-30b-a3b", fp8)
        times = experts_time(one_launch, recipe)
        for each, halves in ((times.forward, 2), (times.backward, 3)):
            num_read = is_read * 4096 * (2048 + 8 * halves * 768)
            assert each.casts == pytest.approx(launches + one_launch.memory_s(2 * num_read))
        te = run_of("qwen3-30b-a3b", fp8 | {"parallel.moe_expert_kernels": "te"})
        assert experts_time(te, recipe).forward.casts > 128 * launches
        assert weight_casts_s(te, 0) - weight_casts_s(one_launch, 0) == pytest.approx(48 * 127 * launches)


@pytest.mark.parametrize(
    ("preset", "micro", "tflops"), [("qwen3-30b-a3b", 4, (1176,)), ("mixtral-8x7b", 2, (1335, 1422))]
)
def test_fp8_products_of_one_launch_are_as_fast_as_measured(preset: str, micro: int, tflops: tuple[float, ...]) -> None:
    """On an H200; with scales of blocks 0.54 times as fast."""
    rates = []
    for recipe in ("tensorwise", "blockwise"):
        fp8 = {"precision.fp8_format": "e4m3", "precision.fp8_recipe": recipe, "training.micro_batch_size": micro}
        run = dataclasses.replace(run_of(preset, fp8), gpu=GPUS["h200"])
        gemms = [gemm for gemm in expert_gemms(run) if gemm.kind != "wgrad"]
        flops = sum(gemm.flops for gemm in gemms) * run.config.model.num_experts
        times = experts_time(run, recipe)
        rates.append(flops / (times.forward.fprop + times.backward.dgrad))
    assert 0.97e12 * min(tflops) < rates[0] < 1.03e12 * max(tflops)
    assert rates[1] / rates[0] == pytest.approx(0.54, abs=0.01)


def test_experts_in_one_launch_have_fp8_gradients_and_no_fp8_weights() -> None:
    def traffic(kernels: str, **precision: bool) -> communication.DataParallelTraffic:
        changes = {f"precision.{name}": value for name, value in precision.items()}
        fp8 = {"precision.fp8_format": "e4m3", "precision.fp8_recipe": "tensorwise"}
        layout = {"parallel.expert_model_parallel_size": 8, "parallel.moe_expert_kernels": kernels}
        return communication.data_parallel_traffic(run_of("qwen3-30b-a3b", fp8 | layout | changes), 0)

    assert traffic("triton", grad_reduce_in_fp8=True) == traffic("te", grad_reduce_in_fp8=True)
    in_bf16, codes = (traffic(kernels, fp8_param_gather=True).gather_bytes for kernels in ("triton", "te"))
    assert codes < in_bf16 < traffic("te").gather_bytes


def test_fp8_that_does_not_pay_gets_a_warning() -> None:
    fp8 = {"precision.fp8_format": "hybrid", "parallel.moe_expert_kernels": "te"}
    small, large = run_of("qwen3-30b-a3b", fp8), run_of("mixtral-8x7b", fp8 | {"training.micro_batch_size": 4})
    assert any("FP8 does not pay in these experts" in line for line in expert_warnings(small))
    assert "GEMMs 256 x 2048 x 1536 and 256 x 768 x 2048" in expert_warnings(small)[0]
    assert len(expert_warnings(large)) == 1
    assert expert_warnings(run_of("llama3-8b", {})) == []


@pytest.mark.parametrize(
    ("settings", "suggestion"),
    [
        ({"precision.fp8_format": "e5m2"}, "with --fp8-format e4m3 all of them run in one launch"),
        ({"model.num_experts": 8, "model.moe_ffn_hidden_size": 128, "data.seq_length": 128}, "more tokens for each"),
        ({"parallel.moe_expert_kernels": "te"}, "without --moe-expert-kernels te all of them"),
        ({"model.moe_apply_probs_on_input": True}, "one launch does not support --moe-apply-probs-on-input"),
    ],
)
def test_the_warning_names_what_helps(settings: dict[str, Any], suggestion: str) -> None:
    fp8 = {"precision.fp8_format": "e4m3", "precision.fp8_recipe": "tensorwise"}
    assert suggestion in expert_warnings(run_of("qwen3-30b-a3b", fp8 | settings))[-1]


def test_expert_gradients_are_reduced_over_the_ranks_with_the_same_experts() -> None:
    run = run_of("qwen3-30b-a3b", ALLTOALL)
    assert communication.expert_data_group(run) == RankGroup(8, 8)
    count = 48 * 16 * 3 * 2048 * 768
    traffic = communication.data_parallel_traffic(run, 0)
    other = 30_532_122_624 - 48 * 128 * 3 * 2048 * 768  # the parameters of the preset without experts
    assert traffic.reduce_bytes == pytest.approx(4 * (count * 7 / 8 + other * 63 / 64), rel=1e-3)


def test_a_layer_with_experts_has_the_shared_ones_in_place_of_the_mlp() -> None:
    run = run_of("deepseek-v3", ALLTOALL)
    names = [linear.name for linear in layer_linears(run.config, has_experts=True)]
    assert names[:2] == ["linear_q_down_proj", "linear_q_up_proj"] and names[-2:] == ["linear_fc1", "linear_fc2"]
    assert layer_linears(run.config, has_experts=True)[-1].in_features == 2048
    assert layer_linears(run.config)[-1].in_features == 18_432
    plain = run_of("qwen3-30b-a3b", ALLTOALL)
    assert [linear.name for linear in layer_linears(plain.config, True)] == ["linear_qkv", "linear_proj"]


def test_the_search_for_qwen3_takes_expert_parallelism_within_a_node() -> None:
    """As the published layouts do: EP 8 with data parallelism (NeMo Automodel, Megatron-Bridge)."""
    text = "--model-preset qwen3-30b-a3b --pipeline-model-parallel-size 1 --tensor-model-parallel-size 1"
    plan = make_plan(flags.parse(text.split()), GPUS["h100"], 64, ())
    best = plan.search.layouts[0]
    assert best.name == "DP 64 EP 8, micro batch 2, recompute moe"
    assert mixture.token_dispatcher(best.run.config) == "peer"
    assert 7_000 < best.step.tokens_per_s_per_gpu < 14_000
    assert plan.assumed["data.seq_length"] == 4096
    assert plan.warnings[-1].startswith("experts of layout 1: 16 a rank, in one launch, GEMMs 4096 x 2048 x 1536")
    assert best.step.seconds == step_time(best.run).seconds


def test_precision_maps_of_mixtures_are_not_planned() -> None:
    text = "--model-preset qwen3-30b-a3b --fp8-recipe tensorwise --precision layers.0.*=bf16"
    with pytest.raises(ConfigError, match="--precision with --num-experts"):
        make_plan(flags.parse(text.split()), GPUS["h100"], 64, ())


@pytest.mark.parametrize("preset", ["qwen3-30b-a3b", "llama3-8b"])
def test_a_layer_of_multi_token_prediction_counts_once(preset: str) -> None:
    """48 and 32 layers over 16 stages: the last stage has three or two of them, and one more."""
    changes = {layouts.PIPELINE: 16} | (ALLTOALL if preset.startswith("qwen") else {})
    plain, more = (run_of(preset, changes | {"model.mtp_num_layers": depths}, gpus=128) for depths in (None, 1))
    num_layers = {"qwen3-30b-a3b": 3, "llama3-8b": 2}[preset]
    assert [layers_of_stage(run, 15)[0] for run in (plain, more)] == [num_layers, num_layers + 1]
    for part in ("attention", "casts"):
        times = [stage_time(run, 15).parts.get(part, 0.0) for run in (plain, more)]
        assert times[1] == pytest.approx(times[0] * (num_layers + 1) / num_layers)
    assert bytes_by_group(more).get("tensor parallel", 0.0) >= 0
    assert weight_casts_s(more, 15) >= weight_casts_s(plain, 15)


def test_a_stage_of_multi_token_prediction_alone() -> None:
    layout = "E" + "t" * 48 + "|mL"
    changes = {layouts.PIPELINE: 2, **ALLTOALL, "parallel.pipeline_model_parallel_layout": layout}
    run = run_of("qwen3-30b-a3b", changes | {"model.mtp_num_layers": 1})
    assert layers_of_stage(run, 1) == (1, 1)
    assert stage_time(run, 1).parts["expert parallel"] > 0 and step_time(run).tokens_per_s_per_gpu > 0
