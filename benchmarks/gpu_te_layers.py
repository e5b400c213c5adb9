"""Transformer Engine's layers alone: fused layers by format, hybrid linears, and its grouped linear by recipe.

    python benchmarks/gpu_te_layers.py [--rounds 20] [--json FILE]

The fused layers are those of a transformer layer without its attention (LayerNormLinear, Linear, LayerNormMLP), and a
whole TransformerLayer by the margin of delayed scaling, whose outputs and gradients must be finite. A hybrid linear
quantizes input and gradient in two formats, one for each orientation, so that wgrad can have another
recipe than fprop and dgrad; no recipe of megafp8 uses it. A grouped linear is that of experts. BF16 is beside each, and
the error of the weight gradient against BF16's. All candidates run alternately; times are of the GPU, by events.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
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
FUSED = {"fused layers of GPT-2 124M": (16384, 768, 12), "fused layers of 4,096 channels": (8192, 4096, 32)}
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


class FusedLayers(torch.nn.Module):
    """The linears of a transformer layer, as Transformer Engine fuses them, without attention between them."""

    def __init__(self, channels: int):
        super().__init__()
        options: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": "cuda"}
        self.qkv = te.LayerNormLinear(channels, 3 * channels, **options)
        self.proj = te.Linear(channels, channels, **options)
        self.mlp = te.LayerNormMLP(channels, 4 * channels, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.proj(self.qkv(x)[:, : x.shape[1]])
        return x + self.mlp(x)


Recipes = dict[str, Optional[te_recipes.Recipe]]
RECIPES: Recipes = {
    "bf16": None,
    "tensorwise": te_recipes.Float8CurrentScaling(),
    "delayed": te_recipes.DelayedScaling(),
    "blockwise": te_recipes.Float8BlockScaling(),
}
FORMATS: Recipes = {
    "bf16": None,
    "delayed, E4M3": te_recipes.DelayedScaling(fp8_format=te_recipes.Format.E4M3),
    "delayed, hybrid": te_recipes.DelayedScaling(),
    "tensorwise, hybrid": te_recipes.Float8CurrentScaling(),
}
MARGINS: Recipes = {"bf16": None} | {f"margin {m}": te_recipes.DelayedScaling(margin=m) for m in (0, 1, 2)}
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

    def forward(self) -> torch.Tensor:
        """Forward pass."""
        self.x.grad = None
        with autocast(enabled=self.recipe is not None, recipe=self.recipe):
            if self.rows is None:
                return self.layer(self.x)
            return self.layer(self.x, self.rows, is_first_microbatch=True)

    def step(self) -> None:
        """Forward and backward pass."""
        self.forward().backward(self.grad)

    def weight_gradient(self) -> torch.Tensor:
        """Of one step, in FP32."""
        self.layer.zero_grad()
        self.step()
        return torch.cat([p.grad.float().flatten() for p in self.layer.parameters()])


def gpu_ms(candidate: Candidate) -> tuple[float, float]:
    """Forward and backward pass of one step on the GPU."""
    start, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    torch.cuda._sleep(BUSY_CYCLES * 10)
    start.record()
    output = candidate.forward()
    middle.record()
    output.backward(candidate.grad)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(middle), middle.elapsed_time(end)


def build_linear(recipe: Optional[te_recipes.Recipe]) -> Candidate:
    torch.manual_seed(1)
    _, inputs, outputs = LINEAR
    layer = te.Linear(inputs, outputs, bias=False, params_dtype=torch.bfloat16, device="cuda")
    return Candidate(layer, recipe, LINEAR, None)


def build_fused(sizes: tuple[int, int, int], recipe: Optional[te_recipes.Recipe]) -> Candidate:
    torch.manual_seed(1)
    tokens, channels, _ = sizes
    return Candidate(FusedLayers(channels), recipe, (tokens, channels, channels), None)


def build_transformer_layer(sizes: tuple[int, int, int], recipe: Optional[te_recipes.Recipe]) -> Candidate:
    torch.manual_seed(1)
    tokens, channels, heads = sizes
    layer = te.TransformerLayer(
        channels, 4 * channels, heads, attention_dropout=0.0, hidden_dropout=0.0, params_dtype=torch.bfloat16,
        device="cuda",
    )  # fmt: skip
    candidate = Candidate(layer, recipe, (tokens, channels, channels), None)
    candidate.x = candidate.x.detach().view(-1, 8, channels).requires_grad_()  # 8 sequences
    candidate.grad = candidate.grad.view(-1, 8, channels)
    return candidate


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
            is_finite = bool(
                torch.isfinite(candidate.forward()).all() and torch.isfinite(candidate.weight_gradient()).all()
            )
            running[name] = candidate
            rows.append({"layer": title, "recipe": name, "wgrad_error": error, "is_finite": is_finite})
        except Exception as error:  # a recipe that this version or device cannot run is a result
            rows.append({"layer": title, "recipe": name, "failed": f"{type(error).__name__}: {error}"[:300]})
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in running}
    for turn in range(rounds):
        for name in [*running][:: 1 if turn % 2 else -1]:
            times[name].append(gpu_ms(running[name]))
    for row in rows:
        if row["recipe"] in times:
            row["forward_ms"], row["backward_ms"] = map(statistics.median, zip(*times[row["recipe"]], strict=True))
            totals = [[sum(both) for both in times[name]] for name in ("bf16", row["recipe"])]
            row["ms"] = statistics.median(totals[1])
            row["to_bf16"] = timing.ratio_of(*totals).median
    return rows


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Measure, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="default %(default)s")
    parser.add_argument("--json", type=Path, help="also write the results there")
    options = parser.parse_args(argv)
    linears = RECIPES | {name: hybrid(*formats) for name, formats in HYBRIDS.items()}
    rows = []
    for name, sizes in FUSED.items():
        rows += measure(name, partial(build_fused, sizes), FORMATS, options.rounds)
    rows += measure(
        "TransformerLayer of 768 channels",
        partial(build_transformer_layer, FUSED["fused layers of GPT-2 124M"]),
        MARGINS,
        options.rounds,
    )
    rows += measure("linear", build_linear, linears, options.rounds)
    rows += measure("grouped linear", build_grouped, RECIPES, options.rounds)
    lines = [
        [r["layer"], r["recipe"], *(
            (f"{r['forward_ms']:.3f}", f"{r['backward_ms']:.3f}", f"{r['ms']:.3f}", f"{r['to_bf16']:.3f}",
             f"{r['wgrad_error']:.4f}", "yes" if r["is_finite"] else "no")
            if "ms" in r else (r["failed"], "", "", "", "", "")
        )] for r in rows
    ]  # fmt: skip
    header = ["layer", "recipe", "forward ms", "backward ms", "ms", "times as fast as BF16", "error of wgrad", "finite"]
    print(markdown_table(header, lines))
    if options.json:
        timing.write_json(options.json, {"device": torch.cuda.get_device_name(), "rows": rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
