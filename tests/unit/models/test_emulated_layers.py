"""The emulated parallel layers on two gloo ranks compared with the same linear on one, and their use in megatron-core.

Ranks are forked, so that their patches and initialization stay with them.
"""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from ranks import run_ranks
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from megafp8.mcore import cpu_patches
from megafp8.models.emulated_layers import EmulatedColumnParallelLinear, EmulatedRowParallelLinear, cached_weight_codes
from megafp8.quantization.linear import emulated_linear
from megafp8.quantization.linear_plan import LinearPlan
from megafp8.recipes import blockwise, mxfp8, nvfp4, tensorwise
from megafp8.recipes.base import LinearRecipe

RECIPE = tensorwise.build("hybrid")
BLOCK_RECIPES = {
    "blockwise": blockwise.build("hybrid"),
    "mxfp8": mxfp8.build("e4m3"),
    "nvfp4": nvfp4.build("e2m1", fp4_stochastic_rounding=False),
    "four-over-six": nvfp4.build("e2m1", fp4_stochastic_rounding=False, fp4_four_over_six=True),
}
INPUTS, OUTPUTS, TOKENS, BATCH = 32, 48, 8, 2
TOKENS_OF_A_BLOCK = 128  # tokens of each rank's microbatch at least, so that blocks along tokens end with it


# --- ranks ------------------------------------------------------------------------------------------------------------


def on_ranks(count: int, body: Callable[..., None], *args: object, tensor: int = 1, context: int = 1) -> None:
    """Run `body(*args)` on `count` forked gloo ranks with the given layout; raise what any of them raised."""

    def rank() -> None:
        cpu_patches.install()
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor, context_parallel_size=context)
        body(*args)

    run_ranks(count, rank)


# --- one layer --------------------------------------------------------------------------------------------------------


def configuration(**changes: object) -> TransformerConfig:
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    return TransformerConfig(
        num_layers=1, hidden_size=INPUTS, num_attention_heads=4, use_cpu_initialization=True,
        perform_initialization=False, tensor_model_parallel_size=tensor, **changes,
    )  # fmt: skip


def build_layer(kind: str, *, config: TransformerConfig, plain: bool = False, bias: bool = False, **params: object):  # noqa: ANN201
    """A layer built from a spec, as megatron-core does."""
    emulated = {"column": EmulatedColumnParallelLinear, "row": EmulatedRowParallelLinear}[kind]
    module = {"column": ColumnParallelLinear, "row": RowParallelLinear}[kind] if plain else emulated
    options = {"gather_output": False} if kind == "column" else {"input_is_parallel": True}
    spec = ModuleSpec(module, {} if plain else {"recipe": RECIPE} | params)
    return build_module(
        spec, INPUTS, OUTPUTS, config=config, init_method=nn.init.ones_, bias=bias, skip_bias_add=False, **options
    )


def full_tensors(tokens: int = TOKENS) -> tuple[Tensor, Tensor, Tensor]:
    """x, w, dy, complete; the two parts along every dim have different amaxes."""
    generator = torch.Generator().manual_seed(3)
    shapes = (tokens, BATCH, INPUTS), (OUTPUTS, INPUTS), (tokens, BATCH, OUTPUTS)
    wholes = [torch.randn(shape, generator=generator) for shape in shapes]
    for whole in wholes:
        for dim in range(whole.ndim):
            whole.narrow(dim, 0, whole.shape[dim] // 2).mul_(1.37)
    return tuple(wholes)


def mine(whole: Tensor, dim: int) -> Tensor:
    """This rank's part."""
    return whole.chunk(2, dim)[dist.get_rank()].contiguous()


def expected(kind: str, reduction: str, recipe: LinearRecipe = RECIPE, tokens: int = TOKENS) -> tuple[Tensor, ...]:
    """y, dx, dw, complete, from one process. With "te", each part of the weight is a linear with its own scales."""
    x, w, dy = full_tensors(tokens)
    x.requires_grad_()
    w.requires_grad_()
    plan = LinearPlan(recipe=recipe)
    if reduction == "all":
        y = emulated_linear(x, w, None, plan)
    elif kind == "column":
        y = torch.cat([emulated_linear(x, half, None, plan) for half in w.chunk(2)], dim=-1)
    else:
        halves = zip(x.chunk(2, -1), w.chunk(2, -1), strict=True)
        y = sum(emulated_linear(x_half, w_half, None, plan) for x_half, w_half in halves)
    y.backward(dy)
    return y.detach(), x.grad, w.grad


def check_tensor_parallel(
    kind: str, reduction: str, sequence_parallel: bool, recipe: LinearRecipe = RECIPE, tokens: int = TOKENS
) -> None:
    """The two shards of a layer give the two parts of the full layer's result."""
    config = configuration(sequence_parallel=sequence_parallel)
    layer = build_layer(kind, config=config, recipe=recipe, amax_reduction=reduction)
    x, w, dy = full_tensors(tokens)
    column = kind == "column"
    with torch.no_grad():
        layer.weight.copy_(mine(w, 0 if column else 1))
    split_input = 0 if sequence_parallel and column else None if column else -1
    split_output = -1 if column else 0 if sequence_parallel else None
    x = (x if split_input is None else mine(x, split_input)).requires_grad_()
    y, _ = layer(x)
    y.backward(dy if split_output is None else mine(dy, split_output))

    whole_y, whole_dx, whole_dw = expected(kind, reduction, recipe, tokens)
    pairs = [
        (y, whole_y, split_output),
        (x.grad, whole_dx, split_input),
        (layer.weight.grad, whole_dw, 0 if column else 1),
    ]
    # FP32 sums of 32 to 48 addends of size 10, or as many as there are tokens, in another order.
    atol = 2e-5 * max(1, tokens * BATCH / OUTPUTS)
    for ours, whole, dim in pairs:
        torch.testing.assert_close(ours, whole if dim is None else mine(whole, dim), rtol=1e-6, atol=atol)


@pytest.mark.parametrize("reduction", ["te", "all"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("kind", ["column", "row"])
def test_two_shards_equal_the_full_layer(kind: str, sequence_parallel: bool, reduction: str) -> None:
    on_ranks(2, check_tensor_parallel, kind, reduction, sequence_parallel, tensor=2)


@pytest.mark.parametrize("tokens", [TOKENS, TOKENS_OF_A_BLOCK], ids=["blocks span ranks", "blocks end with ranks"])
@pytest.mark.parametrize("recipe", BLOCK_RECIPES)
@pytest.mark.parametrize("kind", ["column", "row"])
def test_two_shards_of_block_recipes_equal_the_full_layer(kind: str, recipe: str, tokens: int) -> None:
    """With sequence parallelism. Column blocks are those of the gathered tensor in any case."""
    on_ranks(2, check_tensor_parallel, kind, "te", True, BLOCK_RECIPES[recipe], tokens, tensor=2)


def check_random_numbers(kind: str, tensor: int) -> None:
    layer = build_layer(kind, config=configuration(), recipe=nvfp4.build("e2m1"), noise_name="7|layer 3")
    name = layer.quantizer_state.name
    assert name.startswith("7|layer 3|")
    names: list[object] = [None, None]
    dist.all_gather_object(names, name)
    # Tensor-parallel ranks of a row-parallel layer have the same gradients.
    assert (names[0] == names[1]) == (kind == "row" and tensor == 2)


@pytest.mark.parametrize("kind", ["column", "row"])
@pytest.mark.parametrize("tensor", [1, 2])
def test_other_gradients_are_rounded_by_other_random_numbers(kind: str, tensor: int) -> None:
    on_ranks(2, check_random_numbers, kind, tensor, tensor=tensor)


def check_context_parallel(kind: str) -> None:
    """With "all", the two parts of a sequence are quantized with one scale."""
    layer = build_layer(kind, config=configuration(), amax_reduction="all")
    x, w, dy = full_tensors()
    with torch.no_grad():
        layer.weight.copy_(w)
    x = mine(x, 0).requires_grad_()
    layer(x)[0].backward(mine(dy, 0))
    _, whole_dx, _ = expected(kind, "all")
    torch.testing.assert_close(x.grad, mine(whole_dx, 0), rtol=1e-6, atol=2e-5)


@pytest.mark.parametrize("kind", ["column", "row"])
def test_scales_do_not_depend_on_context_parallelism(kind: str) -> None:
    on_ranks(2, check_context_parallel, kind, context=2)


# --- in megatron-core -------------------------------------------------------------------------------------------------


def check_same_layer_as_plain(kind: str) -> None:
    config = configuration()
    emulated, plain = (build_layer(kind, config=config, plain=is_plain, bias=True) for is_plain in (False, True))
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    ours, theirs = (layer.sharded_state_dict("layer.", metadata=metadata) for layer in (emulated, plain))
    assert list(ours) == list(theirs)
    for key, sharded in theirs.items():
        for field in ("key", "dtype", "local_shape", "global_shape", "global_offset", "replica_id"):
            assert getattr(ours[key], field, None) == getattr(sharded, field, None), (key, field)
    for (name, ours), (_, theirs) in zip(emulated.named_parameters(), plain.named_parameters(), strict=True):
        assert vars(ours) == vars(theirs), name


@pytest.mark.parametrize("kind", ["column", "row"])
def test_checkpoint_equals_that_of_the_plain_layer(kind: str) -> None:
    on_ranks(2, check_same_layer_as_plain, kind, tensor=2)


class OneLayer(MegatronModule):
    """A model as data parallelism needs it."""

    def __init__(self, config: TransformerConfig, layer: nn.Module):
        super().__init__(config)
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


def check_overlapped_reduction(fuse: bool) -> None:
    """Two microbatches of two data-parallel ranks: main_grad is the mean over the ranks, hooks fire in both modes."""
    config = configuration()
    x, w, dy = full_tensors()
    layer = build_layer("row", config=config)
    layer.gradient_accumulation_fusion = fuse
    with torch.no_grad():
        layer.weight.copy_(w)
    ddp_config = DistributedDataParallelConfig(overlap_grad_reduce=True)
    model = DistributedDataParallel(config, ddp_config, OneLayer(config, layer))
    model.zero_grad_buffer()
    with model.no_sync():
        model(mine(x, 0)).backward(mine(dy, 0))
    model(mine(x, 0)).backward(mine(dy, 0))
    model.finish_grad_sync()

    total = torch.zeros_like(w)
    for x_half, dy_half in zip(x.chunk(2), dy.chunk(2), strict=True):
        weight = w.clone().requires_grad_()
        emulated_linear(x_half, weight, None, LinearPlan(recipe=RECIPE)).backward(dy_half)
        total += weight.grad
    torch.testing.assert_close(layer.weight.main_grad, total, rtol=1e-6, atol=2e-5)
    assert layer.weight.grad_added_to_main_grad == fuse


@pytest.mark.parametrize("fuse", [False, True])
def test_gradients_reach_overlapped_data_parallelism(fuse: bool) -> None:
    on_ranks(2, check_overlapped_reduction, fuse)


@pytest.fixture
def lone_rank() -> Iterator[None]:
    """A process group of one, so that a layer can be built here without gloo's threads, which do not survive a fork."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def test_weight_codes_are_kept_inside_the_context_only(lone_rank: None) -> None:
    layer = build_layer("row", config=configuration())
    x, w, _ = full_tensors()

    def forward_with(weight: Tensor) -> Tensor:
        layer.weight.data = weight.clone()  # as optimizers write: the version counter does not change
        return layer(x)[0].detach()

    once, twice = forward_with(w), forward_with(2 * w)
    assert not torch.equal(once, twice)
    with cached_weight_codes([layer]):
        assert torch.equal(forward_with(w), once)
        assert torch.equal(forward_with(2 * w), once), "the codes of the first use"
    assert torch.equal(forward_with(2 * w), twice)
    with pytest.raises(RuntimeError), cached_weight_codes([layer]):
        forward_with(w)
        raise RuntimeError
    assert torch.equal(forward_with(2 * w), twice), "dropped after an error too"


def test_no_recipe_is_the_plain_layer(lone_rank: None) -> None:
    x, w, _ = full_tensors()
    unquantized = build_layer("row", config=configuration(), recipe=None)
    layers = [unquantized, build_layer("row", config=configuration(), plain=True)]
    for layer in layers:
        layer.weight.data = w.clone()
    ours, theirs = (layer(x)[0] for layer in layers)
    assert torch.equal(ours, theirs)


def test_unknown_reduction_is_refused(lone_rank: None) -> None:
    with pytest.raises(Exception, match="amax_reduction is 'some'; it must be one of te, all"):
        build_layer("row", config=configuration(), amax_reduction="some")
