"""Transformer Engine's own quantizers on this GPU compared with ours, on new tensors: every byte and every scale."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from golden import DTYPES, Arrays
from te_storage import NEEDS_TRANSFORMER_ENGINE
from test_golden_casts import check_cast, check_delayed_cast

from megafp8.recipes import registry
from megafp8.training.device_verification.comparisons import cast_inputs, compare_casts, compare_linears
from megafp8.training.device_verification.verify import find_device, te_formats

pytestmark = NEEDS_TRANSFORMER_ENGINE

SHAPES = ((128, 128), (256, 384), (272, 144), (64, 1024), (400, 48), (200, 272), (16, 2048))
BITS = {"bf16": torch.int16, "fp16": torch.int16, "fp32": torch.int32}


def as_bytes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().contiguous().cpu().numpy()


def te_casts(base: str, x: torch.Tensor, dtype: str) -> Arrays:
    """Transformer Engine's casts of a tensor, under the keys of the golden vectors."""
    import transformer_engine.pytorch  # noqa: F401 - loads the extension module that comes next
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer

    x = x.to(DTYPES[dtype])
    arrays: Arrays = {f"{base}/x": as_bytes(x.view(BITS[dtype]))}
    x = x.cuda()
    kinds = {"e4m3": tex.DType.kFloat8E4M3, "e5m2": tex.DType.kFloat8E5M2}
    for (fmt, kind), (rule, pow2) in itertools.product(kinds.items(), (("fp32", False), ("pow2", True))):
        per_tensor = Float8CurrentScalingQuantizer(kind, torch.device("cuda"), force_pow_2_scales=pow2)(x)
        arrays[f"{base}/tensorwise-{fmt}-{rule}/codes"] = as_bytes(per_tensor._data)
        arrays[f"{base}/tensorwise-{fmt}-{rule}/scale_inv"] = as_bytes(per_tensor._scale_inv)
        for dims in (1, 2):
            blocks = Float8BlockQuantizer(
                kind, rowwise=True, columnwise=True, force_pow_2_scales=pow2, block_scaling_dim=dims
            )(x)
            for side, name in (("row", "_rowwise"), ("col", "_columnwise")):
                prefix = f"{base}/block{dims}d-{fmt}-{rule}/{side}"
                arrays[f"{prefix}_codes"] = as_bytes(getattr(blocks, f"{name}_data"))
                arrays[f"{prefix}_scale_inv"] = as_bytes(getattr(blocks, f"{name}_scale_inv"))
    for fmt, kind in kinds.items():
        amax = torch.zeros(1, device="cuda")
        delayed = Float8Quantizer(torch.full((1,), 3.7, device="cuda"), amax, kind)(x)
        prefix = f"{base}/delayed-{fmt}-scale3.7"
        arrays |= {
            f"{prefix}/codes": as_bytes(delayed._data),
            f"{prefix}/scale_inv": as_bytes(delayed._scale_inv),
            f"{prefix}/amax": as_bytes(amax),
        }
    return arrays


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_bytes_and_scales(shape: tuple[int, int], dtype: str) -> None:
    compared, differing = 0, []
    for name, x in cast_inputs(shape).items():
        base = f"{shape[0]}x{shape[1]}/{name}/{dtype}"
        arrays = te_casts(base, x, dtype)
        for key in arrays:
            if not key.endswith("codes"):
                continue
            compared += 1
            try:
                (check_delayed_cast if "/delayed" in key else check_cast)(arrays, key)
            except AssertionError as error:
                differing.append(f"{key}: {error}")
    print(f"{compared} casts compared")
    assert compared == 12 * (4 + 2 * 4 * 2 + 2)
    assert not differing, f"{len(differing)} of {compared} differ:\n" + "\n".join(differing[:8])


@pytest.fixture(
    params=[(each.name, fmt) for each in registry.recipes() if each.te_recipe_class for fmt in te_formats(each.name)]
)
def native(request: pytest.FixtureRequest) -> tuple[Any, str, str]:
    """Transformer Engine's layers, a recipe of this GPU, and a format, as `megafp8 verify-device` compares them."""
    if request.param[0] not in find_device({}).native_recipes:
        pytest.skip(f"not native on this GPU: {request.param[0]}")
    from megafp8.te.native import TransformerEngineLayers

    return TransformerEngineLayers(), *request.param


def test_casts_of_a_recipe(native: tuple[Any, str, str]) -> None:
    found = compare_casts(*native)
    assert not found.differing, found.problem()


def test_linears_of_a_recipe(native: tuple[Any, str, str]) -> None:
    problems = [each.problem() for each in compare_linears(*native) if not each.bound_fraction <= 1]
    assert not problems
