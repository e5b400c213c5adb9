"""The planner's figures for --optimizer muon."""

from __future__ import annotations

from typing import Any

import pytest
from plans import run_of

from megafp8.config import model_shapes
from megafp8.config.checkpoint_size import min_checkpoint_bytes
from megafp8.config.model_shapes import PRESETS
from megafp8.config.run_sizes import run_sizes
from megafp8.config.schema import RunConfig
from megafp8.config.settings import with_values
from megafp8.planning.communication import data_parallel_traffic
from megafp8.planning.newton_schulz import matrices_on_rank, newton_schulz_flops, newton_schulz_lines
from megafp8.planning.step_time import optimizer_s
from megafp8.resources.memory import estimate_memory

LLAMA3_8B = PRESETS["llama3-8b"]
# Query, key, value, linear_proj, linear_fc1 and linear_fc2.
SHAPES = {(4096, 4096), (1024, 4096), (28_672, 4096), (14_336, 4096)}
RUN = {
    "optimizer.optimizer": "muon", "precision.bf16": True, "data.seq_length": 4096, "training.micro_batch_size": 1,
    "training.global_batch_size": 64, "training.train_iters": 1,
}  # fmt: skip
VOCABULARY = 128_256


def config_of(preset: str = "llama3-8b", **changes: Any) -> RunConfig:
    names = {name.replace("__", "."): value for name, value in changes.items()}
    return with_values(RunConfig(), PRESETS[preset] | RUN | names)


def flops_of(config: RunConfig, ranks: int = 1) -> float:
    return newton_schulz_flops(config, run_sizes(config, ranks, VOCABULARY), 0)


def lines_of(config: RunConfig) -> list[str]:
    return newton_schulz_lines(config, run_sizes(config, 4, VOCABULARY))


def test_the_flops_of_a_layer_are_those_of_the_document() -> None:
    config = config_of()
    assert {shape for shape, _, _ in matrices_on_rank(config, run_sizes(config, 1, VOCABULARY), 0)} == SHAPES
    square, key, up, down = 30 * 4096**3, 5 * (4 * 1024**2 * 4096 + 2 * 1024**3), 1.0307921510e13, 5.497558139e12
    assert flops_of(config) == pytest.approx(32 * (2 * square + 2 * key + up + down), rel=1e-9)
    assert flops_of(config) / 32 == pytest.approx(20.1e12, rel=2e-3)
    assert lines_of(config)[0].endswith(
        "192 matrices on the first stage, 643.901 TFLOP of Newton-Schulz a step, on each rank"
    )
    assert lines_of(config_of(parallel__use_distributed_optimizer=True))[0].endswith("divided by 4 ranks")
    assert lines_of(with_values(config, {"optimizer.optimizer": "adam"})) == []


def test_tensor_parallel_ranks_repeat_or_divide_the_work() -> None:
    one = flops_of(config_of())
    two = {
        mode: flops_of(config_of(parallel__tensor_model_parallel_size=2, optimizer__muon_tp_mode=mode), 2)
        for mode in ("duplicated", "distributed", "blockwise")
    }
    assert two["duplicated"] == one
    assert one / 2 < two["distributed"] < one and two["blockwise"] < one / 2


def test_experts_are_matrices_of_their_own() -> None:
    config = config_of("mixtral-8x7b", parallel__expert_model_parallel_size=4)
    sizes = run_sizes(config, 4, VOCABULARY)
    experts = {shape: count for shape, count, _ in matrices_on_rank(config, sizes, 0)}
    assert experts[28_672, 4096] == experts[14_336, 4096] == 32 * 8 // 4
    assert len(experts) == len(SHAPES)


def test_state_has_one_moment_of_a_matrix() -> None:
    count = model_shapes.count_parameters(config_of().model, VOCABULARY)
    matrices = count.num_layers * (count.attention_weights_per_layer + count.mlp_weights_per_layer)
    others = count.total - matrices
    assert estimate_memory(run_sizes(config_of(), 1, VOCABULARY)).optimizer_bytes == 8 * matrices + 12 * others
    fp32 = estimate_memory(run_sizes(config_of(precision__bf16=False), 1, VOCABULARY))
    assert fp32.optimizer_bytes == 4 * matrices + 8 * others
    assert min_checkpoint_bytes(config_of(), VOCABULARY) == 10 * count.total
    assert min_checkpoint_bytes(config_of(optimizer__ema_decay=0.999), VOCABULARY) == 14 * count.total


def test_shared_state_is_divided_down_to_the_largest_weight() -> None:
    def bytes_on(ranks: int) -> int:
        return estimate_memory(
            run_sizes(config_of(parallel__use_distributed_optimizer=True), ranks, VOCABULARY)
        ).optimizer_bytes

    whole, embedding = bytes_on(1), 12 * VOCABULARY * 4096
    assert bytes_on(4) == -(-whole // 4)
    assert bytes_on(64) == embedding


def test_time_is_divided_with_the_state() -> None:
    def seconds(**changes: Any) -> float:
        names = {name.replace("__", "."): value for name, value in changes.items()}
        return optimizer_s(run_of(dict(RUN) | names, gpus=8), 0)

    alone, shared = (
        seconds(parallel__use_distributed_optimizer=False),
        seconds(parallel__use_distributed_optimizer=True),
    )
    assert shared < alone / 3
    assert seconds(parallel__use_distributed_optimizer=True, optimizer__muon_num_ns_steps=10) > shared
    slower = [
        seconds(parallel__use_distributed_optimizer=True, optimizer__muon_fp32_matmul_prec=precision)
        for precision in ("medium", "high", "highest")
    ]
    assert slower[0] < slower[1] < slower[2]


def test_gradients_are_all_reduced_and_weights_sent() -> None:
    shared = data_parallel_traffic(run_of(dict(RUN) | {"parallel.use_distributed_optimizer": True}, gpus=8), 0)
    alone = data_parallel_traffic(run_of(dict(RUN) | {"parallel.use_distributed_optimizer": False}, gpus=8), 0)
    assert shared.reduce_bytes == alone.reduce_bytes and shared.gather_bytes > alone.gather_bytes == 0


def test_fp8_weights_are_sent_and_kept_as_codes() -> None:
    """On Transformer Engine's layers, which keep the transposed codes, too."""
    fp8 = {"precision.fp8_format": "hybrid", "precision.fp8_recipe": "tensorwise"}
    layer_wise = {"parallel.use_distributed_optimizer": True, **fp8}
    codes = {**layer_wise, "precision.fp8_param_gather": True}
    count = model_shapes.count_parameters(config_of().model, VOCABULARY)
    matrices = count.num_layers * (count.attention_weights_per_layer + count.mlp_weights_per_layer)
    sent = [data_parallel_traffic(run_of(RUN | changes, gpus=8), 0) for changes in (layer_wise, codes)]
    assert sent[0].gather_bytes - sent[1].gather_bytes == pytest.approx(matrices * 7 / 8, rel=1e-3)
    assert sent[0].reduce_bytes == sent[1].reduce_bytes
    kept = [
        estimate_memory(run_sizes(with_values(config_of(), changes), 8, VOCABULARY)) for changes in (layer_wise, codes)
    ]
    assert kept[1].weights_bytes == 2 * count.total
    assert kept[0].weights_bytes + kept[0].fp8_copies_bytes - kept[1].weights_bytes == 2 * matrices
    assert kept[0].optimizer_bytes == kept[1].optimizer_bytes
