"""What a statistics step launches on a GPU, and how often it synchronizes, counted without a GPU.

Linears of a small run are observed with hooks, as Transformer Engine's are, and take the GPU code path. Triton is
replaced by a stand-in that counts its kernels and computes nothing. Values are therefore arbitrary, and every value
that the host reads and acts on before the end is counted as a synchronization. On a GPU: tests/gpu/test_telemetry.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from ranks import run_ranks
from small_run import build_run, small_config, statistics_record_of

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.operations import OperationCount, Operations
from megafp8.metrics import collector as observation
from megafp8.metrics.tensor_table import StatisticsTable
from megafp8.quantization import quantize
from megafp8.training.extensions.statistics import StatisticsCollector, StepStatistics
from megafp8.training.extensions.statistics_hooks import HookedLinear, TrackedLinear

FLAGS = "--bf16 --lr-warmup-iters 0 --num-layers 2 --hidden-size 128 --fp8-log-interval 2"
RECIPES = {
    "tensorwise": "--fp8-format hybrid --fp8-recipe tensorwise",
    "delayed": "--fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 16",
    "mxfp8": "--fp8-format e4m3 --fp8-recipe mxfp8",
    "others tried": "--fp8-format hybrid --fp8-recipe tensorwise --fp8-what-if blockwise,mxfp8,nvfp4",
}
OPERATIONS_PER_TENSOR = 15
OPERATIONS_PER_RECORD = 100  # for any number of tensors: outliers by width, norms, the table


def stand_in_for_triton(count: OperationCount) -> ModuleType:
    """A module whose kernels only count their launches."""

    class Kernel:
        def __init__(self, function: Callable[..., Any]):
            self.function = function

        def __getitem__(self, grid: Any) -> Callable[..., None]:
            def launch(*args: Any, **kwargs: Any) -> None:
                count.launched += 1

            return launch

    module: Any = ModuleType("triton")
    module.jit, module.language, module.cdiv = Kernel, MagicMock(), lambda size, length: -(-size // length)
    return module


def cost_of_statistics_step(flags: str) -> tuple[Operations, int]:
    """What a statistics step launches beyond a plain step, and the number of observed tensors."""
    count = OperationCount()
    run = build_run(small_config("llama", f"{FLAGS} {flags}"))
    collector = StatisticsCollector(run)
    collector.linears = [HookedLinear(each.name, each.module, each.recipe) for each in collector.linears]
    collector.statistics = StepStatistics(collector)
    is_watching = False

    def on_gpu(plain: Callable[..., Any]) -> Callable[..., Any]:
        def method(*args: Any) -> Any:
            nonlocal is_watching
            is_watching = True
            try:
                return plain(*args)
            finally:
                is_watching = False

        return method

    def to_host(table: StatisticsTable) -> StatisticsTable:
        """The only synchronization; everything after it runs on the host."""
        marks.append(Operations(count.launched, count.waits + 1))
        return StatisticsTable(list(table.rows), torch.device("cpu"))

    marks: list[Operations] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HookedLinear, "delayed_scale", TrackedLinear.delayed_scale)
        statistics_record_of(run, 1, collector)
        triton = stand_in_for_triton(count)
        patch.setitem(sys.modules, "triton", triton)
        patch.setitem(sys.modules, "triton.language", triton.language)
        for name in [name for name in sys.modules if name.startswith("megafp8.") and "triton" in name]:
            patch.delitem(sys.modules, name)
        for module in (quantize, observation):
            patch.setattr(module, "has_kernels", lambda tensor: is_watching)
        # The counters of a CPU read more where values saturate; those of a GPU wait for nothing.
        patch.setattr(quantize, "count_values", lambda *args: None)
        patch.setattr(HookedLinear, "_show", on_gpu(HookedLinear._show))
        patch.setattr(TrackedLinear, "weight_codes", on_gpu(TrackedLinear.weight_codes))
        patch.setattr(StatisticsTable, "to_host", to_host)
        for step in (2, 3, 4):
            marks.append(Operations(count.launched, count.waits))
            with count:
                statistics_record_of(run, step, collector)
    _, _, start, between, end = marks
    return (end - between) - (between - start), len(list(collector.plan.tensors()))


@pytest.mark.parametrize("recipe", RECIPES)
def test_statistics_launch_few_kernels_and_synchronize_once(recipe: str) -> None:
    ((cost, num_tensors),) = run_ranks(1, cost_of_statistics_step, RECIPES[recipe])
    assert cost.waits == 1
    assert num_tensors < cost.launched < OPERATIONS_PER_TENSOR * num_tensors + OPERATIONS_PER_RECORD, cost
