"""A resume reads into the tensors of the run: host memory never has a second copy of the optimizer state."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
from ranks import run_ranks
from small_run import build_run, small_config

from megafp8.checkpoint import state_dict
from megafp8.checkpoint.directory import checkpoint_path
from megafp8.checkpoint.load import load_checkpoint
from megafp8.checkpoint.progress import Progress
from megafp8.checkpoint.save import save_checkpoint
from megafp8.checkpoint.state_dict import chained_optimizers
from megafp8.config.schema import RunConfig
from megafp8.device.platform import peak_resident_bytes, resident_bytes
from megafp8.training.run import Run

SHAPE = "--bf16 --hidden-size 256 --num-attention-heads 4"
DISTRIBUTED = f"{SHAPE} --use-distributed-optimizer"
LAYERS = (2, 26)  # 2 and 20 million parameters, and equally large tensors
ROWS = 2**17  # of an embedding, 134 MB in FP32


def convert_state(run: Run) -> None:
    """Let the optimizer have its state in another form than FP32, as Transformer Engine's Adam does."""
    (part,) = chained_optimizers(run.training_state.optimizer)
    part.config.use_precision_aware_optimizer = True
    optimizer = part.optimizer
    optimizer.get_unscaled_state = lambda shard, name: optimizer.state[shard][name] * 4
    optimizer.set_scaled_state = lambda shard, name, values: optimizer.state[shard][name].copy_(values / 4)


def save_first(config: RunConfig, folder: Path) -> None:
    save_checkpoint(folder, config, build_run(config).training_state, Progress(0, 0))


def extra_bytes(config: RunConfig, folder: Path, is_converted: bool) -> tuple[int, float]:
    """Bytes at the peak of a load beside what remains after it, and the number of parameters that this rank updates."""
    run = build_run(config)
    if is_converted:
        convert_state(run)
    run.platform.reset_peak_memory()
    # On a CPU a gather copies the weights. An optimizer with another form runs on GPUs only.
    with mock.patch.object(state_dict, "gather_weights"):
        load_checkpoint(checkpoint_path(folder, 0), config, run.training_state)
    peak = peak_resident_bytes()
    run.platform.reset_peak_memory()
    parameters = sum(parameter.numel() for chunk in run.training_state.chunks for parameter in chunk.parameters())
    return peak - resident_bytes(), parameters / run.rank_position.world_size


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
    """At most 1 byte a parameter beside the 12 of the state: the slope between two sizes, which have the same rest."""
    found = []
    for num_layers in LAYERS:
        config, folder = (
            small_config(style, f"{flags} --num-layers {num_layers}", world_size),
            tmp_path / str(num_layers),
        )
        run_ranks(world_size, save_first, config, folder)
        found.append(run_ranks(world_size, extra_bytes, config, folder, is_converted))
    for (few, small), (many, large) in zip(*found, strict=True):
        assert (many - few) / (large - small) < 1


@pytest.mark.parametrize("is_converted", [False, True], ids=["in place", "another form"])
def test_a_resume_holds_one_tensor_that_is_read(is_converted: bool, tmp_path: Path) -> None:
    """The bound is 67 MB above one tensor. What is converted is another, on the optimizer's device: here the CPU."""
    config = small_config("gpt2", f"{DISTRIBUTED} --num-layers 1 --vocab-size {ROWS - 1}")
    run_ranks(1, save_first, config, tmp_path)
    ((extra, _),) = run_ranks(1, extra_bytes, config, tmp_path, is_converted)
    assert extra / (ROWS * 256 * 4) < 1.5 + is_converted
