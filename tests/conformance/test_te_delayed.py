"""Delayed scaling compared with Transformer Engine's, over 20 microbatches: every code, scale, amax and history."""

import pytest
import torch
from te_gemms import RecordedGemm, recorded_gemms
from te_storage import NEEDS_TRANSFORMER_ENGINE, check_stored

from megafp8.quantization.delayed_scaling import AmaxExchange, DelayedState
from megafp8.quantization.linear_plan import LinearPlan, quantize_weight
from megafp8.quantization.quantized_tensor import Quantized
from megafp8.recipes import delayed
from megafp8.recipes.base import Gemm, Operand

pytestmark = NEEDS_TRANSFORMER_ENGINE

MICROBATCHES, PER_STEP = 20, 4  # of five optimizer steps: weights change between these
TOKENS, INPUTS, OUTPUTS = 96, 160, 128


def data(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and gradient of a microbatch, BF16: growing and shrinking, with occasional special values."""
    generator = torch.Generator().manual_seed(index)
    x = torch.randn(TOKENS, INPUTS, generator=generator) * 3.0 ** ((index * 7) % 11 - 5)
    dy = torch.randn(TOKENS, OUTPUTS, generator=generator) * 5.0 ** ((index * 3) % 7 - 8)
    if index == 5:
        x.zero_()
    if index == 8:
        dy[3, 4] = torch.inf
    if index == 11:
        x[1, 2] = torch.nan
    if index == 13:
        dy *= 1e-36  # the scale overflows FP32
    if index == 16:
        x *= 1e30
    return x.bfloat16(), dy.bfloat16()


def weight(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + step)
    return (torch.randn(OUTPUTS, INPUTS, generator=generator) * 0.1 * 2.0**-step).bfloat16()


def check_operands(index: int, gemms: dict[Gemm, RecordedGemm], ours: dict[Operand, Quantized]) -> None:
    """Codes and scales in all three GEMMs."""
    for gemm, record in gemms.items():
        for operand, theirs in record.operands.items():
            try:
                check_stored(ours[operand], *theirs)
            except AssertionError as error:
                raise AssertionError(f"microbatch {index}, {operand.value} of {gemm.value}: {error}") from None


@pytest.mark.parametrize("fmt", ["hybrid", "e4m3"])
@pytest.mark.parametrize("algorithm, history_len, margin", [
    ("max", 1024, 0), ("max", 5, 1), ("max", 1, 0), ("most_recent", 1, 0), ("most_recent", 4, 2),
])  # fmt: skip
def test_twenty_microbatches_equal_transformer_engine(algorithm: str, history_len: int, margin: int, fmt: str) -> None:
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling, Format
    from transformer_engine.pytorch.constants import FP8BwdTensorIdx, FP8FwdTensorIdx
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    FP8GlobalStateManager.reset()
    their_recipe = DelayedScaling(
        fp8_format=Format[fmt.upper()], amax_history_len=history_len, amax_compute_algo=algorithm, margin=margin
    )
    layer = te.Linear(INPUTS, OUTPUTS, bias=True, params_dtype=torch.bfloat16, device="cuda")
    recipe = delayed.build(fmt, fp8_amax_history_len=history_len, fp8_amax_compute_algo=algorithm, fp8_margin=margin)
    state, exchange = DelayedState(recipe), AmaxExchange()
    exchange.join(state, None)
    positions = (
        ("scaling_fwd", FP8FwdTensorIdx.GEMM1_INPUT), ("scaling_fwd", FP8FwdTensorIdx.GEMM1_WEIGHT),
        ("scaling_bwd", FP8BwdTensorIdx.GRAD_OUTPUT1),
    )  # fmt: skip

    for index in range(MICROBATCHES):
        x, dy = data(index)
        is_first = index % PER_STEP == 0
        w = weight(index // PER_STEP)
        with recorded_gemms() as gemms:
            with torch.no_grad():
                layer.weight.copy_(w)
            with te.autocast(enabled=True, recipe=their_recipe):
                y = layer(x.cuda().requires_grad_(), is_first_microbatch=is_first)
            y.backward(dy.cuda())

        plan = LinearPlan(recipe=recipe, delayed=state.scales_for_forward()[0])
        if is_first:
            gemm_weight = quantize_weight(w, plan)
        ours = {Operand.WEIGHT: gemm_weight.fprop, Operand.INPUT: plan.quantize(x, Operand.INPUT, Gemm.FPROP)}
        exchange.forward_ran(state)
        ours[Operand.GRAD_OUTPUT] = plan.quantize(dy, Operand.GRAD_OUTPUT, Gemm.DGRAD)
        exchange.backward_ran(state)

        assert set(gemms) == set(Gemm)
        check_operands(index, gemms, ours)
        for entry, (part, position) in enumerate(positions):
            meta = layer.fp8_meta[part]
            where = f"microbatch {index}, {tuple(Operand)[entry].value}"
            assert meta.scale[position].cpu() == state.quant_scale[entry], f"{where}: scale"
            their_history = meta.amax_history[:, position].cpu()
            assert torch.equal(their_history, state.amax_history[:, entry]), f"{where}: history"
