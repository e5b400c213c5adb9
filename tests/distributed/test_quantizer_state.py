"""Quantizer state that persists between steps: in checkpoints, under recomputation, across ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from ranks import RankFailed, run_ranks
from small_run import FOUR_LAYERS, VIRTUAL, Curve, build_run, curve_of, small_config, train
from test_checkpoint import OVERLAP, PIPELINE, STEPS, TENSOR, load_newest, run_leg, save_between
from torch import Tensor

from megafp8.checkpoint.progress import Progress
from megafp8.checkpoint.save import save_checkpoint
from megafp8.config.schema import RunConfig
from megafp8.training.evaluation import evaluation_mode
from megafp8.training.precision import delayed_scaling_tensors
from megafp8.training.run import Run

DELAYED = (
    "--bf16 --fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 4 --fp8-amax-compute-algo max "
    "--micro-batch-size 2"
)
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
NVFP4 = f"--bf16 {FOUR_LAYERS} --fp4-format e2m1 --first-last-layers-bf16 --micro-batch-size 2"
# The backward pass transforms groups of 128 tokens and channels.
QUARTET2 = (
    "--bf16 --fp4-format e2m1 --fp4-recipe quartet2 --num-layers 2 --hidden-size 128 --kv-channels 64 "
    "--ffn-hidden-size 256 --micro-batch-size 8"
)
each_case = pytest.mark.parametrize(
    ("recipe", "world_size", "flags"),
    [
        pytest.param(DELAYED, 1, "", id="delayed-one"),
        pytest.param(DELAYED, 2, TENSOR, id="delayed-tp2-sp"),
        pytest.param(DELAYED, 2, OVERLAP, id="delayed-dp2-overlap"),
        pytest.param(DELAYED, 2, VIRTUAL, id="delayed-pp2-virtual2"),
        pytest.param(NVFP4, 1, "", id="nvfp4-one"),
        pytest.param(NVFP4, 2, TENSOR, id="nvfp4-tp2-sp"),
        pytest.param(QUARTET2, 2, TENSOR, id="quartet2-tp2-sp"),
    ],
)


@each_case
def test_resume_is_bit_equal(recipe: str, world_size: int, flags: str, tmp_path: Path) -> None:
    config = small_config("llama", f"{recipe} {flags}", world_size)
    unbroken = run_ranks(world_size, save_between, config, tmp_path)
    resumed = run_ranks(world_size, run_leg, config, STEPS, tmp_path, None)
    for whole, after in zip(unbroken, resumed, strict=True):
        assert after.curve.losses == whole.curve.losses[STEPS:]
        assert after.weights == whole.weights


@each_case
def test_recomputation_is_bit_equal(recipe: str, world_size: int, flags: str) -> None:
    """Each layer runs forward twice. Other microbatches and scale updates lie between the two runs."""
    plain = run_ranks(world_size, curve_of, small_config("llama", f"{recipe} {flags}", world_size), STEPS)
    config = small_config("llama", f"{recipe} {flags} {RECOMPUTE}", world_size)
    assert run_ranks(world_size, curve_of, config, STEPS) == plain


def quantizer_states(run: Run) -> dict[str, Tensor]:
    """Histories and scales of this rank's linears."""
    return {
        f"{index}.{name}": buffer.clone()
        for index, chunk in enumerate(run.training_state.chunks)
        for name, buffer in chunk.named_buffers()
        if "quantizer_state" in name
    }


def states_after(config: RunConfig, num_steps: int) -> dict[str, Tensor]:
    run = build_run(config)
    train(run, num_steps)
    return quantizer_states(run)


@pytest.mark.parametrize("flags", [TENSOR, OVERLAP], ids=["tp2-sp", "dp2"])
def test_ranks_agree_on_scales(flags: str) -> None:
    config = small_config("llama", f"{DELAYED} {flags}", 2)
    ours, theirs = run_ranks(2, states_after, config, 2)
    assert len(ours) == 2 * 4 * 2, "history and scale of four linears in two layers"
    for name, state in ours.items():
        assert state.dtype == torch.float32
        assert torch.equal(state, theirs[name]), name
        assert (state != 1).all() if name.endswith("quant_scale") else state[-1].all()


def test_amaxes_may_stay_local_to_data_parallel_ranks() -> None:
    config = small_config("llama", f"{DELAYED} --tp-only-amax-red", 2)
    ours, theirs = run_ranks(2, states_after, config, 2)
    differing = [name for name, state in ours.items() if not torch.equal(state, theirs[name])]
    assert len(differing) == len(ours)


def states_after_load(config: RunConfig, folder: Path) -> dict[str, Tensor]:
    run = build_run(config)
    load_newest(run, folder)
    return quantizer_states(run)


def save(config: RunConfig, folder: Path) -> dict[str, Tensor]:
    run = build_run(config)
    train(run, 1)
    save_checkpoint(folder, config, run.training_state, Progress(1, run.global_batch_size))
    return quantizer_states(run)


def test_resume_in_another_layout_keeps_the_scales(tmp_path: Path) -> None:
    saved = run_ranks(2, save, small_config("llama", f"{DELAYED} {TENSOR}", 2), tmp_path)[0]
    there = run_ranks(2, states_after_load, small_config("llama", f"{DELAYED} {PIPELINE}", 2), tmp_path)
    here = run_ranks(1, states_after_load, small_config("llama", DELAYED), tmp_path)[0]
    assert here.keys() == saved.keys()
    assert all(torch.equal(here[name], state) for name, state in saved.items())
    assert sum(map(len, there)) == len(saved)


TENSORWISE = "--bf16 --fp8-format hybrid --fp8-recipe tensorwise"


@pytest.mark.parametrize("before, after", [(TENSORWISE, DELAYED), (DELAYED, TENSORWISE), ("--bf16", DELAYED)])
def test_resume_with_another_recipe(before: str, after: str, tmp_path: Path) -> None:
    """Scales that a checkpoint does not have start from their defaults."""
    run_ranks(1, save, small_config("llama", before), tmp_path)
    states = run_ranks(1, states_after_load, small_config("llama", after), tmp_path)[0]
    for name, state in states.items():
        assert torch.equal(state, torch.ones(3) if name.endswith("quant_scale") else torch.zeros(4, 3))


def test_history_of_another_length_is_refused(tmp_path: Path) -> None:
    run_ranks(1, save, small_config("llama", DELAYED), tmp_path)
    other = DELAYED.replace("--fp8-amax-history-len 4", "--fp8-amax-history-len 8")
    with pytest.raises(RankFailed) as error:
        run_ranks(1, states_after_load, small_config("llama", other), tmp_path)
    assert "use --fp8-amax-history-len 4" in str(error.value.__cause__)


def evaluated_between(config: RunConfig, evaluates: bool) -> Curve:
    run = build_run(config)
    first = train(run, 1)
    if evaluates:
        validate_and_read_states(run)
    second = train(run, 1, first_step=2)
    return Curve(first.losses + second.losses, first.grad_norms + second.grad_norms)


def validate_and_read_states(run: Run) -> None:
    chunk: Any = run.training_state.chunks[0]
    chunk.eval()
    tokens = torch.randint(0, 255, (1, 32), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(32)[None]
    with torch.no_grad():
        chunk(tokens, positions, None)
    chunk.train()


def test_validation_does_not_change_quantizer_state() -> None:
    config = small_config("llama", DELAYED)
    assert run_ranks(1, evaluated_between, config, True) == run_ranks(1, evaluated_between, config, False)


def validated_with_recording_layers() -> bool:
    run = build_run(small_config("llama", DELAYED))
    train(run, 2)
    state = delayed_scaling_tensors(run.training_state.chunks[0], run.implementation)
    before = [tensor.clone() for tensor in state]
    with evaluation_mode(run):
        for tensor in state:  # as Transformer Engine's layers do
            tensor.add_(1)
    assert state
    return all(torch.equal(*pair) for pair in zip(state, before, strict=True))


def test_validation_restores_amaxes_that_layers_record() -> None:
    assert run_ranks(1, validated_with_recording_layers) == [True]


def test_amaxes_are_reduced_over_the_right_ranks() -> None:
    """Data, tensor and context ranks of one pipeline stage."""
    flags = f"{DELAYED} {TENSOR} --pipeline-model-parallel-size 2"

    def group_ranks() -> list[int]:
        run = build_run(small_config("llama", flags, 4))
        linear = next(module for module in run.training_state.chunks[0].modules() if hasattr(module, "amax_exchange"))
        assert linear.amax_exchange.group is parallel_state.get_amax_reduction_group(with_context_parallel=True)
        return torch.distributed.get_process_group_ranks(linear.amax_exchange.group)

    assert run_ranks(4, group_ranks) == [[0, 1], [0, 1], [2, 3], [2, 3]]
