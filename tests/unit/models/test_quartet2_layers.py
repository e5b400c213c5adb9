"""Quartet II in tensor-parallel layers: each shard is the linear of its part of the weight, with the layer's signs."""

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from ranks import run_ranks
from torch import nn

from megafp8.mcore import cpu_patches
from megafp8.models.emulated_layers import EmulatedColumnParallelLinear, EmulatedRowParallelLinear
from megafp8.quantization.linear import emulated_linear
from megafp8.quantization.linear_plan import LinearPlan
from megafp8.quantization.nvfp4 import RoundingNoise
from megafp8.recipes import quartet2

SIZE, TOKENS = 256, 256
RECIPE = quartet2.build("e2m1")


def check_shards(is_column: bool, sequence_parallel: bool) -> None:
    cpu_patches.install()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    rank, group = dist.get_rank(), parallel_state.get_tensor_model_parallel_group()
    config = TransformerConfig(
        num_layers=1, hidden_size=SIZE, num_attention_heads=4, use_cpu_initialization=True,
        perform_initialization=False, tensor_model_parallel_size=2, sequence_parallel=sequence_parallel,
    )  # fmt: skip
    spec = ModuleSpec(EmulatedColumnParallelLinear if is_column else EmulatedRowParallelLinear, {"recipe": RECIPE})
    options = {"gather_output": False} if is_column else {"input_is_parallel": True}
    layer = build_module(
        spec, SIZE, SIZE, config=config, init_method=nn.init.ones_, bias=False, skip_bias_add=False, **options
    )
    source = torch.Generator().manual_seed(3)
    x, w, dy = (torch.randn(shape, generator=source) for shape in ((TOKENS, 1, SIZE), (SIZE, SIZE), (TOKENS, 1, SIZE)))
    x[: TOKENS // 2] *= 1.37  # the parts have other amaxes
    with torch.no_grad():
        layer.weight.copy_(w.chunk(2, 0 if is_column else 1)[rank])

    ours = x if is_column else x.chunk(2, -1)[rank]
    split = sequence_parallel and is_column
    given = (ours.chunk(2, 0)[rank] if split else ours).clone().requires_grad_()
    grad = dy.chunk(2, -1)[rank] if is_column else dy
    plan = LinearPlan(  # with sequence parallelism, the ranks share the scale of the input's transform too
        recipe=RECIPE,
        noise=RoundingNoise(layer.quantizer_state.name),
        amax_groups=layer.amax_groups(sequence_parallel),
    )
    y, _ = layer(given)
    y.backward(grad.chunk(2, 0)[rank] if sequence_parallel and not is_column else grad)

    lone, weight = ours.clone().requires_grad_(), layer.weight.detach().clone().requires_grad_()
    expected = emulated_linear(lone, weight, None, plan)
    expected.backward(grad)
    if not is_column:
        dist.all_reduce(expected := expected.detach(), group=group)
        expected = expected.chunk(2, 0)[rank] if sequence_parallel else expected
    dx = lone.grad
    if is_column:
        dist.all_reduce(dx, group=group)
        dx = dx.chunk(2, 0)[rank] if split else dx
    for found, wanted in ((y, expected), (given.grad, dx), (layer.weight.grad, weight.grad)):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("is_column", [True, False], ids=["column", "row"])
def test_shards_are_linears_of_their_part_of_the_weight(is_column: bool, sequence_parallel: bool) -> None:
    """With sequence parallelism, the gathered codes of fprop are what the backward pass quantizes again."""
    run_ranks(2, check_shards, is_column, sequence_parallel)
