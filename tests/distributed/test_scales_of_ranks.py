"""Scales that differ between data-parallel ranks (`--tp-only-amax-red`): in checkpoints and in other layouts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from small_run import build_run, save_or_load, small_config, train, weights
from test_checkpoint import OVERLAP, PIPELINE, STEPS, TENSOR, load_newest, run_leg, save_between
from test_quantizer_state import DELAYED, quantizer_states
from torch import Tensor

from megafp8.checkpoint import local_scales
from megafp8.config.schema import RunConfig
from megafp8.models.emulated_layers import EmulatedColumnParallelLinear, emulated_linears

LOCAL = f"{DELAYED} --tp-only-amax-red"
FSDP = "--use-torch-fsdp2 --no-gradient-accumulation-fusion --micro-batch-size 1"
REPLICAS = "--num-distributed-optimizer-instances 2"
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-token-dispatcher-type alltoall "
    "--expert-model-parallel-size 2"
)


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        pytest.param(2, OVERLAP, id="dp2-overlap"),
        pytest.param(4, TENSOR, id="tp2-dp2"),
        pytest.param(4, EXPERTS, id="ep2-dp4"),
    ],
)
def test_resume_is_bit_equal(world_size: int, flags: str, tmp_path: Path) -> None:
    config = small_config("llama", f"{LOCAL} {flags}", world_size)
    unbroken = run_ranks(world_size, save_between, config, tmp_path)
    resumed = run_ranks(world_size, run_leg, config, STEPS, tmp_path, None)
    for whole, after in zip(unbroken, resumed, strict=True):
        assert after.curve.losses == whole.curve.losses[STEPS:]
        assert after.weights == whole.weights


def states_and_notes(config: RunConfig, folder: Path, is_saving: bool) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """What a rank saves, or what it has after loading, with the notes of the load."""
    run = build_run(config)
    notes = save_or_load(run, folder, STEPS, is_saving)
    return quantizer_states(run), notes


def test_another_layout_of_as_many_data_parallel_ranks_keeps_them(tmp_path: Path) -> None:
    saved = run_ranks(4, states_and_notes, small_config("llama", f"{LOCAL} {TENSOR}", 4), tmp_path, True)
    loaded = run_ranks(2, states_and_notes, small_config("llama", LOCAL, 2), tmp_path, False)
    for (states, notes), (expected, _) in zip(loaded, saved[::2], strict=True):
        assert all(torch.equal(state, expected[name]) for name, state in states.items())
        assert not any("--tp-only-amax-red" in note for note in notes)


def test_other_expert_parallel_ranks_keep_those_outside_of_experts(tmp_path: Path) -> None:
    other = EXPERTS.replace("--expert-model-parallel-size 2", "")
    saved = run_ranks(4, states_and_notes, small_config("llama", f"{LOCAL} {EXPERTS}", 4), tmp_path, True)
    loaded = run_ranks(4, states_and_notes, small_config("llama", f"{LOCAL} {other}", 4), tmp_path, False)
    for (states, notes), (expected, _) in zip(loaded, saved, strict=True):
        dense = [name for name in states if ".experts." not in name]
        assert dense and all(torch.equal(states[name], expected[name]) for name in dense)
        (note,) = (note for note in notes if "--tp-only-amax-red" in note)
        assert "all ranks start with the scales and amax histories of experts of the first rank" in note


def test_replicas_of_fsdp_keep_them(tmp_path: Path) -> None:
    """Whichever ranks have the same rows."""
    flags = f"{LOCAL.replace('--use-distributed-optimizer', '')} {FSDP}"
    two, one = (small_config("llama", text, 4) for text in (f"{flags} {REPLICAS}", flags))
    saved = run_ranks(4, states_and_notes, two, tmp_path, True)
    for (states, notes), (expected, _) in zip(run_ranks(4, states_and_notes, one, tmp_path, False), saved, strict=True):
        assert all(torch.equal(state, expected[name]) for name, state in states.items())
        assert not any("--tp-only-amax-red" in note for note in notes)


@pytest.mark.parametrize(("before", "after"), [("--bf16", LOCAL), (LOCAL, "--bf16")])
def test_runs_without_scales_say_nothing_of_them(before: str, after: str, tmp_path: Path) -> None:
    configs = [small_config("llama", flags, 2) for flags in (before, after)]
    run_ranks(2, states_and_notes, configs[0], tmp_path, True)
    for _, notes in run_ranks(2, states_and_notes, configs[1], tmp_path, False):
        assert not any("--tp-only-amax-red" in note for note in notes)


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (2, 1, "the others fit 2 data x context parallel ranks (2 with the same experts), not a run in which"),
        (2, 4, "the others fit 2 data x context parallel ranks (2 with the same experts), not 4 "),
        (1, 2, "the checkpoint has no others"),
    ],
)
def test_other_data_parallel_ranks_start_with_those_of_the_first(
    before: int, after: int, reason: str, tmp_path: Path
) -> None:
    saved, _ = run_ranks(before, states_and_notes, small_config("llama", LOCAL, before), tmp_path, True)[0]
    for states, notes in run_ranks(after, states_and_notes, small_config("llama", LOCAL, after), tmp_path, False):
        assert all(torch.equal(state, saved[name]) for name, state in states.items())
        (note,) = (note for note in notes if "--tp-only-amax-red" in note)
        assert "all ranks start with the scales and amax histories of the first" in note and reason in note


def test_a_checkpoint_with_one_state_for_all_ranks_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those had that were saved before each rank's state was."""
    config = small_config("llama", LOCAL, 2)
    with monkeypatch.context() as before:
        before.setattr(local_scales, "group_sizes", lambda _: None)
        (saved, _), _ = run_ranks(2, states_and_notes, config, tmp_path, True)
    for states, notes in run_ranks(2, states_and_notes, config, tmp_path, False):
        assert all(torch.equal(state, saved[name]) for name, state in states.items())
        assert any("all ranks start with the scales and amax histories of the first" in note for note in notes)


def states_before_and_after_a_return(config: RunConfig, folder: Path) -> bool:
    """Train past a checkpoint and load it into the same run, as a rollback does."""
    run = build_run(config)
    save_or_load(run, folder, STEPS, is_first=True)
    before = quantizer_states(run) | weights(run)
    train(run, 1, STEPS + 1)
    load_newest(run, folder)
    after = quantizer_states(run) | weights(run)
    return all(torch.equal(after[name], state) for name, state in before.items())


def test_a_return_to_a_checkpoint_restores_each_ranks_state(tmp_path: Path) -> None:
    config = small_config("llama", f"{LOCAL} {PIPELINE}", 4)
    assert run_ranks(4, states_before_and_after_a_return, config, tmp_path) == [True] * 4


def extra_states_after_a_return(config: RunConfig, folder: Path) -> list[list[int]]:
    """Those of linears that keep their state as Transformer Engine's do: one tensor of bytes."""
    linear = EmulatedColumnParallelLinear
    linear.get_extra_state = lambda self: self.kept
    linear.set_extra_state = lambda self, state: setattr(self, "kept", state)
    linear.kept = torch.tensor([dist.get_rank(), 7], dtype=torch.uint8)
    run = build_run(config)
    save_or_load(run, folder, 1, is_first=True)
    linear.kept = torch.zeros(0, dtype=torch.uint8)
    save_or_load(run, folder, 1, is_first=False)
    return [each.kept.tolist() for each in emulated_linears(run.training_state.chunks) if isinstance(each, linear)]


def test_states_of_transformer_engines_layers_belong_to_a_rank_too(tmp_path: Path) -> None:
    states = run_ranks(2, extra_states_after_a_return, small_config("llama", LOCAL, 2), tmp_path)
    assert states == [[[rank, 7]] * len(states[0]) for rank in range(2)] and states[0]
