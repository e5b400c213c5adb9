"""Host memory for checkpoints: constant to resume, and as large as the state only where it is copied."""

import pytest

from megafp8.config import dimensions
from megafp8.config.checkpoint_size import FILES_PER_RANK, MAX_LAG_BYTES
from megafp8.config.run_sizes import run_sizes
from megafp8.config.schema import RunConfig
from megafp8.config.settings import with_values
from megafp8.planning.host_memory import checkpoint_memory, largest_tensor_bytes
from megafp8.resources.memory import estimate_memory

VOCAB = 32_000
MODEL = {
    "model.hidden_size": 1024,
    "model.num_attention_heads": 8,
    "model.max_position_embeddings": 128,
    "data.seq_length": 128,
    "training.micro_batch_size": 1,
    "training.global_batch_size": 8,
    "training.train_iters": 1,
    "precision.bf16": True,
    "parallel.use_distributed_optimizer": True,
}


def memory_of(world_size=1, num_layers=200, **changes):
    """The memory, and the bytes of weights and of FP32 state that the rank writes."""
    names = {name.replace("__", "."): value for name, value in changes.items()}
    config = with_values(RunConfig(), MODEL | {"model.num_layers": num_layers} | names)
    estimate = estimate_memory(run_sizes(config, world_size, VOCAB))
    memory = checkpoint_memory(config, world_size, VOCAB, estimate)
    return memory, 2 * estimate.parameters, 12 * estimate.parameters // world_size


def test_memory_to_resume_is_the_largest_saved_tensor():
    small, large = memory_of(num_layers=2)[0], memory_of(num_layers=200)[0]
    assert small.resume_bytes == large.resume_bytes == 4 * VOCAB * 1024
    converted, _, _ = memory_of(optimizer__use_precision_aware_optimizer=True)
    assert converted.resume_bytes == 4 * VOCAB * 1024


def test_a_rank_reads_whole_what_one_rank_of_another_layout_saved():
    saved = with_values(RunConfig(), MODEL | {"model.num_layers": 2})
    config = with_values(saved, {"parallel.tensor_model_parallel_size": 8})
    estimate = estimate_memory(run_sizes(config, 8, VOCAB))
    assert checkpoint_memory(config, 8, VOCAB, estimate).resume_bytes == 4 * VOCAB * 1024 // 8
    assert checkpoint_memory(config, 8, VOCAB, estimate, saved).resume_bytes == 4 * VOCAB * 1024


def test_a_save_holds_what_is_not_hashed_yet():
    memory, _, _ = memory_of()
    assert memory.save_bytes == FILES_PER_RANK * (MAX_LAG_BYTES + 4 * VOCAB * 1024)
    small, weights, state = memory_of(num_layers=1)
    assert small.save_bytes == weights + state  # it has no more


@pytest.mark.parametrize("world_size", [1, 4])
def test_copies_are_counted(world_size):
    copied, weights, state = memory_of(world_size, checkpoint__async_save=True)
    assert copied.save_bytes == pytest.approx(weights + state, abs=12)
    converted, _, _ = memory_of(world_size, optimizer__use_precision_aware_optimizer=True)
    assert converted.save_bytes >= state
    weights_only, _, _ = memory_of(world_size, checkpoint__async_save=True, checkpoint__no_save_optim=True)
    assert weights_only.save_bytes == weights


def test_the_largest_tensor_is_the_embedding_or_a_matrix_of_an_mlp():
    config = with_values(RunConfig(), MODEL | {"model.num_layers": 1, "model.swiglu": True})
    assert largest_tensor_bytes(config, VOCAB) == 4 * VOCAB * 1024
    assert largest_tensor_bytes(config, 10) == 4 * 2 * dimensions.ffn_hidden_size(config.model) * 1024
