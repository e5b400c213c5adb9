"""The time model compared with manual computations, known limits, and itself."""

from __future__ import annotations

import dataclasses

import pytest
from plans import FP8, PIPELINE, TENSOR, run_of

from megafp8.config import iterations
from megafp8.device.gpus import GPUS
from megafp8.planning import communication, compute
from megafp8.planning.step_time import (
    optimizer_bytes_per_parameter,
    optimizer_s,
    pipeline_parts,
    stage_time,
    step_time,
    weight_casts_s,
)


def test_every_gpu_has_its_peaks():
    for gpu in GPUS.values():
        expected = {"bf16", "fp8"} if gpu.compute_capability >= (8, 9) else {"bf16"}
        assert expected <= set(gpu.peak.flops), gpu.name
        assert gpu.target.kind == "cuda"


def test_a_large_gemm_runs_at_its_fraction_and_a_small_one_below():
    run = run_of()
    flops = 989.4e12 * run.calibration.bf16_gemm_fraction
    assert compute.gemm_s(run, "bf16", 2**16, 2**14, 2**14) == pytest.approx(2 * 2**44 / flops, rel=0.02)
    waves = 8 * 8 / 132
    small = 2 * 1024**2 * 2**14 / (flops * waves / (waves + 0.5))
    assert compute.gemm_s(run, "bf16", 1024, 1024, 2**14) == pytest.approx(run.calibration.gemm_start_s + small)


def test_a_thin_gemm_is_bound_by_memory():
    run = run_of()
    num_bytes = 2 * 16 * (2**14 + 2**14) + 2 * 2**28
    expected = run.calibration.gemm_start_s + run.memory_s(num_bytes)
    assert compute.gemm_s(run, "bf16", 2**14, 2**14, 16) == pytest.approx(expected)


def test_attention_flops_equal_the_models():
    run = run_of()
    flops = 6 * 4096 * 8192 * 8192  # one layer, one sequence of 8192: 6 h s per token, causal
    fraction = run.calibration.attention_fraction * 8192 / (8192 + run.calibration.attention_half_tokens)
    assert compute.attention_s(run) == pytest.approx(flops / (989.4e12 * fraction))


@pytest.mark.parametrize(
    ("recipe", "gpu", "constant"),
    [("tensorwise", "h200", "fp8"), ("delayed", "h200", "fp8"), ("mxfp8", "b200", "block_scaled")],
)
def test_fp8_halves_the_linears_of_a_large_model(recipe, gpu, constant):
    run = run_of(gpu=gpu)
    ratio = compute.forward_time(run, "bf16").fprop / compute.forward_time(run, recipe).fprop
    fraction = getattr(run.calibration, f"{constant}_gemm_fraction")
    assert ratio == pytest.approx(2 * fraction / run.calibration.bf16_gemm_fraction, rel=0.01)


def test_blockwise_gemms_run_as_mxfp8_on_blackwell():
    on = {gpu: run_of(gpu=gpu) for gpu in ("h200", "b200")}
    flops = {
        (gpu, recipe): compute.gemm_flops_per_s(run, recipe)
        for gpu, run in on.items() for recipe in ("tensorwise", "blockwise")
    }  # fmt: skip
    assert flops["b200", "blockwise"] == compute.gemm_flops_per_s(on["b200"], "mxfp8")
    for gpu, constant in (("h200", "blockwise_gemm_fraction"), ("b200", "block_scaled_gemm_fraction")):
        calibration = on[gpu].calibration
        ratio = getattr(calibration, constant) / calibration.fp8_gemm_fraction
        assert flops[gpu, "blockwise"] / flops[gpu, "tensorwise"] == pytest.approx(ratio)


HOPPER_STEPS = {
    ("h100", "bf16"): 4.018165404940332, ("h200", "bf16"): 3.925362119030203,
    ("h100", "tensorwise"): 3.00722606377333, ("h200", "tensorwise"): 2.9977780238168177,
    ("h100", "delayed"): 3.006028719142004, ("h200", "delayed"): 2.9969423770428714,
    ("h100", "blockwise"): 3.252226771582102, ("h200", "blockwise"): 3.106366848267775,
}  # fmt: skip


@pytest.mark.parametrize(("gpu", "recipe"), HOPPER_STEPS)
def test_blackwells_constant_leaves_hopper_as_it_was(gpu, recipe):
    quantized = {"precision.fp8_format": "e4m3" if recipe == "blockwise" else "hybrid", "precision.fp8_recipe": recipe}
    run = run_of(TENSOR | (quantized if recipe != "bf16" else {}), gpu=gpu, gpus=16)
    slower = dataclasses.replace(run.calibration, block_scaled_gemm_fraction=0.1)
    assert step_time(run).seconds == HOPPER_STEPS[gpu, recipe]
    assert step_time(dataclasses.replace(run, calibration=slower)).seconds == HOPPER_STEPS[gpu, recipe]


def test_casts_are_counted_in_bytes_of_inputs_and_gradients():
    run = run_of(FP8)
    tokens, inputs, outputs = 8192, 4096 + 4096 + 4096 + 14336, 6144 + 4096 + 2 * 14336 + 4096
    speed, start_s = run.gpu.hbm_bytes_per_s * run.calibration.cast_fraction, 4 * run.calibration.cast_start_s
    assert compute.forward_time(run, "tensorwise").casts == pytest.approx(start_s + 6 * tokens * inputs / speed)
    assert compute.backward_time(run, "tensorwise").casts == pytest.approx(start_s + 6 * tokens * outputs / speed)
    assert compute.forward_time(run, "bf16").casts == 0


def test_with_sequence_parallelism_a_rank_casts_its_shard():
    run = run_of(FP8 | TENSOR)
    speed, start_s = run.gpu.hbm_bytes_per_s * run.calibration.cast_fraction, 4 * run.calibration.cast_start_s
    inputs = (4096 + 4096 + 4096 + 14336) / 4
    outputs = (6144 + 2 * 14336) / 4 + (4096 + 4096) / 4
    assert compute.forward_time(run, "tensorwise").casts == pytest.approx(start_s + 6 * 8192 * inputs / speed)
    assert compute.backward_time(run, "tensorwise").casts == pytest.approx(start_s + 6 * 8192 * outputs / speed)


def test_fp8_weights_cast_their_transposes_only():
    plain, gathered = (run_of(FP8 | {"precision.fp8_param_gather": value}) for value in (False, True))
    quantized = 32 * 4096 * (6144 + 4096 + 3 * 14336)
    expected = 6 * quantized / (plain.gpu.hbm_bytes_per_s * plain.calibration.cast_fraction)
    start_s = 32 * 4 * plain.calibration.cast_start_s
    assert weight_casts_s(plain, 0) == pytest.approx(start_s + expected)
    assert weight_casts_s(gathered, 0) == pytest.approx(start_s + expected / 2)
    assert step_time(plain).parts["casts"] - step_time(gathered).parts["casts"] == pytest.approx(expected / 2)


def test_fused_operations_and_one_rotation_move_fewer_bytes():
    fused = run_of(FP8 | {"precision.use_transformer_engine_op_fuser": True})
    apart = run_of(FP8 | {"precision.split_rope_fusion": False})
    plain = run_of(FP8 | {"precision.use_transformer_engine_op_fuser": False})
    added = run_of(FP8 | {"precision.residual_norm_fusion": True})
    saved = compute.backward_time(plain, "tensorwise").additions - compute.backward_time(added, "tensorwise").additions
    assert saved == pytest.approx(plain.memory_s(2 * 2 * 8192 * 4096))
    assert compute.backward_time(fused, "tensorwise").activation < compute.backward_time(plain, "tensorwise").activation
    assert compute.backward_time(apart, "tensorwise").rotary == 2 * compute.backward_time(plain, "tensorwise").rotary


@pytest.mark.parametrize(
    ("settings", "share"),
    [
        ({"training.recompute_granularity": "full", "training.recompute_method": "uniform",
          "training.recompute_num_layers": 1}, 1.0),
        ({"training.recompute_granularity": "full", "training.recompute_method": "block",
          "training.recompute_num_layers": 8}, 8 / 32),
        ({}, 0.0),
    ],
)  # fmt: skip
def test_full_recompute_runs_the_forward_pass_again(settings, share):
    run = run_of(settings)
    forward = compute.forward_time(run, "bf16")
    assert compute.recompute_s(run, forward, 32) == pytest.approx(share * forward.total)


def test_selective_recompute_runs_its_part_again():
    run = run_of({"training.recompute_granularity": "selective", "training.recompute_modules": ("mlp", "core_attn")})
    forward = compute.forward_time(run, "bf16")
    mlp = 3 * 14336 / (3 * 14336 + 6144 + 4096)
    again = forward.attention + mlp * forward.fprop + forward.activation
    assert compute.recompute_s(run, forward, 32) == pytest.approx(again)


# ---- the step -----------------------------------------------------------------------------------------------------


def test_one_gpu_has_no_communication():
    step = step_time(run_of(gpus=1))
    assert not {"bubble", "pipeline sends", "data parallel", "tensor parallel", "host"} & set(step.parts)
    assert step.seconds == pytest.approx(sum(step.parts.values()))
    assert step.tokens == 64 * 8192
    assert step.mfu_fraction == pytest.approx(step.flops_per_token * step.tokens / step.seconds / step.peak_flops)


def test_pipeline_bubble():
    """Stages of equal length t: (p - 1) t, and divided by the chunks."""
    run = run_of(PIPELINE)
    stage = stage_time(run, 1)
    parts = pipeline_parts(run, 3 * stage.seconds, 32)
    assert parts["bubble"] == pytest.approx(3 * stage.seconds)
    interleaved = run_of(PIPELINE | {"parallel.num_virtual_stages_per_pipeline_rank": 4})
    parts = pipeline_parts(interleaved, 3 * stage.seconds, 32)
    assert parts["bubble"] == pytest.approx(3 * stage.seconds / 4)


@pytest.mark.parametrize(("chunks", "overlap", "sends"), [(None, True, 6 + 64), (4, True, 6), (4, False, 6 + 4 * 64)])
def test_sends_are_hidden_in_the_interleaved_schedule(chunks, overlap, sends):
    settings = {"parallel.num_virtual_stages_per_pipeline_rank": chunks, "parallel.overlap_p2p_comm": overlap}
    run = run_of(PIPELINE | settings)
    stage = stage_time(run, 1)
    send_s = communication.send_s(run, communication.pipeline_group(run), 2 * 8192 * 4096)
    parts = pipeline_parts(run, 3 * stage.seconds, 32)
    assert parts["pipeline sends"] == pytest.approx(sends * send_s)


def test_the_loss_reads_and_writes_logits_twice():
    run = run_of(gpus=1)
    assert stage_time(run, 0).parts["loss"] == pytest.approx(run.memory_s(8 * 8192 * 128_256))


def test_the_slowest_stage_determines_the_step():
    parts = step_time(run_of(PIPELINE)).parts
    microbatches = iterations.num_microbatches(run_of(PIPELINE).config, 8)
    output = sum(compute.output_layer_s(run_of(PIPELINE))[:2])
    assert parts["output layer"] == pytest.approx(microbatches * output)


def test_a_layer_takes_the_host_time_where_that_is_longer():
    small = {"model.hidden_size": 256, "model.ffn_hidden_size": 704, "data.seq_length": 256}
    run = run_of(FP8 | small, gpus=1)
    stage = stage_time(run, 0)
    layers = 32 * run.calibration.fp8_host_layer_s
    outside = stage.parts["output layer"] + stage.parts["loss"]
    assert layers < stage.seconds < layers + 2 * outside + 1e-3
    graph = stage_time(run_of(FP8 | small | {"training.cuda_graph_impl": "local"}, gpus=1), 0)
    assert not graph.parts["host"] and graph.seconds < 0.2 * stage.seconds


def test_fused_optimizer_moves_fewer_bytes():
    one, many = run_of(gpus=1), run_of({"optimizer.one_pass_optimizer": False}, gpus=1)
    parameters = 8_030_261_248
    speed = one.gpu.hbm_bytes_per_s * one.calibration.optimizer_fraction
    assert optimizer_s(one, 0) == pytest.approx(34 * parameters / speed)
    assert optimizer_s(many, 0) == pytest.approx((46 + 8) * parameters / speed)
    assert optimizer_s(run_of(gpus=8), 0) == pytest.approx(34 * parameters / 8 / speed)


@pytest.mark.parametrize(
    "problem", [{"optimizer.loss_scale": 128.0}, {"precision.bf16": False, "precision.fp16": True}], ids=str
)
def test_fused_optimizer_is_planned_only_where_supported(problem):
    many = run_of({"optimizer.one_pass_optimizer": False})
    assert optimizer_bytes_per_parameter(run_of(problem)) == optimizer_bytes_per_parameter(many)


def test_scaled_moments_are_read_twice():
    def bytes_of(exp_avg, exp_avg_sq):
        state = {"exp_avg_dtype": exp_avg, "exp_avg_sq_dtype": exp_avg_sq, "use_precision_aware_optimizer": True}
        return optimizer_bytes_per_parameter(run_of({f"optimizer.{name}": value for name, value in state.items()}))[1]

    assert bytes_of("fp16", "fp16") == bytes_of("bf16", "bf16") + 4 + 2 + 2
    assert bytes_of("fp8", "fp16") == bytes_of("bf16", "bf16") - 2 + 4 + 1 + 2
    assert bytes_of("fp8", "bf16") == bytes_of("bf16", "bf16") - 2 + 4 + 1


@pytest.mark.parametrize(("dtype", "moved"), [("fp32", 12), ("bf16", 8)])
def test_a_moving_average_is_moved_every_interval(dtype, moved):
    mean = {"optimizer.ema_decay": 0.999, "optimizer.ema_interval": 10, "optimizer.ema_dtype": dtype}
    full, of_shard = optimizer_bytes_per_parameter(run_of(mean))
    assert (full, of_shard - moved / 10) == pytest.approx(optimizer_bytes_per_parameter(run_of({})))


def test_layers_in_high_precision_take_the_bf16_time():
    partly_bf16 = FP8 | {"precision.first_last_layers_bf16": True, "precision.num_layers_at_end_in_bf16": 15}
    times = [
        stage_time(run_of(settings, gpus=1), 0).parts["linears"] for settings in (FP8, partly_bf16, {})
    ]  # fmt: skip
    assert times[1] == pytest.approx((times[0] + times[2]) / 2)


@pytest.mark.parametrize("constant", ["bf16_gemm_fraction", "attention_fraction", "memory_fraction", "busy_fraction"])
def test_a_faster_part_makes_a_shorter_step(constant):
    run = run_of()
    faster = dataclasses.replace(run.calibration, **{constant: 1.0})
    assert step_time(dataclasses.replace(run, calibration=faster)).seconds < step_time(run).seconds


def test_the_limit_does_not_depend_on_the_model():
    step = step_time(run_of({"training.global_batch_size": 8} | PIPELINE | {"parallel.context_parallel_size": 2}))
    assert step.limit == max(
        (name for name in step.parts if name not in ("linears", "attention", "output layer")), key=step.parts.get
    )


def test_packing_moves_three_bytes_of_each_saved_element():
    """The inputs of two norms, and of SwiGLU, in three launches; the same again to unpack them."""
    plain, packed = run_of(FP8), run_of(FP8 | {"precision.fp8_saved_activations": ("norm", "activation")})
    elements = 8192 * (2 * 4096 + 2 * 14336)
    expected = 3 * plain.calibration.cast_start_s + plain.memory_s(elements * (2 + 17 / 16))
    for direction in (compute.forward_time, compute.backward_time):
        more = direction(packed, "tensorwise").total - direction(plain, "tensorwise").total
        assert more == pytest.approx(expected)
    norms = run_of(FP8 | {"precision.fp8_saved_activations": ("norm",)})
    assert compute.packing_s(norms, False) < compute.packing_s(packed, False) / 3
