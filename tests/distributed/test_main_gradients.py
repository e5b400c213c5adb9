"""The weight gradients of a step are summed over its microbatches in FP32, also in layers without quantization."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from ranks import run_ranks
from small_run import PLAIN, build_run, small_config
from torch import Tensor, nn

from megafp8.config.schema import RunConfig
from megafp8.training.evaluation import build_batches
from megafp8.training.step import clear_gradients, forward_backward

NUM_MICROBATCHES = 16
# Sums of 16 times 32 products in FP32. Gradients rounded to BF16 before each addition are off by 7e-4.
RELATIVE = 1e-6


def errors_of_sums(config: RunConfig) -> dict[str, float]:
    """By linear: the relative error of its main gradient against the same sum in FP64."""
    run = build_run(config)
    assert run.num_microbatches == NUM_MICROBATCHES
    (chunk,) = run.training_state.chunks
    sums: dict[nn.Parameter, Tensor] = {}

    def sum_up(weight: nn.Parameter, inputs: Tensor, grad_output: Tensor) -> None:
        assert inputs.dtype == grad_output.dtype == torch.bfloat16
        product = grad_output.double().flatten(end_dim=-2).t() @ inputs.detach().double().flatten(end_dim=-2)
        sums[weight] = sums.get(weight, 0) + product

    def watch(layer: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any], outputs: tuple[Tensor, Any]) -> None:
        weight = layer.weight if layer.weight is not None else kwargs["weight"]
        outputs[0].register_hook(lambda grad_output: sum_up(weight, args[0], grad_output))

    for layer in chunk.modules():
        if isinstance(layer, (ColumnParallelLinear, RowParallelLinear)):
            layer.register_forward_hook(watch, with_kwargs=True)
    weights = {weight: name for name, weight in chunk.module.named_parameters()}
    embedding = next(weight for weight, name in weights.items() if "word_embeddings" in name)
    if config.model.share_embeddings_and_output_weights:  # what autograd adds comes from the embedding alone
        embedding.register_hook(lambda grad: sums.update({embedding: sums[embedding] + grad.double()}))
    clear_gradients(run)
    batches = build_batches(run, run.datasets[0], 0, run.global_batch_size, num_workers=0)
    forward_backward(run, batches, run.num_microbatches, forward_only=False)
    num_tokens = run.global_batch_size * config.data.seq_length  # a power of two: dividing by it is exact
    return {
        weights[weight]: float((weight.main_grad * num_tokens - expected).norm() / expected.norm())
        for weight, expected in sums.items()
    }


@pytest.mark.parametrize("style", ["llama", "gpt2"])
def test_plain_layers_sum_weight_gradients_in_fp32(style: str) -> None:
    """In gpt2's style the output layer shares the embedding's weight, whose own gradients autograd rounds to BF16."""
    batch = f"--micro-batch-size 1 --global-batch-size {NUM_MICROBATCHES}"
    (errors,) = run_ranks(1, errors_of_sums, small_config(style, f"{PLAIN} --bf16 --num-layers 2 {batch}"))
    assert len(errors) == 2 * 4 + 1, "four linears in a layer, and the output layer"
    assert max(errors.values()) < RELATIVE, errors
