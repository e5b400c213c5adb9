"""megatron-core's YaRN, with the settings of a run, compared with its definition (Peng et al. 2023)."""

import math

import pytest
import torch

from megafp8.config import flags
from megafp8.config.layer_backends import LOCAL
from megafp8.mcore import cpu_patches

cpu_patches.install()

from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
    YarnRotaryEmbedding,
    _yarn_get_concentration_factor_from_config,
)

from megafp8.mcore.config import build_transformer_config, yarn_attributes

CHANNELS, BASE, FACTOR, ORIGINAL = 32, 10_000, 8.0, 64
FLAGS = (
    "--num-layers 1 --hidden-size 64 --num-attention-heads 2 --position-embedding-type yarn "
    f"--rotary-scaling-factor {FACTOR} --yarn-original-max-position-embeddings {ORIGINAL}"
)


def definition(fast: float, slow: float, is_rounded: bool) -> torch.Tensor:
    """Frequencies: kept above `fast` rotations within the original context, divided by the factor below `slow`."""
    low, high = (
        CHANNELS * math.log(ORIGINAL / (rotations * 2 * math.pi)) / (2 * math.log(BASE)) for rotations in (fast, slow)
    )
    if is_rounded:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, CHANNELS - 1)
    found = []
    for pair in range(CHANNELS // 2):
        frequency = BASE ** (-2 * pair / CHANNELS)
        interpolated = min(1.0, max(0.0, (pair - low) / (high - low)))
        found.append(frequency / FACTOR * interpolated + frequency * (1 - interpolated))
    return torch.tensor(found)


@pytest.mark.parametrize(
    ("extra", "expected", "scale"),
    [
        ("", definition(32, 1, True), 0.1 * math.log(FACTOR) + 1),
        ("--yarn-beta-fast 8 --yarn-beta-slow 2", definition(8, 2, True), 0.1 * math.log(FACTOR) + 1),
        ("--no-yarn-correction-range-round-to-int", definition(32, 1, False), 0.1 * math.log(FACTOR) + 1),
        ("--mscale 0.707 --mscale-all-dim 0.707", definition(32, 1, True), 1.0),
        ("--mscale 2", definition(32, 1, True), 0.2 * math.log(FACTOR) + 1),
    ],
)
def test_frequencies_and_scale(extra: str, expected: torch.Tensor, scale: float) -> None:
    run = flags.parse(f"{FLAGS} {extra}".split()).config
    config = build_transformer_config(run, LOCAL, on_cuda=False)
    fields = {name.removeprefix("yarn_"): value for name, value in yarn_attributes(run.model).items()}
    embedding = YarnRotaryEmbedding(
        CHANNELS, rotary_base=BASE, use_cpu_initialization=True,
        scaling_factor=fields.pop("rotary_scaling_factor"), **fields,
    )  # fmt: skip
    angles, found_scale = embedding.get_emb(3)
    torch.testing.assert_close(angles[1, 0, 0, : CHANNELS // 2], expected.float(), rtol=1e-6, atol=1e-9)
    assert found_scale == pytest.approx(scale)
    assert _yarn_get_concentration_factor_from_config(config) == pytest.approx(scale)


def test_other_positions_have_no_scale() -> None:
    plain = flags.parse(["--num-layers", "1", "--hidden-size", "64", "--num-attention-heads", "2"])
    config = build_transformer_config(plain.config, LOCAL, on_cuda=False)
    assert _yarn_get_concentration_factor_from_config(config) == 1
