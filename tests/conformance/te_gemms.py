"""The GEMMs of Transformer Engine's linears, recorded: operands, results, and results before rounding."""

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from megafp8.quantization.te_layout import stored
from megafp8.recipes.base import Gemm, Operand

# By the product's cuBLAS layout: its GEMM, and the sides of the first and the second operand.
PRODUCTS = {
    "TN": (Gemm.FPROP, ((Operand.WEIGHT, "row"), (Operand.INPUT, "row"))),
    "NN": (Gemm.DGRAD, ((Operand.WEIGHT, "col"), (Operand.GRAD_OUTPUT, "row"))),
    "NT": (Gemm.WGRAD, ((Operand.INPUT, "col"), (Operand.GRAD_OUTPUT, "col"))),
}


@dataclass(frozen=True)
class RecordedGemm:
    """One product, on the CPU.

    Attributes:
        operands: stored codes and scales, and their side.
        result: as the layer received it.
        sums: the same product without bias, in FP32.
    """

    operands: dict[Operand, tuple[str, Tensor, Tensor]]
    result: Tensor
    sums: Tensor


@contextlib.contextmanager
def recorded_gemms() -> Iterator[dict[Gemm, RecordedGemm]]:
    """The GEMMs of a `Linear` or `LayerNormLinear` inside the block, the last one of each kind."""
    records: dict[Gemm, RecordedGemm] = {}
    with gemms_through(functools.partial(_record, records)):
        yield records


@contextlib.contextmanager
def gemms_through(function: Callable) -> Iterator[None]:
    """Inside the block `Linear` and `LayerNormLinear` call `function(general_gemm, a, b, **options)` to multiply."""
    with contextlib.ExitStack() as stack:
        for name in ("linear", "layernorm_linear"):
            module = importlib.import_module(f"transformer_engine.pytorch.module.{name}")
            through = functools.partial(function, module.general_gemm)
            stack.enter_context(patch.object(module, "general_gemm", through))
        yield


def _record(records: dict[Gemm, RecordedGemm], general_gemm: Callable, a: Any, b: Any, **options: Any) -> Any:
    layout = options.get("layout", "TN")
    gemm, uses = PRODUCTS[layout]
    operands = {
        operand: (side, *stored(tensor, side)[:2]) for tensor, (operand, side) in zip((a, b), uses, strict=True)
    }
    split = options.get("use_split_accumulator", False)
    sums = general_gemm(a, b, layout=layout, out_dtype=torch.float32, use_split_accumulator=split)[0]
    results = general_gemm(a, b, **options)
    records[gemm] = RecordedGemm(operands, _on_cpu(results[0]), _on_cpu(sums))
    return results


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1, tensor.shape[-1]).cpu()
