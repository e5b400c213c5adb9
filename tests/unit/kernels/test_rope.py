"""Splitting and rotating in one kernel against the same by slices.

On a machine without a GPU: `pip install triton`, then `TRITON_INTERPRET=1 python -m pytest tests/unit/kernels`.
"""

from __future__ import annotations

import interpreter
import pytest
import torch
from interpreter import DEVICE
from torch import Tensor

interpreter.skip_without_kernels()

from megafp8.mcore import cpu_patches

cpu_patches.install()

from megafp8.kernels import tensorwise
from megafp8.kernels.annotations import annotation
from megafp8.kernels.rope import split_and_rotate
from megafp8.kernels.rounding import format_spec
from megafp8.kernels.tensorwise import TensorwiseOutput
from megafp8.recipes.formats import E5M2

LENGTH, BATCH = 5, 2
HEADS, GROUPS, DIM = 8, 4, 32


def angles_of(length: int, dim: int) -> Tensor:
    """As megatron-core makes them: [S, 1, 1, D]."""
    frequencies = 10_000.0 ** (-torch.arange(0, dim, 2) / dim)
    half = torch.outer(torch.arange(length).float(), frequencies)
    return torch.cat((half, half), dim=-1)[:, None, None, :].to(DEVICE)


def by_slices(joined: Tensor, angles: Tensor, heads: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same, slowly, in FP64."""
    length, batch, width = joined.shape
    dim = width // (heads + 2 * groups)
    parts = joined.double().view(length, batch, groups, heads // groups + 2, dim)
    queries = parts[..., :-2, :].reshape(length, batch, heads, dim)

    def rotated(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * angles.double().cos() + torch.cat((-second, first), dim=-1) * angles.double().sin()

    return rotated(queries), rotated(parts[..., -2, :]), parts[..., -1, :]


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize(("heads", "groups", "dim"), [(4, 4, 64), (8, 2, 32), (20, 20, 16), (6, 1, 128)])
def test_forward_and_backward_against_slices(heads: int, groups: int, dim: int, is_packed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    joined = torch.randn(LENGTH, BATCH, (heads + 2 * groups) * dim, generator=generator).to(DEVICE)
    slow, fast = joined.clone().requires_grad_(), joined.clone().requires_grad_()
    angles = angles_of(LENGTH, dim)
    expected, found = by_slices(slow, angles, heads, groups), split_and_rotate(fast, angles, heads, groups, is_packed)
    for one, other in zip(found, expected, strict=True):
        assert (one.transpose(0, 1) if is_packed else one).is_contiguous()
        torch.testing.assert_close(one.double(), other, rtol=1e-6, atol=1e-6)
    weights = [torch.randn(part.shape, generator=generator).to(DEVICE) for part in expected]
    sum((part * weight).sum() for part, weight in zip(expected, weights, strict=True)).backward()
    sum((part * weight).sum() for part, weight in zip(found, weights, strict=True)).backward()
    torch.testing.assert_close(fast.grad, slow.grad, rtol=1e-6, atol=1e-6)


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter cuts bits off where a GPU rounds")
def test_bf16_is_rounded_once() -> None:
    joined = torch.randn(64, 2, 24 * 128, device=DEVICE).bfloat16()
    angles = angles_of(64, 128)
    expected = by_slices(joined.float(), angles, 8, 8)
    found = split_and_rotate(joined, angles, 8, 8)
    for one, other in zip(found, expected, strict=True):
        differs = one != other.bfloat16()
        assert differs.float().mean() < 1e-3  # ties, and cancellation in FP32
        torch.testing.assert_close(one.double(), other, rtol=2**-8, atol=1e-6)


def joined_gradient(gradients: list[Tensor], notes_amax: bool) -> Tensor:
    """As the preceding linear receives it."""
    length = len(gradients[0])
    joined = torch.zeros(length, BATCH, (HEADS + 2 * GROUPS) * DIM, device=DEVICE).bfloat16().requires_grad_()
    parts = split_and_rotate(joined, angles_of(length, DIM), HEADS, GROUPS, records_amax=notes_amax)
    return torch.autograd.grad(parts, joined, gradients)[0]


def both_gradients(length: int, part: int, kind: str) -> tuple[Tensor, Tensor]:
    """The joined gradient without an annotation and with one. That of one part is the largest."""
    generator = torch.Generator().manual_seed(part)
    gradients = [torch.randn(length, BATCH, count, DIM, generator=generator) for count in (HEADS, GROUPS, GROUPS)]
    gradients[part] *= 8
    if kind == "zeros":
        gradients = [torch.zeros_like(gradient) for gradient in gradients]
    elif kind != "numbers":
        gradients[part][-1, 0, :2, 3] = torch.tensor([100.0, float(kind)])  # numbers that one thread reads in sequence
    given = [gradient.bfloat16().to(DEVICE) for gradient in gradients]
    return joined_gradient(given, False), joined_gradient(given, True)


KINDS = pytest.mark.parametrize("kind", ["numbers", "zeros", "nan", "inf"])


@KINDS
@pytest.mark.parametrize("part", range(3), ids=["queries", "keys", "values"])
@pytest.mark.parametrize("length", [5, 8, 19])
@pytest.mark.usefixtures("exact")
def test_the_gradient_has_its_amax_recorded(length: int, part: int, kind: str) -> None:
    """Of the rounded numbers, none of which is NaN. The gradient equals that without the annotation."""
    plain, noting = both_gradients(length, part, kind)
    assert torch.equal(plain.view(torch.int16), noting.view(torch.int16))
    amax = annotation(noting, "amax")
    assert amax is not None and torch.equal(amax, noting.float().abs().nan_to_num(0, torch.inf).amax().reshape(1))
    assert annotation(plain, "amax") is None


@KINDS
@pytest.mark.usefixtures("exact")
def test_the_recorded_amax_gives_the_codes_of_a_separate_pass(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    passes, plain_amaxes = [], tensorwise._amaxes
    monkeypatch.setattr(tensorwise, "PROGRAMS", 4)
    monkeypatch.setattr(tensorwise, "_amaxes", lambda inputs: passes.append(inputs) or plain_amaxes(inputs))
    found = []
    for gradient in both_gradients(64, 0, kind):
        rows = gradient.flatten(0, -2)
        codes = TensorwiseOutput(
            rows=rows.new_zeros(rows.shape, dtype=torch.uint8),
            columns=rows.new_zeros(rows.shape[::-1], dtype=torch.uint8),
            scale_inv=rows.new_zeros(1, dtype=torch.float32),
            spec=format_spec(E5M2),
            is_power_of_two=False,
        )
        tensorwise.cast(rows, codes)
        found.append((codes.rows, codes.columns, codes.scale_inv))
    assert len(passes) == 1
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
