"""Codes and scales equal those of Transformer Engine 2.20.2 on an H200, byte for byte."""

import numpy as np
import pytest
import torch
from golden import Arrays, carried, everything, needs_all, tensor

from megafp8.fp8.formats import FORMATS
from megafp8.fp8.quantize import quantize
from megafp8.fp8.recipes import OperandRule
from megafp8.fp8.scaling import ScaleRule

SCALE_RULES = {"fp32": ScaleRule.FP32, "pow2": ScaleRule.POWER_OF_TWO}
BLOCKS = {
    ("block1d", "row"): (1, 128), ("block1d", "col"): (128, 1),
    ("block2d", "row"): (128, 128), ("block2d", "col"): (128, 128),
}  # fmt: skip
CODES = ("/codes", "/row_codes", "/col_codes")
DISTRIBUTIONS = {
    "normal", "tiny", "rows", "cols", "outliers", "zeroblocks", "ties", "denormal", "huge", "inf", "nan", "allzero",
}  # fmt: skip


ARRAYS = carried()


def casts_of(arrays: Arrays, recipe: str) -> list[str]:
    """Keys of the codes that a kind of cast made."""
    return [key for key in arrays if f"/{recipe}" in key and key.endswith(CODES)]


def check_cast(arrays: Arrays, key: str) -> None:
    """Our codes and scales for one key of codes."""
    base, cast, name = key.rsplit("/", 2)
    kind, fmt, scale_rule = cast.split("-")
    orientation = name.removesuffix("codes").removesuffix("_")
    block = BLOCKS[kind, orientation] if orientation else None
    x = arrays.get(f"{base}/x_columns", arrays[f"{base}/x"]) if block == (128, 1) else arrays[f"{base}/x"]
    rule = OperandRule(format=FORMATS[fmt], block=block, scale_rule=SCALE_RULES[scale_rule])
    ours = quantize(tensor(x, base.rsplit("/", 1)[1]), rule)

    codes, scales = ours.codes.view(torch.uint8), ours.dequant_scale.numpy()
    if orientation == "col":  # stored as those of the transposed tensor
        codes = codes.t()
    np.testing.assert_array_equal(codes.numpy(), arrays[key])
    theirs = arrays[key.replace("codes", "scale_inv")]
    if block == (1, 128) or (kind, orientation) == ("block2d", "col"):
        scales = scales.T  # stored with the blocks along a sum first; of squares, those of the transposed tensor
    if block is not None:
        theirs = theirs[: scales.shape[0], : scales.shape[1]]  # padding comes after
    np.testing.assert_array_equal(np.ascontiguousarray(scales).view(np.uint32), theirs.copy().view(np.uint32))


@pytest.mark.parametrize("key", casts_of(ARRAYS, "tensorwise") + casts_of(ARRAYS, "block"))
def test_carried_casts(key: str) -> None:
    check_cast(ARRAYS, key)


def test_carried_casts_are_of_every_kind() -> None:
    formats, rules = ("e4m3", "e5m2"), ("fp32", "pow2")
    keys = [key.split("/") for key in casts_of(ARRAYS, "tensorwise")]
    assert {cast for *_, cast, _ in keys} == {f"tensorwise-{f}-{s}" for f in formats for s in rules}
    assert {key[1] for key in keys} == DISTRIBUTIONS
    keys = [key.split("/") for key in casts_of(ARRAYS, "block")]
    kinds = {"block1d-e4m3-fp32", "block1d-e4m3-pow2", "block1d-e5m2-pow2", "block2d-e4m3-fp32", "block2d-e4m3-pow2"}
    assert {(cast, name) for *_, cast, name in keys} >= {(k, f"{o}_codes") for k in kinds for o in ("row", "col")}
    assert {key[1] for key in keys} == DISTRIBUTIONS


@needs_all
@pytest.mark.parametrize("recipe, count", [("tensorwise", 128), ("block", 384)])
def test_all_casts(recipe: str, count: int) -> None:
    arrays = everything("_tensor") | everything("_block")
    keys = casts_of(arrays, recipe)
    assert len(keys) >= count
    for key in keys:
        check_cast(arrays, key)
