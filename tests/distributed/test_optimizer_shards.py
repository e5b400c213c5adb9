"""Saving and loading the distributed optimizer's state in shards equals megatron-core's gather and scatter."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from ranks import RankFailed, run_ranks
from small_run import PLAIN, build_run, small_config, train

from megafp8.checkpoint.load import read_tensors
from megafp8.checkpoint.progress import Progress
from megafp8.checkpoint.save import save_checkpoint
from megafp8.checkpoint.serialization import SafeReader, read_boxes
from megafp8.checkpoint.state_dict import (
    chained_optimizers,
    load_converted_state,
    load_optimizer_state,
    model_state,
    optimizer_state,
    sharding_metadata,
)
from megafp8.mcore.patches import is_installed
from megafp8.training.run import Run

# With one bucket. With several, megatron-core reads a parameter from the place of its padding.
ONE_BUCKET = f"{PLAIN} --use-distributed-optimizer"
NAMES = ("param", "exp_avg", "exp_avg_sq")


def own_state(run: Run) -> list[torch.Tensor]:
    """Copies of this rank's master weights and moments."""
    (part,) = chained_optimizers(run.training_state.optimizer)
    found = []
    for parameter in part.model_param_gbuf_map:
        tensors = part._get_main_param_and_optimizer_states(parameter)
        found += [tensors[name].clone() for name in NAMES]
    return found


def forget(run: Run) -> None:
    """Set master weights and moments to values that no checkpoint has."""
    (part,) = chained_optimizers(run.training_state.optimizer)
    for parameter in part.model_param_gbuf_map:
        tensors = part._get_main_param_and_optimizer_states(parameter)
        for name in NAMES:
            tensors[name].data.fill_(-7.0)


def core_state(run: Run, is_loading: bool) -> dict[str, Any]:
    """Weights and optimizer state as megatron-core shards them."""
    model = model_state(run.training_state.chunks)
    options = {"is_loading": is_loading, "metadata": sharding_metadata(run.training_state.chunks)}
    return model | {"optimizer": run.training_state.optimizer.sharded_state_dict(model, **options)}


def read_state(run: Run, path: Path) -> None:
    """Load weights and optimizer state."""
    model = model_state(run.training_state.chunks)
    wanted = model | {"optimizer": optimizer_state(run.training_state, model, is_loading=True)}
    loaded, _ = read_tensors(path, dict(wanted), run.training_state.chunks, ["model"])
    load_optimizer_state(run.training_state, loaded["optimizer"], {})
    load_converted_state(run.training_state, wanted["optimizer"], {}, partial(read_boxes, SafeReader(path)))


@pytest.mark.parametrize("layout", ["", "--tensor-model-parallel-size 2"], ids=["dp4", "dp2-tp2"])
def test_megatron_core_reads_sharded_optimizer_state(layout: str, tmp_path: Path) -> None:
    config = small_config("llama", f"{ONE_BUCKET} --micro-batch-size 2 {layout}", 4)

    def save_and_read() -> int:
        run = build_run(config)
        train(run, 2)
        path = save_checkpoint(tmp_path, config, run.training_state, Progress(2, 16))
        before = own_state(run)
        forget(run)
        state = dist_checkpointing.load(core_state(run, is_loading=True), str(path))
        run.training_state.optimizer.load_state_dict(state["optimizer"])
        for old, new in zip(before, own_state(run), strict=True):
            assert torch.equal(old, new)
        return len(before)

    assert min(run_ranks(4, save_and_read)) > 0


def test_optimizer_state_saved_by_megatron_core_is_read(tmp_path: Path) -> None:
    config = small_config("llama", ONE_BUCKET, 2)

    def save_and_read() -> int:
        run = build_run(config)
        train(run, 2)
        state = core_state(run, is_loading=False)
        dist_checkpointing.save(state, str(tmp_path), TorchDistSaveShardedStrategy("torch_dist", 1))
        before = own_state(run)
        forget(run)
        read_state(run, tmp_path)
        for old, new in zip(before, own_state(run), strict=True):
            assert torch.equal(old, new)
        return len(before)

    if is_installed(">=0.19"):  # it saves no common.pt, without which nothing is read
        with pytest.raises(RankFailed, match="has no common.pt: .* another program wrote the checkpoint"):
            run_ranks(2, save_and_read)
    else:
        assert min(run_ranks(2, save_and_read)) > 0


def test_low_precision_moments_are_saved_in_fp32(tmp_path: Path) -> None:
    """Transformer Engine's Adam stores FP8 and FP16. Beside FP8 weights megatron-core returns the stored form."""
    config = small_config("llama", ONE_BUCKET, 2)
    scale = 4.0

    def save_and_read() -> int:
        run = build_run(config)
        train(run, 2)
        (part,) = chained_optimizers(run.training_state.optimizer)
        state = part.optimizer.state
        part.optimizer.get_unscaled_state = lambda shard, name: state[shard][name] * scale
        part.optimizer.set_scaled_state = lambda shard, name, values: state[shard][name].copy_(values / scale)
        part.config.use_precision_aware_optimizer = True
        path = save_checkpoint(tmp_path, config, run.training_state, Progress(2, 16))
        before = own_state(run)
        for is_scaled in (True, False):
            part.config.use_precision_aware_optimizer = is_scaled
            forget(run)
            read_state(run, path)
            for index, (old, new) in enumerate(zip(before, own_state(run), strict=True)):
                is_moment = NAMES[index % 3] != "param"
                assert torch.equal(new, old * scale if is_moment and not is_scaled else old)
        return len(before)

    assert min(run_ranks(2, save_and_read)) > 0


@pytest.mark.parametrize("flags", ["--bf16 --use-distributed-optimizer", "--bf16", ""])
def test_checkpoint_before_the_first_step(flags: str, tmp_path: Path) -> None:
    """A run that is stopped during its first step. The run that resumes from there equals the unbroken run."""
    config = small_config("llama", f"--transformer-impl local {flags}", 2)

    def unbroken() -> list[float]:
        return train(build_run(config), 2).losses

    def save() -> list[float]:
        run = build_run(config)
        save_checkpoint(tmp_path, config, run.training_state, Progress(0, 0))
        return train(run, 2).losses

    def load() -> list[float]:
        from megafp8.checkpoint.load import load_checkpoint
        from megafp8.checkpoint.resume_point import choose_checkpoint

        run = build_run(config)
        assert load_checkpoint(choose_checkpoint(tmp_path).path, config, run.training_state).progress == Progress(0, 0)
        return train(run, 2).losses

    whole = run_ranks(2, unbroken)
    assert run_ranks(2, save) == whole
    assert run_ranks(2, load) == whole
