"""Transformer Engine's quantization that no recipe of megafp8 uses: hybrid linears, and its grouped linear by recipe.

    python benchmarks/gpu_te_layers.py [--rounds 20] [--json FILE]

A hybrid linear quantizes input and gradient in two formats, one for each orientation, so that wgrad can have another
recipe than fprop and dgrad. A grouped linear is that of experts. Forward and backward pass in one time, BF16 beside
each, and the error of the weight gradient against BF16's. All candidates run alternately; times are of the GPU, by
events.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Optional

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

if __name__ == "__main__" and {"-h", "--help"} & set(sys.argv):  # also where Transformer Engine is not installed
    print(__doc__)
    sys.exit()

import torch
import transformer_engine.pytorch as te
from transformer_engine.common import recipe as te_recipes
from transformer_engine.pytorch.custom_recipes import quantizer_factories as factories
from transformer_engine.pytorch.quantization import QuantizerRole, autocast
from transformer_engine.pytorch.tensor.hybrid_tensor import HybridQuantizer

from benchmarks import timing
from megafp8.utils.formatting import markdown_table

LINEAR = (16384, 4096, 14336)  # tokens, inputs, outputs
EXPERTS = 16
GROUPED = (32768, 2048, 768)  # rows of all experts, inputs, outputs
BUSY_CYCLES = 400_000  # in which the host starts what is measured
TENSORWISE, BLOCKWISE = factories.current_scaling_factory, factories.float8_block_scaling_factory


def hybrid(products: Callable[..., Any], wgrad: Callable[..., Any]) -> te_recipes.Recipe:
    """One format for fprop and dgrad, another for wgrad, which reads the columns of input and gradient."""

    def build(role: Optional[QuantizerRole]) -> Any:
        if role is not None and role.tensor_type == "weight":
            return products(role)
        return HybridQuantizer(rowwise_quantizer=products(role), columnwise_quantizer=wgrad(role))

    return te_recipes.CustomRecipe(qfactory=build)


Recipes = dict[str, Optional[te_recipes.Recipe]]
RECIPES: Recipes = {
    "bf16": None,
    "tensorwise": te_recipes.Float8CurrentScaling(),
    "delayed": te_recipes.DelayedScaling(),
    "blockwise": te_recipes.Float8BlockScaling(),
}
HYBRIDS = {
    "tensorwise, wgrad blockwise": (TENSORWISE, BLOCKWISE),
    "blockwise, wgrad tensorwise": (BLOCKWISE, TENSORWISE),
    "tensorwise, wgrad BF16": (TENSORWISE, factories.high_precision_factory),
    "blockwise, wgrad BF16": (BLOCKWISE, factories.high_precision_factory),
}


class Candidate:
    """One layer under one recipe, with its own input and gradient."""

    def __init__(self, layer: torch.nn.Module, recipe: Optional[te_recipes.Recipe], sizes: Sequence[int], rows: Any):
        self.layer, self.recipe, self.rows = layer, recipe, rows
        generator = torch.Generator("cuda").manual_seed(1)
        tokens, inputs, outputs = sizes
        options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
        self.x = torch.randn(tokens, inputs, **options).requires_grad_()
        self.grad = torch.randn(tokens, outputs, **options)

    def step(self) -> None:
        """Forward and backward pass."""
        self.x.grad = None
        with autocast(enabled=self.recipe is not None, recipe=self.recipe):
            out = self.layer(self.x) if self.rows is None else self.layer(self.x, self.rows, is_first_microbatch=True)
        out.backward(self.grad)

    def weight_gradient(self) -> torch.Tensor:
        """Of one step, in FP32."""
        self.layer.zero_grad()
        self.step()
        return torch.cat([p.grad.float().flatten() for p in self.layer.parameters()])


def gpu_ms(candidate: Candidate) -> float:
    """One step on the GPU."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(BUSY_CYCLES * 10)
    start.record()
    candidate.step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def build_linear(recipe: Optional[te_recipes.Recipe]) -> Candidate:
    torch.manual_seed(1)
    _, inputs, outputs = LINEAR
    layer = te.Linear(inputs, outputs, bias=False, params_dtype=torch.bfloat16, device="cuda")
    return Candidate(layer, recipe, LINEAR, None)


def build_grouped(recipe: Optional[te_recipes.Recipe]) -> Candidate:
    torch.manual_seed(1)
    rows, inputs, outputs = GROUPED
    layer = te.GroupedLinear(EXPERTS, inputs, outputs, bias=False, params_dtype=torch.bfloat16, device="cuda")
    return Candidate(layer, recipe, GROUPED, [rows // EXPERTS] * EXPERTS)


def measure(
    title: str, build: Callable[[Optional[te_recipes.Recipe]], Candidate], recipes: Recipes, rounds: int
) -> list[dict[str, Any]]:
    """Rows of all candidates of one layer; one that fails has its message instead of a time."""
    rows: list[dict[str, Any]] = []
    running: dict[str, Candidate] = {}
    gradients: dict[str, torch.Tensor] = {}
    for name, recipe in recipes.items():
        try:
            candidate = build(recipe)
            gradient = candidate.weight_gradient()
            reference = gradients.setdefault("bf16", gradient)
            error = float((gradient - reference).norm() / reference.norm())
            for _ in range(5):
                candidate.step()
            torch.cuda.synchronize()
            running[name] = candidate
            rows.append({"layer": title, "recipe": name, "wgrad_error": error})
        except Exception as error:  # a recipe that this version or device cannot run is a result
            rows.append({"layer": title, "recipe": name, "failed": f"{type(error).__name__}: {error}"[:300]})
    times: dict[str, list[float]] = {name: [] for name in running}
    for turn in range(rounds):
        for name in [*running][:: 1 if turn % 2 else -1]:
            times[name].append(gpu_ms(running[name]))
    for row in rows:
        if row["recipe"] in times:
            row["ms"] = statistics.median(times[row["recipe"]])
            row["to_bf16"] = timing.ratio_of(times["bf16"], times[row["recipe"]]).median
    return rows


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Measure, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="default %(default)s")
    parser.add_argument("--json", type=Path, help="also write the results there")
    options = parser.parse_args(argv)
    linears = RECIPES | {name: hybrid(*formats) for name, formats in HYBRIDS.items()}
    rows = measure("linear", build_linear, linears, options.rounds)
    rows += measure("grouped linear", build_grouped, RECIPES, options.rounds)
    lines = [
        [r["layer"], r["recipe"], *(
            (f"{r['ms']:.3f}", f"{r['to_bf16']:.3f}", f"{r['wgrad_error']:.4f}") if "ms" in r else (r["failed"], "", "")
        )] for r in rows
    ]  # fmt: skip
    print(markdown_table(["layer", "recipe", "ms", "times as fast as BF16", "error of wgrad"], lines))
    if options.json:
        timing.write_json(options.json, {"device": torch.cuda.get_device_name(), "rows": rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
