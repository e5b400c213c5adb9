"""The codes that statistics observe of Transformer Engine's linears are those that their GEMMs multiplied."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from te_gemms import PRODUCTS, gemms_through
from te_storage import NEEDS_TRANSFORMER_ENGINE
from torch import Tensor

from megafp8.quantization.quantized_tensor import Quantized
from megafp8.quantization.te_layout import as_stored, stored
from megafp8.recipes.base import Gemm, Operand

pytestmark = NEEDS_TRANSFORMER_ENGINE
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpu"))

RECIPES = ("tensorwise", "delayed", "blockwise")
SIDES = {(gemm, operand): side for gemm, uses in PRODUCTS.values() for operand, side in uses}
# For a linear with a norm, statistics use torch's norm, rounded to BF16. Transformer Engine's own kernel sums in
# another order, and under delayed scaling quantizes from FP32. A last bit changes few codes.
AFTER_NORM = ("linear_qkv", "linear_fc1")
MOVED_FRACTION = 0.02


@contextlib.contextmanager
def multiplied() -> Iterator[dict[tuple[Operand, str], list[Tensor]]]:
    """The codes of all FP8 GEMMs inside the block, by operand and side."""
    found: dict[tuple[Operand, str], list[Tensor]] = {}
    with gemms_through(functools.partial(record, found)):
        yield found


def record(found: dict, general_gemm: Callable, a: Any, b: Any, **options: Any) -> Any:
    """Keep the codes of both operands, if they have any."""
    _, uses = PRODUCTS[options.get("layout", "TN")]
    for tensor, use in zip((a, b), uses, strict=True):
        if hasattr(tensor, "_rowwise_data") or hasattr(tensor, "_data"):
            found.setdefault(use, []).append(stored(tensor, use[1]).codes)
    return general_gemm(a, b, **options)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, Operand, Gemm], Quantized]:
    """The observers' arguments, by linear, operand and GEMM."""
    from megafp8.training.extensions.statistics_hooks import (
        HookedLinear,  # imports megatron-core, which is patched for CPUs first
    )

    found: dict[tuple[str, Operand, Gemm], Quantized] = {}
    attach = HookedLinear.attach

    def attach_both(self: Any, observer: Callable) -> None:
        def keep_and_observe(operand: Operand, tensor: Tensor, codes: dict[Gemm, Quantized]) -> None:
            found.update({(self.name, operand, gemm): quantized for gemm, quantized in codes.items()})
            observer(operand, tensor, codes)

        attach(self, keep_and_observe)

    monkeypatch.setattr(HookedLinear, "attach", attach_both)
    return found


@pytest.mark.parametrize("recipe", RECIPES)
def test_observed_codes_were_multiplied(recipe: str, shown: dict) -> None:
    from gpu_runs import RECIPES as FLAGS
    from gpu_runs import gpu_run
    from small_run import statistics_record_of, train

    from megafp8.training.extensions.statistics import StatisticsCollector

    # In a run's first step delayed scaling has no scales before the first microbatch, whose codes of weights are kept.
    with gpu_run(f"{FLAGS[recipe]} --fp8-log-interval 2") as run:
        train(run, 1)
        with multiplied() as found:
            statistics_record_of(run, 2)
            names = {linear.name for linear in StatisticsCollector(run).linears}
    assert {name for name, _, _ in shown} == names
    assert {(operand, gemm) for _, operand, gemm in shown} == {(operand, gemm) for gemm, operand in SIDES}
    for (name, operand, gemm), quantized in shown.items():
        side = SIDES[gemm, operand]
        codes = as_stored(quantized, side).codes
        same_size = [each for each in found[operand, side] if each.shape == codes.shape]
        moved = min(float((each != codes).float().mean()) for each in same_size)
        is_after_norm = operand is Operand.INPUT and name.rpartition(".")[2] in AFTER_NORM
        assert moved <= (MOVED_FRACTION if is_after_norm else 0.0), (name, operand, gemm, moved)
