"""The comparison of a device with the emulation, with a stand-in that stores its tensors as Transformer Engine does."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional

import pytest
import torch
from torch import Tensor

from megafp8.quantization import nvfp4
from megafp8.quantization.quantize import dequantize
from megafp8.quantization.quantized_tensor import Quantized
from megafp8.quantization.te_layout import COLUMN, ROW, StoredOperand, stored
from megafp8.recipes import registry
from megafp8.recipes.base import OPERANDS_OF, Gemm, Operand
from megafp8.training.device_verification import attention, comparisons, steps
from megafp8.training.device_verification.attention import AttentionTrial
from megafp8.training.device_verification.comparisons import (
    TO_NEAREST,
    CastComparison,
    compare_casts,
    compare_devices,
    compare_linears,
    measure_speed,
    plan_of,
)
from megafp8.training.device_verification.report import report_data, report_text
from megafp8.training.device_verification.steps import compare_steps
from megafp8.training.device_verification.verify import Device, Verification, te_formats, verify

NATIVE = ("tensorwise", "delayed", "blockwise", "mxfp8", "nvfp4")
SIDES = {
    (Operand.INPUT, ROW): Gemm.FPROP, (Operand.INPUT, COLUMN): Gemm.WGRAD,
    (Operand.WEIGHT, ROW): Gemm.FPROP, (Operand.WEIGHT, COLUMN): Gemm.DGRAD,
    (Operand.GRAD_OUTPUT, ROW): Gemm.DGRAD, (Operand.GRAD_OUTPUT, COLUMN): Gemm.WGRAD,
}  # fmt: skip


def padded(scales: Tensor, rows: int, columns: int) -> Tensor:
    """Scales at the start of a tensor whose sizes are multiples, filled with noise at its ends."""
    shape = [-(-size // multiple) * multiple for size, multiple in zip(scales.shape, (rows, columns), strict=True)]
    whole = torch.full(shape, 77, dtype=scales.dtype)
    whole[: scales.shape[0], : scales.shape[1]] = scales
    return whole


def packed(codes: Tensor) -> Tensor:
    """E2M1 codes in the upper halves of bytes [rows, columns] as bytes [rows, columns / 2]; even ones in low halves."""
    codes = codes >> 4
    return codes[:, ::2] | (codes[:, 1::2] << 4)


def te_tensor(recipe: str, by_side: dict[str, Quantized], has_transpose: bool) -> Any:
    """Both sides of a tensor in the attributes of Transformer Engine's class for the recipe.

    Args:
        has_transpose: Hopper has codes for both sides under one scale for a tensor, Blackwell has one set.
    """
    row, column = by_side[ROW], by_side[COLUMN]
    if recipe in ("tensorwise", "delayed"):
        data = row.codes.view(torch.uint8)
        if not has_transpose:
            return SimpleNamespace(_data=data, _transpose=None, _scale_inv=row.dequant_scale.reshape(1))
        transpose = column.codes.view(torch.uint8).t().contiguous()
        return SimpleNamespace(_data=data, _transpose=transpose, _scale_inv=row.dequant_scale.reshape(1))
    parts: dict[str, Any] = {}
    for name, ours in (("rowwise", row), ("columnwise", column)):
        is_column, scales, block = name == "columnwise", ours.dequant_scale, ours.rule.block
        codes = ours.codes.view(torch.uint8)
        if recipe == "blockwise":
            codes = codes.t() if is_column else codes
            scales = padded(scales.t() if block == (1, 128) or (is_column and block == (128, 128)) else scales, 1, 4)
        elif recipe == "mxfp8":
            scales = padded(scales.view(torch.uint8), *((4, 128) if is_column else (128, 4)))
        else:
            codes, scales = nvfp4.unpack(ours.codes), scales.view(torch.uint8)
            if block == (16, 16):
                scales = scales.repeat_interleave(16, dim=int(is_column))
            codes, scales = (codes.t(), scales.t()) if is_column else (codes, scales)
            codes, scales = packed(codes), padded(scales, 128, 4)
            assert ours.tensor_scale is not None
            parts[f"_amax_{name}"] = (ours.tensor_scale * (448 * 6)).reshape(1)
        parts |= {f"_{name}_data": codes.contiguous(), f"_{name}_scale_inv": scales}
    return SimpleNamespace(**parts)


class StandIn:
    """A device that computes as the emulation does, unless it is given a fault."""

    def __init__(self, fault: str = "", has_transpose: bool = True):
        self.fault, self.has_transpose = fault, has_transpose

    def cast(self, recipe: str, number_format: str, operand: Operand, tensor: Tensor) -> dict[str, StoredOperand]:
        if self.fault == f"no cast of {recipe}":
            raise RuntimeError("CUDA error: no kernel image is available\nand more")
        plan = plan_of(registry.get(recipe).rules(number_format, TO_NEAREST))
        whole = {side: plan.quantize(tensor, operand, SIDES[operand, side]) for side in (ROW, COLUMN)}
        found = {side: stored(te_tensor(recipe, whole, self.has_transpose), side) for side in (ROW, COLUMN)}
        if self.fault == "code":
            found[COLUMN].codes[-1, -1] ^= 16
        elif self.fault == "scale":
            scales = found[ROW].scales
            scales.view(torch.uint8 if scales.dtype == torch.uint8 else torch.int32).reshape(-1)[0] += 1
        elif self.fault == "tensor scale" and found[ROW].tensor_scale is not None:
            found[ROW].tensor_scale.mul_(1.5)
        elif self.fault == "no tensor scale":
            found = {side: each._replace(tensor_scale=None) for side, each in found.items()}
        return found

    def linear(
        self, recipe: Optional[str], number_format: str, x: Tensor, w: Tensor, dy: Tensor,
        rounds_to_nearest: bool = True,
    ) -> dict[Gemm, Tensor]:  # fmt: skip
        assert recipe is not None
        if self.fault == f"no linear of {recipe}":
            raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")
        plan = plan_of(registry.get(recipe).rules(number_format, TO_NEAREST if rounds_to_nearest else None))
        if not rounds_to_nearest:
            plan = dataclasses.replace(plan, noise=nvfp4.RoundingNoise("a device"))
        if self.fault == "saturated gradient":
            dy = dy.sign() * dy.abs().max()  # every code is the largest of its format
        tensors = {Operand.INPUT: x, Operand.WEIGHT: w, Operand.GRAD_OUTPUT: dy}
        results = {}
        for gemm, operands in OPERANDS_OF:
            a, b = (dequantize(plan.quantize(tensors[each], each, gemm)).float() for each in operands)
            product = a @ b.t() if gemm is Gemm.FPROP else (a.t() if gemm is Gemm.WGRAD else a) @ b
            results[gemm] = product.bfloat16()
        if self.fault == "sum":
            results[Gemm.DGRAD][3, 3] += 8 * results[Gemm.DGRAD].abs().max()
        if self.fault == "zero gradient" or (self.fault == "stochastic rounding to zero" and not rounds_to_nearest):
            results |= {gemm: torch.zeros_like(results[gemm]) for gemm in (Gemm.DGRAD, Gemm.WGRAD)}
        if self.fault == "nan":
            results[Gemm.WGRAD][0, 0] = float("nan")
        return results

    def step_times(
        self, recipes: dict[Optional[str], str], sizes: tuple[int, int, int], rounds: int
    ) -> dict[Optional[str], list[float]]:
        if self.fault == "no speed":
            raise RuntimeError("out of memory")
        return {name: [2.0 if name is None else 1.5] * rounds for name in recipes}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few sizes; each recipe has incomplete blocks of 128 among them."""
    monkeypatch.setattr(comparisons, "CAST_SHAPES", ((160, 544),))
    monkeypatch.setattr(comparisons, "LINEAR_SIZES", ((64, 256, 96),))


@pytest.mark.parametrize("recipe", NATIVE)
def test_equal_casts(recipe: str, small: None) -> None:
    for number_format in te_formats(recipe):
        found = compare_casts(StandIn(), recipe, number_format)
        assert found.compared == 12 * 6 and found.differing == ()


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_casts_of_a_device_without_transposes(recipe: str, small: None) -> None:
    """Blackwell's GEMMs read one set of codes in any layout, so Transformer Engine makes no transpose."""
    for number_format in te_formats(recipe):
        found = compare_casts(StandIn(has_transpose=False), recipe, number_format)
        assert found.compared == 12 * 6 and found.differing == ()
    found = compare_casts(StandIn("code", has_transpose=False), recipe, te_formats(recipe)[0])
    assert len(found.differing) == 12 * 6  # one set of codes is both sides


@pytest.mark.parametrize("recipe", registry.names())
def test_the_emulation_of_every_recipe_is_compared_between_devices(recipe: str, small: None) -> None:
    found = compare_devices(recipe, registry.get(recipe).default_format, "cpu")
    assert found.compared >= 12 * 2 and found.differing == ()


def test_scales_in_the_order_of_a_gemm_are_not_compared() -> None:
    with pytest.raises(ValueError, match="swizzled"):
        stored(SimpleNamespace(_with_gemm_swizzled_scales=True), ROW)
    with pytest.raises(ValueError, match="the col side has no codes"):
        stored(SimpleNamespace(_rowwise_data=1, _columnwise_data=None, _columnwise_scale_inv=None), COLUMN)


@pytest.mark.parametrize("recipe", NATIVE)
def test_the_position_of_a_wrong_code_is_reported(recipe: str, small: None) -> None:
    found = compare_casts(StandIn("code"), recipe, te_formats(recipe)[0])
    last = "[159, 543]" if recipe == "mxfp8" else "[543, 159]"  # MXFP8's column codes are not transposed
    assert all(f"1 codes (first at {last}: " in line for line in found.differing)


@pytest.mark.parametrize(
    ("recipe", "fault", "part"),
    [(recipe, fault, fault + "s") for recipe in NATIVE for fault in ("code", "scale")]
    + [("nvfp4", "tensor scale", "tensor scale")],
)
def test_one_differing_byte_is_found(recipe: str, fault: str, part: str, small: None) -> None:
    found = compare_casts(StandIn(fault), recipe, te_formats(recipe)[0])
    assert len(found.differing) >= (12 - 3) * 3  # of one side; zero and what is not finite may stay as it is
    assert all(f"1 {part} (first at [" in line for line in found.differing)


def test_a_missing_tensor_scale_is_a_difference(small: None) -> None:
    found = compare_casts(StandIn("no tensor scale"), "nvfp4", "e2m1")
    assert len(found.differing) == found.compared
    assert all("1 tensor scale (only one of the two has one)" in line for line in found.differing)


@pytest.mark.parametrize("recipe", NATIVE)
def test_linears_stay_within_their_bound(recipe: str, small: None) -> None:
    number_format = registry.get(recipe).default_format
    right = compare_linears(StandIn(), recipe, number_format)
    stochastic = [f"{gemm} with stochastic rounding" for gemm in ("dgrad", "wgrad")] if recipe == "nvfp4" else []
    assert [each.gemm for each in right] == ["fprop", "dgrad", "wgrad", *stochastic]
    assert all(0.1 < each.bound_fraction < 1 for each in right)  # by rounding to BF16
    wrong = {each.gemm: each for each in compare_linears(StandIn("sum"), recipe, number_format)}
    assert wrong["dgrad"].bound_fraction > 10 and wrong["fprop"].bound_fraction < 1


@pytest.mark.parametrize("recipe", NATIVE)
@pytest.mark.parametrize("fault", ["zero gradient", "saturated gradient"])
def test_gradients_that_are_zero_or_saturated_are_refused(recipe: str, fault: str, small: None) -> None:
    found = run(StandIn(fault), ("linears",), (recipe,))
    refused = {each.gemm for each in found.linears if not each.bound_fraction <= 1}
    assert refused == {each.gemm for each in found.linears} - {"fprop"}
    assert len(found.problems) == len(te_formats(recipe)) * len(refused)


def test_zero_gradients_of_stochastic_rounding_alone_are_refused(small: None) -> None:
    """As Transformer Engine did on compute capability 12.0: rounding to nearest, as of the casts, is right."""
    found = run(StandIn("stochastic rounding to zero"), ("casts", "linears"), ("nvfp4",))
    assert found.problems == [
        f"nvfp4 e2m1: {gemm} with stochastic rounding of 64 x 256 x 96 differs by 2.00 times its bound"
        for gemm in ("dgrad", "wgrad")
    ]


def test_a_comparison_that_accepts_planted_gradients_fails(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparisons, "DROPPED", 1.0)
    found = run(StandIn(), ("linears",), ("mxfp8",))
    assert "mxfp8 e4m3: dgrad of 64 x 256 x 96 failed: did not refuse a planted all-zero gradient" in found.problems
    assert report_data(found)["ok"] is False


CPU = Device(name="a CPU", kind="cpu", versions={"torch": "2"}, native_recipes=NATIVE)


def run(native: Optional[StandIn], parts: tuple[str, ...], recipes: tuple[str, ...] = NATIVE) -> Verification:
    return verify(CPU, native, recipes, parts, Path("pretrain_gpt.py"), lambda line: None)


def test_report_of_a_device_that_agrees(small: None) -> None:
    found = run(StandIn(), ("casts", "linears", "speed", "attention"), ("mxfp8", "nvfp4", "rowwise"))
    text = report_text(found)
    assert found.problems == [] and "Everything that was compared agrees." in text
    assert "| mxfp8 | e4m3 | 72 | 0 |" in text and "| 16384 x 8192 x 8192 | nvfp4 | 1.500 | 1.33 |" in text
    assert "NOT RUN: attention" in text and "rowwise" not in text
    data = json.loads(json.dumps(report_data(found), allow_nan=False))
    assert data["ok"] is True and data["casts"][0]["compared"] == 72


@pytest.mark.parametrize(
    ("fault", "part", "message"),
    [
        ("code", "casts", "mxfp8 e4m3: 72 of 72 casts differ"),
        ("sum", "linears", "mxfp8 e4m3: dgrad of 64 x 256 x 96 differs by"),
        ("nan", "linears", "mxfp8 e4m3: wgrad of 64 x 256 x 96 differs by nan times its bound"),
    ],
)
def test_report_of_a_device_that_differs(fault: str, part: str, message: str, small: None) -> None:
    found = run(StandIn(fault), (part,), ("mxfp8",))
    if fault == "code":
        message = message.replace("72 of", f"{len(found.casts[0].differing)} of")
    assert any(line.startswith(message) for line in found.problems), found.problems
    assert report_data(found)["ok"] is False and found.problems[0] in report_text(found)
    json.dumps(report_data(found), allow_nan=False)


@pytest.mark.parametrize("recipe", NATIVE)
def test_what_fails_is_reported_and_the_others_are_compared(recipe: str, small: None) -> None:
    other = next(name for name in NATIVE if name != recipe)
    formats = len(te_formats(recipe))
    linears = formats * (1 + (recipe == "nvfp4"))  # once more with stochastic rounding
    for fault, part, count in (
        (f"no cast of {recipe}", "casts", formats), (f"no linear of {recipe}", "linears", linears),
    ):  # fmt: skip
        found = run(StandIn(fault), (part,), (recipe, other))
        assert len(found.problems) == count and all(line.startswith(recipe) for line in found.problems)
        assert "failed: RuntimeError: " in found.problems[0] and "and more" not in found.problems[0]
        assert {each.recipe for each in getattr(found, part)} == {recipe, other}
        assert found.problems[0] in report_text(found)
        json.dumps(report_data(found), allow_nan=False)
    found = run(StandIn("no speed"), ("speed",), (recipe,))
    assert found.problems == ["speed of linears: failed: RuntimeError: out of memory"]


@pytest.mark.parametrize(
    ("fault", "gap", "attention_error", "problem"),
    [
        ("", 0.0, 0.0, None), ("code", 0.0, 0.0, "mxfp8 e4m3: "), ("scale", 0.0, 0.0, "nvfp4 e2m1: "),
        ("sum", 0.0, 0.0, "dgrad of 64 x 256 x 96 differs"), ("no linear of mxfp8", 0.0, 0.0, "CUBLAS_STATUS"),
        ("", 0.1, 0.0, "mxfp8 e4m3: training: losses differ by 0.1"), ("", 0.0, 0.5, "attention, fused: differs by"),
    ],
)  # fmt: skip
def test_the_command_on_a_blackwell_stand_in(
    fault: str, gap: float, attention_error: float, problem: Optional[str], small: None, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """All parts with a device of capability 10.0; exit status and both files."""
    from megafp8.cli import verify_device
    from megafp8.mcore import cpu_patches
    from megafp8.training.device_verification import comparisons, verify

    blackwell = Device(
        name="a B200", kind="cuda", compute_capability=(10, 0), versions={"torch": "2"}, native_recipes=NATIVE
    )
    native = SimpleNamespace(TransformerEngineLayers=lambda: StandIn(fault, has_transpose=False))
    monkeypatch.setitem(sys.modules, "megafp8.te.native", native)
    monkeypatch.setattr(cpu_patches, "install", lambda: None)
    monkeypatch.setattr(verify, "find_device", lambda *_: blackwell)
    monkeypatch.setattr(steps, "train", lambda _, folder, flags: [4.0 * (1 + gap * (folder.name != "emulated"))])
    trial = {name: AttentionTrial(name, error=attention_error * (name == "fused"), ms=1.0) for name in verify.BACKENDS}
    monkeypatch.setattr(verify, "try_backend", lambda name: trial[name])
    monkeypatch.setattr(comparisons, "compare_devices", lambda recipe, fmt, _: CastComparison(recipe, fmt, 1, ()))
    status = verify_device.main(["--recipes", "mxfp8", "nvfp4", "--output", str(tmp_path)])
    text, data = (tmp_path / "report.md").read_text(), json.loads((tmp_path / "report.json").read_text())
    assert status == (problem is not None) and data["ok"] is (problem is None)
    assert text in capsys.readouterr().out
    if problem is None:
        assert "# a B200, 10.0" in text and "Everything that was compared agrees." in text and "NOT RUN" not in text
    else:
        assert any(problem in line for line in data["problems"]) and problem in text


def test_a_device_without_native_recipes() -> None:
    found = run(None, ("casts", "linears", "speed"))
    assert found.not_run.keys() == {"casts", "linears", "speed"} and not found.has_compared
    assert "Nothing native was compared." in report_text(found)


def test_training_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = {"emulated": [4.0, 3.0], "transformer_engine": [4.0, 3.003]}
    monkeypatch.setattr(steps, "train", lambda script, folder, flags: losses[folder.name])
    close = compare_steps("mxfp8", "e4m3", Path("x"), is_native=True)
    assert close.gap == pytest.approx(1e-3) and close.is_right and close.last_loss == 3.0
    losses["transformer_engine"] = [4.0, 3.024]
    assert [compare_steps(name, "hybrid", Path("x"), True).is_right for name in ("tensorwise", "delayed")] == [
        False,
        True,
    ]
    losses["transformer_engine"] = [4.0, 3.1]
    assert not compare_steps("delayed", "hybrid", Path("x"), is_native=True).is_right
    assert not compare_steps("mxfp8", "e4m3", Path("x"), is_native=True).is_right
    losses["transformer_engine"] = [4.0, float("nan")]
    assert not compare_steps("mxfp8", "e4m3", Path("x"), is_native=True).is_right
    assert compare_steps("mxfp8", "e4m3", Path("x"), is_native=False).gap is None


def test_a_run_that_fails_is_reported(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("import sys; sys.exit('no such kernel')")
    found = compare_steps("mxfp8", "e4m3", script, is_native=False)
    assert not found.is_right and "status 1: no such kernel" in str(found.failure)
    assert "no such kernel" in report_text(Verification(device=CPU, steps=(found,)))


def test_attention_backends() -> None:
    """Transformer Engine is not installed, or has no GPU: each backend says why it is not available."""
    trial = attention.try_backend("flash")
    assert trial.error is None and trial.unavailable and trial.is_right
    wrong = AttentionTrial("fused", error=0.5, ms=1.0)
    found = Verification(device=CPU, attention=(trial, wrong))
    assert found.problems == ["attention, fused: differs by 5.0e-01 from FP32"]
    assert "not available" in report_text(found)


def test_speed_is_the_ratio_of_medians() -> None:
    found = measure_speed(StandIn(), {"mxfp8": "e4m3"}, sizes=[(8, 8, 8)], rounds=3)
    assert [(each.recipe, each.ms, each.speedup) for each in found] == [(None, 2.0, 1.0), ("mxfp8", 1.5, 2.0 / 1.5)]
