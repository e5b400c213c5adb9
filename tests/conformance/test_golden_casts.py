"""Codes and scales equal those of Transformer Engine 2.20.2 on an H200, byte for byte."""

import numpy as np
import pytest
import torch
from golden import Arrays, everything, needs_all, selected, tensor
from te_storage import check_stored

from megafp8.quantization.delayed_scaling import DelayedScale, update_scales
from megafp8.quantization.quantize import quantize
from megafp8.recipes.base import DelayedOptions, OperandRule, ScaleRule
from megafp8.recipes.formats import FORMATS

SCALE_RULES = {"fp32": ScaleRule.FP32, "pow2": ScaleRule.POWER_OF_TWO}
BLOCKS = {
    ("block1d", "row"): (1, 128), ("block1d", "col"): (128, 1),
    ("block2d", "row"): (128, 128), ("block2d", "col"): (128, 128),
}  # fmt: skip
CODES = ("/codes", "/row_codes", "/col_codes")
DISTRIBUTIONS = {
    "normal", "tiny", "rows", "cols", "outliers", "zeroblocks", "ties", "denormal", "huge", "inf", "nan", "allzero",
}  # fmt: skip


ARRAYS = selected()


def casts_of(arrays: Arrays, recipe: str) -> list[str]:
    """Keys of the codes that a kind of cast produced."""
    return [key for key in arrays if f"/{recipe}" in key and key.endswith(CODES)]


def check_cast(arrays: Arrays, key: str) -> None:
    """Compare our codes and scales for one key of codes."""
    base, cast, name = key.rsplit("/", 2)
    kind, fmt, scale_rule = cast.split("-")
    orientation = name.removesuffix("codes").removesuffix("_")
    block = BLOCKS[kind, orientation] if orientation else None
    x = arrays.get(f"{base}/x_columns", arrays[f"{base}/x"]) if block == (128, 1) else arrays[f"{base}/x"]
    rule = OperandRule(format=FORMATS[fmt], block=block, scale_rule=SCALE_RULES[scale_rule])
    ours = quantize(tensor(x, base.rsplit("/", 1)[1]), rule)

    codes, scale_inv = (torch.from_numpy(arrays[each].copy()) for each in (key, key.replace("codes", "scale_inv")))
    check_stored(ours, orientation or "row", codes, scale_inv)


def check_delayed_cast(arrays: Arrays, key: str) -> None:
    """Codes under a given scale, and the recorded amax."""
    base, cast, _ = key.rsplit("/", 2)
    _, fmt, scale = cast.split("-")
    noted = torch.zeros(())
    delayed = DelayedScale(torch.tensor(float(scale.removeprefix("scale"))), noted)
    x = tensor(arrays[f"{base}/x"], base.rsplit("/", 1)[1])
    ours = quantize(x, OperandRule(format=FORMATS[fmt], scale_rule=ScaleRule.DELAYED), delayed=delayed)
    np.testing.assert_array_equal(ours.codes.view(torch.uint8).numpy(), arrays[key])
    for value, name in ((ours.dequant_scale, "scale_inv"), (noted, "amax")):
        assert value.numpy().tobytes() == arrays[key.replace("codes", name)].tobytes(), name


@pytest.mark.parametrize("key", casts_of(ARRAYS, "delayed"))
def test_selected_delayed_casts(key: str) -> None:
    check_delayed_cast(ARRAYS, key)


@pytest.mark.parametrize("key", casts_of(ARRAYS, "tensorwise") + casts_of(ARRAYS, "block"))
def test_selected_casts(key: str) -> None:
    check_cast(ARRAYS, key)


def test_selected_casts_are_of_every_kind() -> None:
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


@needs_all
def test_all_delayed_casts() -> None:
    arrays = everything("_tensor")
    keys = casts_of(arrays, "delayed")
    assert len(keys) >= 64
    for key in keys:
        check_delayed_cast(arrays, key)


def check_updates(arrays: Arrays, name: str) -> None:
    """History and scales after each update."""
    algorithm, length, margin, fmt = name.split("-")
    options = DelayedOptions(
        history_len=int(length.removeprefix("len")), algorithm=algorithm, margin=int(margin.removeprefix("margin"))
    )
    amaxes, scales, histories = (arrays[f"update/{name}/{part}"] for part in ("amax", "scale", "history"))
    num_tensors = amaxes.shape[1]
    history, scale = torch.zeros(options.history_len, num_tensors), torch.ones(num_tensors)
    format_max = torch.full((num_tensors,), FORMATS[fmt].max)
    for amax, expected_scale, expected_history in zip(amaxes, scales, histories, strict=True):
        update_scales(history, scale, torch.from_numpy(amax.copy()), format_max, options)
        np.testing.assert_array_equal(scale.numpy(), expected_scale)
        np.testing.assert_array_equal(history.numpy().T, expected_history)


def updates_of(arrays: Arrays) -> list[str]:
    """Names of the series of updates."""
    return [key.split("/")[1] for key in arrays if key.startswith("update/") and key.endswith("/amax")]


@pytest.mark.parametrize("name", updates_of(ARRAYS))
def test_selected_updates(name: str) -> None:
    check_updates(ARRAYS, name)


@needs_all
def test_all_updates() -> None:
    arrays = everything("_update")
    assert len(updates_of(arrays)) >= 36
    for name in updates_of(arrays):
        check_updates(arrays, name)
