"""The kernel of Adam against FP64, and megatron-core's steps against those in one pass.

On a machine without a GPU: `pip install triton`, then `TRITON_INTERPRET=1 python -m pytest tests/unit/optim`.
"""

from __future__ import annotations

import math
import os

import pytest
import torch
from ranks import run_ranks
from torch import Tensor

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a CUDA device, or Triton and TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")

from small_run import curve_of, small_config  # noqa: E402

from megafp8.optim import one_pass  # noqa: E402
from megafp8.optim.adam_kernel import BLOCK, SUM_CHUNK, AdamStep, TensorTable, squared_sum, update_rows  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUMBERS = AdamStep(learning_rate=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=3, clip=0.7)
FACTOR = 0.5
SIZES = (1, 5, 2048, 40_000)
# A few roundings of FP32 beside FP64.
FP32_RELATIVE = 4 * 2**-24
FP32_ABSOLUTE = 1e-7  # where terms of size 1 cancel
# Rounding to BF16; Triton's interpreter cuts the bits off.
BF16_RELATIVE = 2**-8 if DEVICE == "cuda" else 2**-7


def drawn(size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def factor(value: float = FACTOR) -> Tensor:
    return torch.full((1,), value, device=DEVICE)


def updated(grad: Tensor, master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Master weight and moments after the update, in FP64: the formula at the top of the kernel, slowly."""
    beta1, beta2 = (float(torch.tensor(beta, dtype=torch.float32)) for beta in (NUMBERS.beta1, NUMBERS.beta2))
    g = grad.double() * FACTOR * NUMBERS.clip
    m = beta1 * exp_avg.double() + (1 - beta1) * g
    v = beta2 * exp_avg_sq.double() + (1 - beta2) * g**2
    step = (m / (1 - beta1**NUMBERS.step)) / ((v / (1 - beta2**NUMBERS.step)).sqrt() + NUMBERS.eps)
    return master.double() - NUMBERS.learning_rate * (step + NUMBERS.weight_decay * master.double()), m, v


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [0, 1])
def test_update_is_the_formula(moments: torch.dtype, offset: int) -> None:
    """Also where tensors begin at odd addresses, and end within a block."""
    rows, expected = [], []
    for size in SIZES:
        grad, master = drawn(size + offset)[offset:], drawn(size + offset, seed=1)[offset:]
        exp_avg, exp_avg_sq = drawn(size, seed=2) * 0.1, drawn(size, seed=3).square() * 0.01
        row = [grad, master, exp_avg.to(moments), exp_avg_sq.to(moments)]
        expected.append(updated(*row))
        rows.append([*row, torch.empty_like(master, dtype=torch.bfloat16)])
    update_rows(TensorTable(rows, BLOCK), factor(), NUMBERS)
    relative = FP32_RELATIVE if moments == torch.float32 else BF16_RELATIVE
    for (_, master, exp_avg, exp_avg_sq, model), (p, m, v) in zip(rows, expected, strict=True):
        torch.testing.assert_close(master.double(), p, rtol=FP32_RELATIVE, atol=FP32_ABSOLUTE)
        torch.testing.assert_close(exp_avg.double(), m, rtol=relative, atol=FP32_ABSOLUTE)
        torch.testing.assert_close(exp_avg_sq.double(), v, rtol=relative, atol=FP32_ABSOLUTE)
        torch.testing.assert_close(model, master.bfloat16(), rtol=0 if DEVICE == "cuda" else BF16_RELATIVE, atol=0)


def test_neighbours_are_left_alone() -> None:
    whole = drawn(3000)
    before = whole.clone()
    part = whole[1000:1500]
    moments = [torch.zeros_like(part) for _ in range(2)]
    update_rows(TensorTable([[drawn(500, seed=1), part, *moments, None]], BLOCK), factor(), NUMBERS)
    assert torch.equal(whole[:1000], before[:1000]) and torch.equal(whole[1500:], before[1500:])
    assert not torch.isclose(part, before[1000:1500], rtol=0, atol=1e-7).any()


def test_master_weights_as_remainders_are_exact() -> None:
    """16 bits beside a BF16 weight hold an FP32 one, rounded up or down, near a power of two too."""
    master = torch.cat([drawn(5000), torch.tensor([1.0, 1 - 2**-24, 1 + 2**-8, -1 - 2**-8, 2**-126], device=DEVICE)])
    bits = master.view(torch.int32)
    model = ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
    remainder = bits.to(torch.int16)
    grad = drawn(len(master), seed=1)
    exp_avg, exp_avg_sq = torch.zeros_like(master), torch.zeros_like(master)
    plain = [grad, master, exp_avg.clone(), exp_avg_sq.clone(), None]
    update_rows(TensorTable([plain], BLOCK), factor(), NUMBERS)
    update_rows(TensorTable([[grad, remainder, exp_avg, exp_avg_sq, model]], BLOCK), factor(), NUMBERS)
    restored = (model.view(torch.int16).int() << 16) + remainder.int()
    assert torch.equal(restored, master.view(torch.int32))


def test_squared_sum_is_in_one_order() -> None:
    tensors = [(drawn(size, seed=size),) for size in SIZES]
    expected = sum((tensor.double() * FACTOR).square().sum() for (tensor,) in tensors)
    table = TensorTable(tensors, SUM_CHUNK)
    first = squared_sum(table, factor())
    assert first.dtype == torch.float64
    torch.testing.assert_close(first, expected, rtol=1e-6, atol=0)
    assert torch.equal(first, squared_sum(table, factor()))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_squared_sum_shows_bad_numbers(bad: float) -> None:
    tensor = drawn(40_000)
    tensor[39_999] = bad
    assert not torch.isfinite(squared_sum(TensorTable([(tensor,)], SUM_CHUNK), factor()))


# ---- in megatron-core's optimizer -----------------------------------------------------------------------------------

SHARDED = "--use-distributed-optimizer --clip-grad 0.5"


def one_pass_curve(extra: str, world_size: int) -> tuple[list[float], list[float]]:
    """Losses and norms of a few steps with the optimizer in one pass, also where there is no GPU."""
    plain, one_pass.obstacle = one_pass.obstacle, lambda config, on_cuda: None
    try:
        curve = curve_of(small_config("llama", extra, world_size), 4, is_masked=True)
    finally:
        one_pass.obstacle = plain
    return curve.losses, curve.grad_norms


@pytest.mark.parametrize(
    ("extra", "world_size"),
    [
        (f"{SHARDED} --bf16", 1),
        (f"{SHARDED} --bf16 --overlap-grad-reduce --overlap-param-gather", 2),
        (f"{SHARDED} --bf16 --tensor-model-parallel-size 2 --sequence-parallel", 2),
        (f"{SHARDED} --bf16 --pipeline-model-parallel-size 2", 2),
        (SHARDED, 1),
    ],
)
def test_one_pass_follows_megatron_core(extra: str, world_size: int) -> None:
    config = small_config("llama", extra, world_size)
    expected = run_ranks(world_size, curve_of, config, 4, True)
    for losses, norms in run_ranks(world_size, one_pass_curve, extra, world_size):
        # BF16 weights may differ by a rounding where the interpreter cuts bits off.
        torch.testing.assert_close(losses, expected[0].losses, rtol=1e-3 if "bf16" in extra else 1e-6, atol=0)
        torch.testing.assert_close(norms, expected[0].grad_norms, rtol=2e-2 if "bf16" in extra else 1e-5, atol=0)
