"""Memory and traffic of `--use-torch-fsdp2` compared with those of complete weights and gradients."""

import pytest

from megafp8.config.model_shapes import PRESETS
from megafp8.config.run_sizes import run_sizes
from megafp8.config.schema import RunConfig
from megafp8.config.settings import with_values
from megafp8.resources.memory import MemoryEstimate, estimate_memory

RUN = {**PRESETS["llama-1b"], "data.seq_length": 2048, "training.micro_batch_size": 1, "precision.bf16": True,
       "training.global_batch_size": 16, "training.train_iters": 1}  # fmt: skip
VOCABULARY = 32768


def estimate(**parallel: object) -> MemoryEstimate:
    config = with_values(RunConfig(), RUN | {f"parallel.{name}": value for name, value in parallel.items()})
    return estimate_memory(run_sizes(config, 8, VOCABULARY))


@pytest.mark.parametrize("part", ["weights_bytes", "gradients_bytes", "optimizer_bytes"])
def test_state_is_divided_by_the_ranks(part: str) -> None:
    complete, sharded = getattr(estimate(), part), getattr(estimate(use_torch_fsdp2=True), part)
    assert complete / 8 <= sharded < complete / 8 + 16  # bytes of one parameter


def test_gathered_weights_are_counted() -> None:
    """All of them without resharding, which is what the sharded ones sum to."""
    complete, sharded = estimate(), estimate(use_torch_fsdp2=True)
    stored = estimate(use_torch_fsdp2=True, torch_fsdp2_reshard_after_forward=False)
    assert stored.buffers_bytes - sharded.buffers_bytes > complete.weights_bytes / 2
    assert stored.buffers_bytes > complete.weights_bytes
    assert sharded.total_bytes < estimate(use_distributed_optimizer=True).total_bytes


def test_replicas_keep_more_of_the_state() -> None:
    full = estimate(use_torch_fsdp2=True)
    replicas = estimate(use_torch_fsdp2=True, num_distributed_optimizer_instances=2)
    for part in ("weights_bytes", "gradients_bytes", "optimizer_bytes"):
        assert getattr(replicas, part) == pytest.approx(2 * getattr(full, part), abs=16)


def test_ranks_that_gather_codes_keep_rows_in_bf16_and_codes_of_them() -> None:
    codes = RUN | {"parallel.use_torch_fsdp2": True, "precision.fp8_format": "hybrid"}
    codes |= {"precision.fp8_recipe": "tensorwise"}
    bf16, fp8 = (
        estimate_memory(
            run_sizes(with_values(RunConfig(), codes | {"precision.fp8_param_gather": value}), 8, VOCABULARY)
        )
        for value in (False, True)
    )
    layers = fp8.parameters - 2 * VOCABULARY * PRESETS["llama-1b"]["model.hidden_size"]
    assert 8 * (fp8.weights_bytes - bf16.weights_bytes) == pytest.approx(layers, rel=1e-3)
    assert fp8.buffers_bytes < bf16.buffers_bytes


@pytest.mark.parametrize(
    ("more", "num_bytes"),
    [
        ({}, 4),
        ({"parallel.num_distributed_optimizer_instances": 2}, 4 + 4 / 4),
        (
            {
                "parallel.num_distributed_optimizer_instances": 2,
                "precision.grad_reduce_fp8_intra_node": "bf16",
            },
            4 / 4,
        ),
    ],
)
def test_errors_of_fp8_gradients_are_those_of_sent_codes(more: dict, num_bytes: float) -> None:
    """Of all gradients where ranks of a replica send codes, and of a rank's rows between two replicas of four."""
    codes = {"parallel.use_torch_fsdp2": True, "precision.grad_reduce_in_fp8": True} | more
    plain, fed_back = (
        estimate_memory(run_sizes(with_values(RunConfig(), RUN | codes | each), 8, VOCABULARY))
        for each in ({}, {"precision.grad_reduce_fp8_error_feedback": True})
    )
    assert fed_back.total_bytes - plain.total_bytes == num_bytes * plain.parameters
