"""When the plan reports that FP8 is not faster."""

from __future__ import annotations

import pytest
from plans import FP8, TENSOR, config_of, run_of

from megafp8.config.layer_backends import LAYER_BACKENDS, TRANSFORMER_ENGINE
from megafp8.device.capability import TARGETS
from megafp8.device.gpus import GPUS, find_gpu
from megafp8.planning import compute
from megafp8.planning.dry_run import warning_text
from megafp8.planning.fit import fp8_warnings, in_high_precision, linear_gains
from megafp8.planning.step_time import step_time

NARROW = FP8 | {
    "model.num_layers": 4, "model.hidden_size": 256, "model.ffn_hidden_size": 704, "model.num_attention_heads": 4,
    "model.num_query_groups": 2, "data.seq_length": 256, "model.vocab_size": 4096,
}  # fmt: skip


@pytest.mark.parametrize("gpu", ["h100", "h200"])
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise"])
def test_a_large_model_gives_no_warning(gpu: str, recipe: str) -> None:
    assert fp8_warnings(run_of(FP8 | {"precision.fp8_recipe": recipe}, gpu=gpu)) == []


def test_a_narrow_model_gives_a_warning_with_the_planned_ratio() -> None:
    run = run_of(NARROW, gpus=1)
    speed = step_time(in_high_precision(run)).seconds / step_time(run).seconds
    first, *others = fp8_warnings(run)
    assert "--fp8-recipe tensorwise" in first and f"{speed:.2f} of BF16's speed" in first and speed < 0.9
    assert any("for the host" in line and "--micro-batch-size" in line for line in others)


@pytest.mark.parametrize("is_one_pass", [True, False])
def test_a_graph_is_advised_where_the_run_can_have_one(is_one_pass: bool) -> None:
    settings = {"parallel.use_distributed_optimizer": is_one_pass}
    (line,) = [line for line in fp8_warnings(run_of(NARROW | settings, gpus=1)) if "for the host" in line]
    assert ("--cuda-graph-impl local" in line) == is_one_pass


def test_linears_slowed_by_casts_are_named() -> None:
    """Few channels and many tokens: large tensors are quantized for small GEMMs."""
    run = run_of(NARROW | {"data.seq_length": 65_536})
    small = [gain.linear.name for gain in linear_gains(run) if gain.speedup < 1]
    assert small == ["linear_fc1"]
    (line,) = [line for line in fp8_warnings(run) if line.startswith("too small")]
    assert "linear_fc1 (256 to 1408 channels, 0." in line and "linear_qkv" not in line


def test_gains_add_up_to_the_layer() -> None:
    run = run_of(FP8 | TENSOR)
    gains = linear_gains(run)
    forward, backward = (side(run, "tensorwise") for side in (compute.forward_time, compute.backward_time))
    assert sum(gain.quantized_s for gain in gains) == pytest.approx(forward.gemms + backward.gemms)
    weights = sum(gain.linear.in_features * gain.linear.out_features for gain in gains)
    # 8 GPUs in fours: 2 data-parallel ranks share 64 sequences.
    of_weights_s = compute.cast_s(run, "tensorwise", weights / 32, len(gains) / 32)
    assert sum(gain.casts_s for gain in gains) == pytest.approx(forward.casts + backward.casts + of_weights_s)


def test_high_precision_variant_is_otherwise_the_same_run() -> None:
    run = in_high_precision(run_of(FP8 | {"precision.fp8_param_gather": True}))
    assert run.recipe == "bf16" and run.config.model == run_of().config.model
    assert not run.config.precision.fp8_param_gather


@pytest.mark.parametrize(
    ("target", "implementation", "is_warned"),
    [("h200", "transformer_engine", True), ("h200", "emulated", False), ("cpu", "transformer_engine", False)],
)
def test_a_dry_run_warns_where_the_gain_is_known(target: str, implementation: str, is_warned: bool) -> None:
    text = warning_text(config_of(NARROW), TARGETS[target], LAYER_BACKENDS[implementation], 4096, 1)
    assert [line.startswith("warning: --fp8-recipe tensorwise") for line in text] == [True] * is_warned
    text = warning_text(config_of(), TARGETS[target], LAYER_BACKENDS[implementation], 4096, 1)
    assert not any("faster than BF16" in line for line in text)


@pytest.mark.parametrize("base", [{}, {"precision.fp8_format": None}])
def test_a_precision_map_is_planned_and_gives_a_warning(base: dict[str, None]) -> None:
    mapped = NARROW | base | {"precision.precision_map": ("*.linear_fc2=tensorwise/hybrid",)}
    (text,) = warning_text(config_of(mapped), TARGETS["h200"], TRANSFORMER_ENGINE, 4096, 1)
    assert (
        text.startswith("warning: the precision map is not expected to be faster than BF16") and "too small" not in text
    )
    scheduled = config_of(mapped | {"precision.fp8_schedule": "bf16:9,fp8"})
    assert warning_text(scheduled, TARGETS["h200"], TRANSFORMER_ENGINE, 4096, 1) == []


@pytest.mark.parametrize(("name", "gpu"), [("NVIDIA H200", "h200"), ("h100", "h100"), ("NVIDIA GB200", "gb200")])
def test_gpus_are_found_by_short_and_full_name(name: str, gpu: str) -> None:
    assert find_gpu(name) is GPUS[gpu]
    assert find_gpu("NVIDIA H200 MIG 1g.18gb") is None
