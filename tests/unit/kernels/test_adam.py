"""The Adam kernel against FP64, and megatron-core's optimizer steps against the fused ones.

On a machine without a GPU: `pip install triton`, then `TRITON_INTERPRET=1 python -m pytest tests/unit/kernels`.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Optional

import interpreter
import pytest
import torch
from interpreter import DEVICE
from ranks import run_ranks
from torch import Tensor

interpreter.skip_without_kernels()

from small_run import curve_of, small_config

from megafp8.kernels.adam import BLOCK, SUM_CHUNK, AdamStep, TensorTable, squared_sum, update_rows
from megafp8.mcore import cpu_patches
from megafp8.optimizer import fused_adam
from megafp8.optimizer.moment_scales import MomentScales
from megafp8.optimizer.tensor_table import MomentScale, ParameterRow
from megafp8.quantization.scaling import MOMENT_FORMAT_MAX, moment_dequant_scale

NUMBERS = AdamStep(learning_rate=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=3, clip=0.7)
FACTOR = 0.5
SIZES = (1, 5, 2048, 40_000)
# A few roundings of FP32, compared with FP64.
FP32_RELATIVE = 4 * 2**-24
FP32_ABSOLUTE = 1e-7  # where terms of size 1 cancel
# Rounding to BF16. Triton's interpreter truncates.
BF16_RELATIVE = 2**-8 if DEVICE == "cuda" else 2**-7


def drawn(size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def factor(value: float = FACTOR) -> Tensor:
    return torch.full((1,), value, device=DEVICE)


def updated(grad: Tensor, master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Master weight and moments after the update, in FP64, by the formula at the top of the kernel."""
    beta1, beta2 = (float(torch.tensor(beta, dtype=torch.float32)) for beta in (NUMBERS.beta1, NUMBERS.beta2))
    g = grad.double() * FACTOR * NUMBERS.clip
    m = beta1 * exp_avg.double() + (1 - beta1) * g
    v = beta2 * exp_avg_sq.double() + (1 - beta2) * g**2
    step = (m / (1 - beta1**NUMBERS.step)) / ((v / (1 - beta2**NUMBERS.step)).sqrt() + NUMBERS.eps)
    return master.double() - NUMBERS.learning_rate * (step + NUMBERS.weight_decay * master.double()), m, v


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [0, 1])
def test_update_is_the_formula(moments: torch.dtype, offset: int) -> None:
    """Also where tensors start at odd addresses, and end within a block."""
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


def test_adjacent_memory_is_unchanged() -> None:
    whole = drawn(3000)
    before = whole.clone()
    part = whole[1000:1500]
    moments = [torch.zeros_like(part) for _ in range(2)]
    update_rows(TensorTable([[drawn(500, seed=1), part, *moments, None]], BLOCK), factor(), NUMBERS)
    assert torch.equal(whole[:1000], before[:1000]) and torch.equal(whole[1500:], before[1500:])
    assert not torch.isclose(part, before[1000:1500], rtol=0, atol=1e-7).any()


def test_master_weights_as_remainders_are_exact() -> None:
    """A BF16 weight and a 16-bit remainder represent an FP32 weight, rounded up or down, also near a power of two."""
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


def test_squared_sum_has_a_fixed_order() -> None:
    tensors = [(drawn(size, seed=size),) for size in SIZES]
    expected = sum((tensor.double() * FACTOR).square().sum() for (tensor,) in tensors)
    table = TensorTable(tensors, SUM_CHUNK)
    first = squared_sum(table, factor())
    assert first.dtype == torch.float64
    torch.testing.assert_close(first, expected, rtol=1e-6, atol=0)
    assert torch.equal(first, squared_sum(table, factor()))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_squared_sum_propagates_nonfinite_values(bad: float) -> None:
    tensor = drawn(40_000)
    tensor[39_999] = bad
    assert not torch.isfinite(squared_sum(TensorTable([(tensor,)], SUM_CHUNK), factor()))


# ---- moments with a scale ------------------------------------------------------------------------------------------

# A code is off by 0.5 steps: 2^-4 of a normal number, and 0.5 of the smallest subnormal one.
HALF_STEP = {
    torch.uint8: (2**-4, 2**-10 / 448),
    torch.float16: (2**-11, 2**-25 / 32752),
    torch.bfloat16: (BF16_RELATIVE, 0.0),
    torch.float32: (0.0, 0.0),
}
MOMENTS = [
    (torch.uint8, torch.float16),
    (torch.float16, torch.float16),
    (torch.uint8, torch.uint8),
    (torch.uint8, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.bfloat16, torch.float16),
]


def stored(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Optional[MomentScale]]:
    """A moment as Transformer Engine's Adam keeps it."""
    if dtype not in MOMENT_FORMAT_MAX:
        return values.to(dtype), None
    noted = moment_dequant_scale(values.abs().max().view(1), MOMENT_FORMAT_MAX[dtype])
    quant = 1 / noted
    if dtype == torch.float16:
        return (values * quant).half(), MomentScale(noted, noted, None)
    return (values * quant).to(torch.float8_e4m3fn).view(torch.uint8), MomentScale(noted, 1 / quant, quant)


def read(moment: Tensor, scale: Optional[MomentScale]) -> Tensor:
    """A moment in FP32, as its `get_unscaled_state` has it."""
    values = moment.view(torch.float8_e4m3fn) if moment.dtype == torch.uint8 else moment
    return values.float() if scale is None else values.float() * scale.dequant


def row_of(grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, dtypes: tuple[torch.dtype, torch.dtype]) -> ParameterRow:
    moments, scales = zip(*(stored(*each) for each in zip((exp_avg, exp_avg_sq), dtypes, strict=True)), strict=True)
    master = drawn(len(grad), seed=9)
    return ParameterRow(grad, master, *moments, torch.empty_like(master, dtype=torch.bfloat16), scales)


def update(rows: list[ParameterRow]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Update rows in place; returns the formula's result for them, in FP64."""
    expected = [updated(row.grad, row.master, *moments_of(row)) for row in rows]
    scales = MomentScales(rows).update(factor(), NUMBERS)
    update_rows(TensorTable([row.tensors for row in rows], BLOCK), factor(), NUMBERS, scales)
    return expected


def moments_of(row: ParameterRow) -> tuple[Tensor, Tensor]:
    return read(row.exp_avg, row.scales[0]), read(row.exp_avg_sq, row.scales[1])


def drawn_rows(dtypes: tuple[torch.dtype, torch.dtype], grads: torch.dtype = torch.float32) -> list[ParameterRow]:
    """Sizes that end within a block, with second moments over twelve powers of ten, including FP16's subnormals. First
    moments have their gradients' signs, so that no digits cancel."""
    rows = []
    for size in SIZES:
        spread = 10 ** (-6 * torch.rand(size, generator=torch.Generator().manual_seed(4)).to(DEVICE))
        grad, exp_avg_sq = drawn(size) * spread, (drawn(size, seed=3) * spread * 0.1).square()
        exp_avg = drawn(size, seed=2).abs() * spread * grad.sign() * 0.1
        rows.append(row_of(grad.to(grads), exp_avg, exp_avg_sq, dtypes))
    return rows


@pytest.mark.parametrize("dtypes", MOMENTS, ids=str)
def test_scaled_moments_follow_the_formula(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """Weights as exact as with any moments, moments as exact as their format."""
    rows = drawn_rows(dtypes, torch.bfloat16 if dtypes[1] == torch.bfloat16 else torch.float32)
    for row, (p, *moments) in zip(rows, update(rows), strict=True):
        # A second moment that is zero in FP8 leaves a small divisor: a long step with a larger error.
        atol = FP32_ABSOLUTE * (10 if dtypes[1] == torch.uint8 else 1)
        torch.testing.assert_close(row.master.double(), p, rtol=FP32_RELATIVE, atol=atol)
        for moment, found, dtype in zip(moments, moments_of(row), dtypes, strict=True):
            relative, of_largest = HALF_STEP[dtype]
            atol = of_largest * moment.abs().max().item() * 1.001 + 1e-30
            torch.testing.assert_close(found.double(), moment, rtol=relative + 2**-18, atol=atol)


@pytest.mark.parametrize("dtypes", MOMENTS, ids=str)
def test_scaled_moments_equal_transformer_engine(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """Unscaled, updated in FP32, scaled by the new largest magnitude: equal codes except ties, scales to 20 bits."""
    rows = drawn_rows(dtypes)
    for row, (_, *moments) in zip(rows, update(rows), strict=True):
        found = zip((row.exp_avg, row.exp_avg_sq), row.scales, moments, dtypes, strict=True)
        for codes, scale, moment, dtype in found:
            if scale is None:
                continue
            exact = moment.float().abs().max() / MOMENT_FORMAT_MAX[dtype]
            torch.testing.assert_close(scale.nominal[0], exact, rtol=2**-19, atol=0)
            quotients = moment.float() / exact
            rounded = quotients.half() if dtype == torch.float16 else quotients.to(torch.float8_e4m3fn)
            bits = torch.int16 if dtype == torch.float16 else torch.uint8
            apart = (codes.view(bits).int() - rounded.view(bits).int()).abs()
            assert apart.max() <= 1 and apart.sum() <= 1 + len(codes) / 500


@pytest.mark.parametrize("dtypes", MOMENTS, ids=str)
def test_moments_survive_a_read_and_store(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """A checkpoint has them in FP32. A run that resumes from it has equal codes and scales."""
    rows = drawn_rows(dtypes)
    update(rows)
    for row in rows:
        again = row_of(row.grad, *moments_of(row), dtypes)
        assert torch.equal(again.exp_avg, row.exp_avg) and torch.equal(again.exp_avg_sq, row.exp_avg_sq)
        for scale, new in zip(row.scales, again.scales, strict=True):
            if scale is not None:
                assert torch.equal(new.nominal, scale.nominal) and torch.equal(new.dequant, scale.dequant)
                assert scale.quant is None or torch.equal(new.quant, scale.quant)


@pytest.mark.parametrize("dtypes", MOMENTS[:3], ids=str)
@pytest.mark.parametrize("size", [0.0, 1e-42, 1e-30, 1e18])
def test_extreme_moments_stay_finite(dtypes: tuple[torch.dtype, torch.dtype], size: float) -> None:
    """Gradients that are zero, subnormal, with vanishing squares, or with the largest FP32 squares; also mixed."""
    zeros = torch.zeros(3000, device=DEVICE)
    grad = torch.full_like(zeros, size)
    grad[::7] = 0
    rows = [row_of(grad, zeros, zeros, dtypes), row_of(drawn(500), drawn(500), drawn(500).square(), dtypes)]
    for row, (_, *moments) in zip(rows, update(rows), strict=True):
        assert all(torch.isfinite(each).all() for each in (row.master, *moments_of(row)))
        for moment, found in zip(moments, moments_of(row), strict=True):
            torch.testing.assert_close(found.max().double(), moment.max(), rtol=2**-18, atol=1e-41)


def test_largest_moment_may_be_anywhere() -> None:
    """In a tensor of several chunks, also in the last element. It need not have been the largest before."""
    size = SUM_CHUNK + 3
    for index in (SUM_CHUNK - 1, size - 1):
        grad = drawn(size).clamp(-1, 1)
        grad[index] = -100.0
        row = row_of(grad, drawn(size, seed=1).clamp(-1, 1), drawn(size, seed=2).clamp(0, 1), MOMENTS[0])
        ((_, m, v),) = update([row])
        for moment, found in zip((m, v), moments_of(row), strict=True):
            torch.testing.assert_close(found[index].double(), moment[index], rtol=2**-18, atol=0)


# ---- in megatron-core's optimizer -----------------------------------------------------------------------------------

SHARDED = "--use-distributed-optimizer --clip-grad 0.5"
FSDP = "--use-torch-fsdp2 --no-gradient-accumulation-fusion --clip-grad 0.5"


def one_pass_curve(extra: str, world_size: int) -> tuple[list[float], list[float]]:
    """Losses and norms of a few steps with the fused optimizer, also without a GPU."""
    plain, fused_adam.device_problem = fused_adam.device_problem, lambda settings, on_cuda: None
    try:
        curve = curve_of(small_config("llama", extra, world_size), 4, is_masked=True)
    finally:
        fused_adam.device_problem = plain
    return curve.losses, curve.grad_norms


@pytest.mark.parametrize(
    ("extra", "world_size"),
    [
        (f"{SHARDED} --bf16", 1),
        (f"{SHARDED} --bf16 --overlap-grad-reduce --overlap-param-gather", 2),
        (f"{SHARDED} --bf16 --tensor-model-parallel-size 2 --sequence-parallel", 2),
        (f"{SHARDED} --bf16 --pipeline-model-parallel-size 2", 2),
        (SHARDED, 1),
        (FSDP, 2),
        (f"{FSDP} --bf16 --num-distributed-optimizer-instances 2 --micro-batch-size 1", 4),
    ],
)
def test_one_pass_follows_megatron_core(extra: str, world_size: int) -> None:
    config = small_config("llama", extra, world_size)
    expected = run_ranks(world_size, curve_of, config, 4, True)
    for losses, norms in run_ranks(world_size, one_pass_curve, extra, world_size):
        # BF16 weights may differ by a rounding where the interpreter truncates.
        torch.testing.assert_close(losses, expected[0].losses, rtol=1e-3 if "bf16" in extra else 1e-6, atol=0)
        torch.testing.assert_close(norms, expected[0].grad_norms, rtol=2e-2 if "bf16" in extra else 1e-5, atol=0)


def keep_scaled_moments(self: torch.optim.Optimizer, shard: Tensor, has_remainders: bool) -> None:
    """Give an optimizer the state of Transformer Engine's Adam with FP8 and FP16 moments."""
    one = torch.ones(1)
    self._scales[shard] = {"exp_avg": one.clone(), "exp_avg_sq": one.clone()}
    codes = torch.zeros_like(shard, dtype=torch.uint8)
    fp8 = SimpleNamespace(_data=codes, _scale_inv=one.clone(), _quantizer=SimpleNamespace(scale=one.clone()))
    self.state[shard] = {"exp_avg": fp8, "exp_avg_sq": torch.zeros_like(shard, dtype=torch.float16)}


def scaled_curve(extra: str, world_size: int) -> tuple[list[float], list[float]]:
    """`one_pass_curve` with FP8 and FP16 moments."""
    adam = cpu_patches.Adam
    adam.initialize_state, adam._scales, adam.store_param_remainders = keep_scaled_moments, {}, False
    return one_pass_curve(extra, world_size)


@pytest.mark.skipif(DEVICE == "cuda", reason="Transformer Engine's Adam keeps its own")
def test_scaled_moments_follow_fp32_ones() -> None:
    """In megatron-core's optimizer, which stores them."""
    extra = f"{SHARDED} --bf16"
    (expected,) = run_ranks(1, curve_of, small_config("llama", extra, 1), 4, True)
    ((losses, _),) = run_ranks(1, scaled_curve, extra, 1)
    assert losses != expected.losses
    torch.testing.assert_close(losses, expected.losses, rtol=2e-3, atol=0)
