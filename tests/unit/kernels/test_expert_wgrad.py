"""Weight gradients of experts that are added in the GEMM, against plain sums over each expert's rows.

On a machine without a GPU: `pip install triton`, then `TRITON_INTERPRET=1 python -m pytest tests/unit/kernels`.
"""

from __future__ import annotations

import interpreter
import pytest
import torch
from interpreter import DEVICE, IS_INTERPRETED
from torch import Tensor

interpreter.skip_without_kernels()

from megafp8.kernels.expert_scales import ColumnCodes
from megafp8.kernels.expert_wgrad import add_wgrad
from megafp8.kernels.routed_rows import RoutedRows, route

pytestmark = pytest.mark.usefixtures("exact")
EXPERTS, OUTPUTS, WIDTH = 4, 192, 320
E4M3 = torch.float8_e4m3fn
TOKENS = {
    "spread": (70, 64, 40, 33), "an expert without tokens": (0, 90, 0, 41), "all tokens to one expert": (0, 0, 0, 300),
    "one token": (0, 1, 0, 0),
}  # fmt: skip


def routed(tokens: tuple[int, ...]) -> RoutedRows:
    experts = torch.arange(EXPERTS).repeat_interleave(torch.tensor(tokens))
    chosen = torch.zeros(len(experts), EXPERTS, dtype=torch.bool)
    return route(chosen.scatter_(1, experts[:, None], True).to(DEVICE), 1)


def drawn(num_rows: int, width: int, rows: RoutedRows, seed: int) -> Tensor:
    """[R, width], zeros in empty rows and NaN behind the last expert's rows."""
    values = torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    values[rows.token_of_row < 0] = 0.0
    values[int(rows.ends[-1]) :] = torch.nan
    return values


def expected(grad_output: Tensor, inputs: Tensor, rows: RoutedRows) -> Tensor:
    """[E, N, W] of values [R, N] and [R, W]."""
    ends = [0, *rows.ends.tolist()]
    return torch.stack([
        grad_output[start:end].double().t() @ inputs[start:end].double()
        for start, end in zip(ends, ends[1:], strict=False)
    ]).float()  # fmt: skip


@pytest.mark.parametrize("is_overwritten", [False, True])
@pytest.mark.parametrize("routing", TOKENS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3, torch.float8_e5m2])
def test_sums_over_the_rows_of_each_expert(dtype: torch.dtype, routing: str, is_overwritten: bool) -> None:
    rows = routed(TOKENS[routing])
    num_rows = len(rows.token_of_row)
    grad_output = drawn(num_rows, OUTPUTS, rows, 0).to(dtype)
    inputs = drawn(num_rows, WIDTH, rows, 1).to(torch.bfloat16 if dtype == torch.bfloat16 else E4M3)
    before = torch.full((EXPERTS, OUTPUTS, WIDTH), torch.nan if is_overwritten else 3.0, device=DEVICE)
    main_grad, result = before.clone(), expected(grad_output.float(), inputs.float(), rows)
    if dtype == torch.bfloat16:
        add_wgrad(main_grad, grad_output, inputs, rows, is_overwritten=is_overwritten)
    else:
        scales = torch.rand(2, EXPERTS, generator=torch.Generator().manual_seed(2)).to(DEVICE) + 0.5
        codes = [
            ColumnCodes(values.t().contiguous().view(torch.uint8), scale, values.dtype)
            for values, scale in zip((grad_output, inputs), scales, strict=True)
        ]
        add_wgrad(main_grad, *codes, rows, is_overwritten=is_overwritten)
        result *= scales.prod(0)[:, None, None]
    # FP8 tensor cores add with 13 bits of fraction.
    bound = 1e-5 if dtype == torch.bfloat16 or IS_INTERPRETED else 2e-3
    wanted = result if is_overwritten else result + before
    assert (main_grad - wanted).norm() <= bound * wanted.norm()
    empty = [expert for expert, tokens in enumerate(TOKENS[routing]) if tokens == 0]
    assert (main_grad[empty] == (0.0 if is_overwritten else 3.0)).all()


def test_gradients_in_bf16_are_added_in_fp32() -> None:
    rows = routed(TOKENS["spread"])
    num_rows = len(rows.token_of_row)
    grad_output, inputs = (drawn(num_rows, width, rows, seed).bfloat16() for seed, width in enumerate((OUTPUTS, WIDTH)))
    main_grad = torch.full((EXPERTS, OUTPUTS, WIDTH), 3.0, dtype=torch.bfloat16, device=DEVICE)
    add_wgrad(main_grad, grad_output, inputs, rows, is_overwritten=False)
    wanted = (expected(grad_output.float(), inputs.float(), rows) + 3.0).bfloat16()
    assert (main_grad.float() - wanted.float()).norm() <= 1e-4 * wanted.float().norm()
