"""SwiGLU into blocks, as Transformer Engine stores them."""

from __future__ import annotations

import importlib.util

import pytest
import torch

if importlib.util.find_spec("transformer_engine") is None or not torch.cuda.is_available():
    pytest.skip("needs Transformer Engine and a GPU", allow_module_level=True)

import transformer_engine.pytorch as te  # noqa: E402
import transformer_engine_torch as tex  # noqa: E402

from megafp8.model.te_operations import QuantizingSwiGLU  # noqa: E402
from megafp8.model.te_quantize import takes_blocks  # noqa: E402

pytestmark = pytest.mark.gpu
KINDS = {"e4m3": tex.DType.kFloat8E4M3, "e5m2": tex.DType.kFloat8E5M2}
PARTS = ("_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv")


@pytest.mark.parametrize("is_power_of_two", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columnwise", [True, False])
def test_bytes_differ_in_last_bits_of_the_exponential(kind: str, is_power_of_two: bool, columnwise: bool) -> None:
    inputs = torch.randn(2, 128, 2 * 384, device="cuda").bfloat16()
    how = te.Float8BlockQuantizer(
        KINDS[kind], rowwise=True, columnwise=columnwise, force_pow_2_scales=is_power_of_two, block_scaling_dim=1
    )
    assert takes_blocks(how, (2, 128, 384))
    ours = QuantizingSwiGLU()._tex_swiglu_forward(inputs, how)
    theirs = tex.quantize(tex.swiglu(inputs, None), how)
    for name in PARTS:
        one, other = getattr(ours, name), getattr(theirs, name)
        assert (one is None) == (other is None)
        if one is not None:
            assert one.shape == other.shape and one.dtype == other.dtype
            bits = torch.uint8 if one.dtype == torch.uint8 else torch.int32
            assert (one.view(bits) != other.view(bits)).float().mean().item() < 1e-3, name


def test_what_has_no_whole_blocks_goes_the_usual_way() -> None:
    how = te.Float8BlockQuantizer(KINDS["e4m3"], rowwise=True, columnwise=True, block_scaling_dim=1)
    assert not takes_blocks(how, (128, 144)) and not takes_blocks(how, (16, 128)) and not takes_blocks(None, (128, 128))
    weights = te.Float8BlockQuantizer(KINDS["e4m3"], rowwise=True, columnwise=True, block_scaling_dim=2)
    assert not takes_blocks(weights, (128, 128))
    result = QuantizingSwiGLU()._tex_swiglu_forward(torch.randn(128, 288, device="cuda").bfloat16(), how)
    assert result.shape == (128, 144)
