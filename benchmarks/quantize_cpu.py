"""Time of the emulated FP8 linear layer on a CPU, forward and backward, compared with a plain linear layer.

    python benchmarks/quantize_cpu.py [--tokens 2048] [--dtype bf16] [--json FILE]

All alternate in one process, so that changes of the machine's speed affect all of them equally; medians are compared.
`reused` is the emulated layer with the weight already quantized, as in all microbatches of a step except the first.
Times are CPU times with one thread, because other processes affect them least, else wall times. A second table has the
time to quantize and dequantize a matrix by each rule of each recipe, relative to a copy of it.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import timing
from megafp8.quantization.delayed_scaling import DelayedScale
from megafp8.quantization.linear import emulated_linear
from megafp8.quantization.linear_plan import LinearPlan, quantize_weight
from megafp8.quantization.quantize import dequantize, quantize
from megafp8.quantization.quantized_tensor import Quantized
from megafp8.recipes import blockwise, delayed, mxfp8, nvfp4, tensorwise
from megafp8.recipes.base import LinearRecipe, OperandRule, ScaleRule

SHAPES = ((512, 512), (512, 1536), (512, 2048), (2048, 512))  # (inputs, outputs) of a layer of hidden size 512
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
PLAN = LinearPlan(recipe=tensorwise.build("hybrid"))


def medians_ms(rounds: int, **runs: Callable[[], Any]) -> dict[str, float]:
    """Median time of each function, all called once a round."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in runs}
    for round_number in range(-2, rounds):
        for name, run in runs.items():
            start = clock()
            run()
            if round_number >= 0:  # two rounds to warm up
                times[name].append((clock() - start) * 1e3)
    return {name: statistics.median(taken) for name, taken in times.items()}


def linear_case(tokens: int, inputs: int, outputs: int, dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    """Forward and backward of one linear."""
    generator = torch.Generator().manual_seed(0)
    x, w, dy = (
        torch.randn(shape, generator=generator).to(dtype)
        for shape in ((tokens, inputs), (outputs, inputs), (tokens, outputs))
    )
    x.requires_grad_()
    w.requires_grad_()

    codes = quantize_weight(w, PLAN)

    def step(linear: Callable[[], Tensor]) -> None:
        x.grad = w.grad = None
        linear().backward(dy)

    medians = medians_ms(
        rounds,
        plain_ms=lambda: step(lambda: torch.nn.functional.linear(x, w)),
        emulated_ms=lambda: step(lambda: emulated_linear(x, w, None, PLAN)),
        reused_ms=lambda: step(lambda: emulated_linear(x, w, None, PLAN, codes)),
    )
    return {"inputs": inputs, "outputs": outputs, **medians}


def ratios(cases: list[dict[str, Any]]) -> dict[str, float]:
    """Emulated time, with and without known weight codes, over plain time; of the sums over all cases."""
    total = {name: sum(case[name] for case in cases) for name in ("plain_ms", "emulated_ms", "reused_ms")}
    return {name: total[f"{name}_ms"] / total["plain_ms"] for name in ("emulated", "reused")}


def print_table(cases: list[dict[str, Any]]) -> None:
    """One line per linear, and the ratio over all."""
    print(f"{'inputs':>8}{'outputs':>9}{'plain':>9}{'emulated':>10}{'ratio':>7}{'reused':>9}{'ratio':>7}")
    for case in cases:
        ratio = ratios([case])
        print(
            f"{case['inputs']:>8}{case['outputs']:>9}{case['plain_ms']:>9.2f}{case['emulated_ms']:>10.2f}"
            f"{ratio['emulated']:>7.2f}{case['reused_ms']:>9.2f}{ratio['reused']:>7.2f}"
        )
    total = ratios(cases)
    print(f"{'all':>8}{'':>28}{total['emulated']:>7.2f}{'':>9}{total['reused']:>7.2f}")


RECIPES = {
    "tensorwise": tensorwise.build("hybrid"),
    "delayed": delayed.build("hybrid"),
    "blockwise": blockwise.build("e4m3"),
    "mxfp8": mxfp8.build("e4m3"),
    "nvfp4": nvfp4.build("e2m1"),
}


def rules_of(recipe: LinearRecipe) -> dict[OperandRule, str]:
    """Each rule of a recipe, with the first operand that it is for."""
    found: dict[OperandRule, str] = {}
    for operand, _, rule in recipe.rules:
        found.setdefault(rule, operand.value)
    return found


def casts_of(x: Tensor, rule: OperandRule) -> tuple[Callable[[], Quantized], Callable[[Quantized], Tensor]]:
    """Quantizing a matrix by a rule, and dequantizing it to the type that it has."""
    is_delayed = rule.scale_rule is ScaleRule.DELAYED
    scale = DelayedScale(x.new_ones((), dtype=torch.float32), x.new_zeros((), dtype=torch.float32))
    generator = torch.Generator(x.device).manual_seed(0) if rule.is_stochastic else None
    return (
        lambda: quantize(x, rule, delayed=scale if is_delayed else None, generator=generator),
        lambda quantized: dequantize(quantized, x.dtype),
    )


def cast_cases(x: Tensor, medians: Callable[..., dict[str, float]]) -> list[dict[str, Any]]:
    """Times and ratios for every recipe and rule; `medians` times them all in turn with the copy."""
    rules = [(name, operand, rule) for name, recipe in RECIPES.items() for rule, operand in rules_of(recipe).items()]
    runs: dict[str, Callable[[], Any]] = {"copy": x.clone}
    for number, (_, _, rule) in enumerate(rules):
        cast, back = casts_of(x, rule)
        runs |= {f"quantize {number}": cast, f"dequantize {number}": functools.partial(back, cast())}
    ms = medians(**runs)
    return [
        {
            "recipe": name, "operand": operand, "format": rule.format.name,
            "block": "tensor" if rule.block is None else "{} x {}".format(*rule.block), "extras": rule.extras,
            "copy_ms": ms["copy"], "quantize_ms": ms[f"quantize {number}"],
            "dequantize_ms": ms[f"dequantize {number}"],
            "ratio": (ms[f"quantize {number}"] + ms[f"dequantize {number}"]) / ms["copy"],
        }
        for number, (name, operand, rule) in enumerate(rules)
    ]  # fmt: skip


def print_casts(cases: list[dict[str, Any]]) -> None:
    """One line a rule."""
    header = ("recipe", "operand", "format", "block", "", "quantize ms", "dequantize ms", "both / copy")
    keys = ("recipe", "operand", "format", "block", "extras", "quantize_ms", "dequantize_ms", "ratio")
    print(f"copy: {cases[0]['copy_ms']:.3g} ms")
    print(timing.format_table(header, [[case[key] for key in keys] for case in cases]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048, help="rows of the activations")
    parser.add_argument("--matrix", type=int, default=4096, help="rows and columns of the matrix that is cast")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="type of parameters and activations")
    parser.add_argument("--rounds", type=int, default=15, help="timed repetitions; medians are reported")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtype = DTYPES[options.dtype]

    print(f"linear forward + backward, {options.tokens} tokens, {options.dtype}, {options.threads} thread(s), ms")
    linears = [linear_case(options.tokens, *shape, dtype, options.rounds) for shape in SHAPES]
    print_table(linears)
    matrix = torch.randn(options.matrix, options.matrix, generator=torch.Generator().manual_seed(0)).to(dtype)
    casts = cast_cases(matrix, functools.partial(medians_ms, options.rounds))
    print(f"a matrix of {options.matrix} x {options.matrix}, {options.dtype}, {options.threads} thread(s)")
    print_casts(casts)
    if options.json:
        settings = {**vars(options), "json": str(options.json)}
        result = {"options": settings, "linears": linears, "ratios": ratios(linears), "casts": casts}
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
