"""A resume reads into the tensors of the run: host memory never has a second copy of the optimizer state."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import run_ranks
from small_run import build_run, small_config

from megafp8.checkpoint.directory import checkpoint_path
from megafp8.checkpoint.load import load_checkpoint
from megafp8.checkpoint.progress import Progress
from megafp8.checkpoint.save import save_checkpoint
from megafp8.checkpoint.state_dict import chained_optimizers
from megafp8.config.schema import RunConfig
from megafp8.device.platform import peak_resident_bytes, resident_bytes
from megafp8.training.run import Run

# 11 million parameters, of which the largest tensor has 2%.
SHAPE = "--bf16 --num-layers 14 --hidden-size 256 --num-attention-heads 4"
DISTRIBUTED = f"{SHAPE} --use-distributed-optimizer"


def convert_state(run: Run) -> None:
    """Let the optimizer have its state in another form than FP32, as Transformer Engine's Adam does."""
    (part,) = chained_optimizers(run.trainee.optimizer)
    part.config.use_precision_aware_optimizer = True
    optimizer = part.optimizer
    optimizer.get_unscaled_state = lambda shard, name: optimizer.state[shard][name] * 4
    optimizer.set_scaled_state = lambda shard, name, values: optimizer.state[shard][name].copy_(values / 4)


def save_first(config: RunConfig, folder: Path) -> None:
    save_checkpoint(folder, config, build_run(config).trainee, Progress(0, 0))


def extra_bytes(config: RunConfig, folder: Path, is_converted: bool) -> float:
    """Bytes for each parameter of this rank's shard at the peak of a load, beside what remains after it."""
    run = build_run(config)
    if is_converted:
        convert_state(run)
    run.platform.reset_peak_memory()
    load_checkpoint(checkpoint_path(folder, 0), config, run.trainee)
    peak = peak_resident_bytes()
    run.platform.reset_peak_memory()
    parameters = sum(parameter.numel() for chunk in run.trainee.chunks for parameter in chunk.parameters())
    return (peak - resident_bytes()) / parameters * run.place.world_size


@pytest.mark.parametrize(
    ("style", "flags", "world_size", "is_converted"),
    [
        pytest.param("gpt2", DISTRIBUTED, 1, False, id="in place"),
        pytest.param("llama", DISTRIBUTED, 1, False, id="gated MLP"),
        pytest.param("llama", DISTRIBUTED, 2, False, id="two ranks"),
        pytest.param("gpt2", DISTRIBUTED, 1, True, id="another form"),
        pytest.param("llama", SHAPE, 1, False, id="without the distributed optimizer"),
    ],
)
def test_a_resume_has_no_second_copy_of_the_state(
    style: str, flags: str, world_size: int, is_converted: bool, tmp_path: Path
) -> None:
    """The state has 12 bytes a parameter, and a copy of a third of it, such as one moment, 4."""
    config = small_config(style, flags, world_size)
    run_ranks(world_size, save_first, config, tmp_path)

    assert max(run_ranks(world_size, extra_bytes, config, tmp_path, is_converted)) < 4
