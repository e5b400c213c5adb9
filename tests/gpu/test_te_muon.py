"""FP8 weights with --optimizer muon and Transformer Engine's layers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from requirements import require_transformer_engine

pytestmark = pytest.mark.gpu
require_transformer_engine()

from gpu_runs import FP8_RECIPES, RECIPES, gap, gpu_curve, gpu_run, unbroken_and_resumed
from small_run import train

from megafp8.checkpoint.load import load_checkpoint
from megafp8.checkpoint.progress import Progress
from megafp8.checkpoint.save import save_checkpoint
from megafp8.training.run import Run

MUON = "--optimizer muon --muon-extra-scale-factor 0.2"
GATHER = f"{MUON} --fp8-param-gather"
STEPS = 6


def masters(run: Run) -> dict[str, torch.Tensor]:
    """Copies of the master weights; one rank has them all."""
    named = run.training_state.chunks[0].named_parameters()
    return {name: weight.main_param.clone() for name, weight in named}


def fp8_weights(run: Run) -> Iterator[Any]:
    (ownership,) = run.training_state.optimizer.ownerships
    return (weight for weight in ownership.of_this_rank if hasattr(weight, "_quantizer"))


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_fp8_weights_follow_bf16_weights(recipe: str) -> None:
    plain = gpu_curve(f"{RECIPES[recipe]} {MUON}", STEPS)
    with gpu_run(f"{RECIPES[recipe]} {GATHER}") as run:
        fp8 = train(run, STEPS)
    print(f"\n{recipe}: gap {gap(fp8, plain):.2e}; {plain.losses[0]!r} {fp8.losses[0]!r}")
    # The initial weights are the same, quantized once instead of in every forward pass.
    assert fp8.losses[0] == pytest.approx(plain.losses[0], rel=1e-4) and plain.losses[-1] < plain.losses[0]
    # Scales of delayed scaling are one step later for weights that are cast right after their update.
    assert gap(fp8, plain) < (2e-2 if recipe == "delayed" else 5e-3)


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_codes_are_those_of_the_master_weights(recipe: str) -> None:
    """Also the transposed codes, and the amaxes of delayed scaling. The codes lie in the buffer that is broadcast."""
    with gpu_run(f"{RECIPES[recipe]} {GATHER}") as run:
        train(run, 2)
        (buffers,) = run.training_state.optimizer.ownerships[0].buffers
        (buffer,) = (each for each in buffers if each.dtype == torch.uint8)
        found = list(fp8_weights(run))
        assert len(found) == 2 * 4
        for weight in found:
            rows = weight._rowwise_data if recipe == "blockwise" else weight._data
            assert rows.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
            master = weight.main_param.bfloat16()
            if recipe == "delayed":
                assert weight._quantizer.amax.item() == master.abs().max().item()
            again = weight._quantizer.copy()(master)
            assert torch.equal(again.dequantize(), weight.dequantize())
            columns = "_columnwise_data" if recipe == "blockwise" else "_transpose"
            assert torch.equal(getattr(again, columns), getattr(weight, columns))


def test_master_weights_start_from_the_initial_weights() -> None:
    """Not from their codes."""
    with gpu_run(f"{RECIPES['delayed']} {MUON}") as run:
        expected = masters(run)
    with gpu_run(f"{RECIPES['delayed']} {GATHER}") as run:
        found = masters(run)
    assert not [name for name in expected if not torch.equal(found[name], expected[name])]


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_resume_is_bit_equal(recipe: str, tmp_path: Path) -> None:
    unbroken, resumed = unbroken_and_resumed(f"{RECIPES[recipe]} {GATHER}", 3, tmp_path)
    assert resumed == unbroken


@pytest.mark.parametrize("weights_only", [False, True])
def test_a_run_with_bf16_weights_loads_the_master_weights(weights_only: bool, tmp_path: Path) -> None:
    """The weights of a checkpoint are the rounded master weights, not decoded codes."""
    with gpu_run(f"{RECIPES['tensorwise']} {GATHER}") as run:
        train(run, 2)
        path = save_checkpoint(tmp_path, run.config, run.training_state, Progress(2, 16))
        saved = masters(run)
    with gpu_run(f"{RECIPES['tensorwise']} {MUON}") as run:
        load_checkpoint(path, run.config, run.training_state, weights_only)
        loaded = masters(run)
    expected = {name: master.bfloat16().float() if weights_only else master for name, master in saved.items()}
    assert not [name for name in expected if not torch.equal(loaded[name], expected[name])]
