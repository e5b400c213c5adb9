"""Initial weights are a function of seed, name and layer; a rank holds its block of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import run_ranks
from small_run import PLAIN, STYLES, VIRTUAL, build_run, layers_of, small_config, weights
from torch import Tensor

from megafp8.config.schema import RunConfig
from megafp8.models.initialization import initialize_block, sharded_parameters

CONFIG: Any = SimpleNamespace(
    init_method_std=0.5, embedding_init_method_std=0.5, num_layers=8, layernorm_zero_centered_gamma=False
)


Shape = tuple[int, ...]


def block_at(key: str, shape: Shape, offset: Shape = (), local: Shape = (), layer: int = 3) -> Any:
    """A rank's block of parameter `key` of one of 8 layers, still empty."""
    return SimpleNamespace(
        key=key,
        prepend_axis_num=1,
        global_shape=(8, *shape),
        global_offset=(layer, *(offset or (0,) * len(shape))),
        data=torch.full(local or shape, torch.nan),
    )


def filled(*args: Any, seed: int = 1, config: Any = CONFIG, is_mup: bool = False, **kwargs: Any) -> Tensor:
    part = block_at(*args, **kwargs)
    initialize_block(part, config, seed, is_mup)
    return part.data


def test_blocks_are_cut_from_one_parameter() -> None:
    whole = filled("a.linear_qkv.weight", (48, 32))
    assert torch.equal(filled("a.linear_qkv.weight", (48, 32), (24, 0), (24, 32)), whole[24:])
    assert torch.equal(filled("a.linear_qkv.weight", (48, 32), (0, 16), (48, 16)), whole[:, 16:])


def test_seed_name_and_layer_give_other_values() -> None:
    whole = filled("a.weight", (48, 32))
    assert torch.equal(filled("a.weight", (48, 32)), whole)
    for other in (
        filled("a.weight", (48, 32), seed=2),
        filled("b.weight", (48, 32)),
        filled("a.weight", (48, 32), layer=4),
    ):
        assert abs(torch.corrcoef(torch.stack((whole.flatten(), other.flatten())))[0, 1]) < 0.1


@pytest.mark.parametrize(
    ("key", "std"),
    [
        ("embedding.word_embeddings.weight", 0.5),
        ("decoder.layers.mlp.linear_fc1.weight", 0.5),
        ("decoder.layers.mlp.linear_fc2.weight", 0.5 / 4),
        ("decoder.layers.self_attention.linear_proj.weight", 0.5 / 4),
        ("output_layer.weight", 0.5),
    ],
)
def test_standard_deviations(key: str, std: float) -> None:
    """Weights that write into the residual stream are smaller by sqrt(2 x 8 layers)."""
    values = filled(key, (256, 256))
    # The spread of n = 65,536 normal numbers is known to std / sqrt(2 n): five times that.
    assert values.std().item() == pytest.approx(std, rel=5 / math.sqrt(2 * 65_536))
    assert abs(values.mean().item()) < 5 * std / 256


def test_an_output_layer_of_mup_has_the_standard_deviation_of_the_embeddings() -> None:
    config: Any = SimpleNamespace(**(vars(CONFIG) | {"embedding_init_method_std": 1.0}))
    plain, mup = (filled("output_layer.weight", (64, 64), config=config, is_mup=is_mup) for is_mup in (False, True))
    assert torch.equal(mup, 2 * plain)
    matrix = "decoder.layers.mlp.linear_fc1.weight"
    assert torch.equal(filled(matrix, (64, 64), config=config, is_mup=True), filled(matrix, (64, 64), config=config))


def test_vectors() -> None:
    assert torch.equal(filled("a.layer_norm_weight", (4,)), torch.ones(4))
    assert torch.equal(filled("a.layer_norm_bias", (4,)), torch.zeros(4))
    assert torch.equal(filled("a.linear_fc1.bias", (4,)), torch.zeros(4))
    centered: Any = SimpleNamespace(**(vars(CONFIG) | {"layernorm_zero_centered_gamma": True}))
    assert torch.equal(filled("a.layer_norm_weight", (4,), config=centered), torch.zeros(4))


# ---- the complete model, on ranks ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """A part of a parameter. The gate and up projections of a gated MLP are two parts even on one rank."""

    parameter: tuple[str, tuple[int, ...]]  # name and layer
    shape: tuple[int, ...]  # of the complete parameter
    window: tuple[slice, ...]
    values: Tensor


def blocks_of(config: RunConfig) -> list[Block]:
    """Every block that this rank holds."""
    run = build_run(config)
    blocks = []
    for part in (part for chunk in run.training_state.chunks for part in sharded_parameters(chunk.module)):
        stacked = part.prepend_axis_num
        layer, offset = part.global_offset[:stacked], part.global_offset[stacked:]
        window = tuple(slice(start, start + length) for start, length in zip(offset, part.data.shape, strict=True))
        blocks.append(Block((part.key, tuple(layer)), tuple(part.global_shape[stacked:]), window, part.data.clone()))
    return blocks


def assembled(blocks: list[Block]) -> dict[Any, Tensor]:
    """Complete parameters by name and layer; NaN where there is no block."""
    whole: dict[Any, Tensor] = {}
    for block in blocks:
        whole.setdefault(block.parameter, torch.full(block.shape, torch.nan))[block.window] = block.values
    return whole


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        pytest.param(2, "--tensor-model-parallel-size 2", id="tp2"),
        pytest.param(2, VIRTUAL, id="pp2-virtual2"),
        pytest.param(2, "--use-distributed-optimizer", id="dp2"),
        pytest.param(
            4, "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2", id="tp2-pp2-sp"
        ),
    ],
)
def test_every_layout_starts_from_the_same_model(style: str, world_size: int, flags: str) -> None:
    expected = assembled(run_ranks(1, blocks_of, small_config(style, f"{PLAIN} {layers_of(flags)}"))[0])
    by_rank = run_ranks(world_size, blocks_of, small_config(style, f"{PLAIN} {flags}", world_size))
    for block in (block for blocks in by_rank for block in blocks):
        assert torch.equal(expected[block.parameter][block.window], block.values), block.parameter
    together = assembled([block for blocks in by_rank for block in blocks])
    assert together.keys() == expected.keys()
    assert all(torch.equal(together[name], parameter) for name, parameter in expected.items())


def test_half_precision_is_the_rounded_model() -> None:
    exact = run_ranks(1, lambda: weights(build_run(small_config("llama"))))[0]
    rounded = run_ranks(1, lambda: weights(build_run(small_config("llama", "--bf16"))))[0]
    assert rounded.keys() == exact.keys()
    for name, weight in rounded.items():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, exact[name].bfloat16()), name
