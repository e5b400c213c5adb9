"""Bias and mean square error of a linear's gradients under NVFP4 and its newer forms, on tensors of a trained model.

    python benchmarks/gradient_error.py [--steps 60] [--draws 16] [--json FILE]

A small model is trained on real text. Inputs, weights and output gradients of all its linears are taken from one step
after that, and each recipe computes the two gradients of each linear several times, with other random numbers. All
numbers are squared norms relative to the exact gradient's, as means over the linears:

    forward   error of the product of fprop
    mse       squared error of one draw of a gradient: to the gradient of the unquantized operands
    bias      squared error of the mean of many draws: to the same, and to the gradient of the forward pass as it was
              computed, whose weight and input are quantized (`own`). It is estimated without the variance that is left
              in a mean of few draws, and may come out slightly negative
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import stdlib_text
from benchmarks.in_process import end_runs, start_run
from megafp8.checkpoint.progress import Progress
from megafp8.models.emulated_layers import emulated_linears
from megafp8.quantization.linear import emulated_linear
from megafp8.quantization.linear_plan import LinearPlan
from megafp8.quantization.nvfp4 import RoundingNoise
from megafp8.quantization.quantize import dequantize
from megafp8.quantization.quantized_tensor import Quantized
from megafp8.recipes import nvfp4, quartet2
from megafp8.recipes.base import Gemm, LinearRecipe, Operand
from megafp8.training.evaluation import build_batches
from megafp8.training.step import train_step

RECIPES = {
    "nvfp4, all to nearest": nvfp4.build("e2m1", fp4_hadamard=False, fp4_stochastic_rounding=False),
    "nvfp4": nvfp4.build("e2m1"),
    "nvfp4, four-over-six": nvfp4.build("e2m1", fp4_four_over_six=True),
    "quartet2": quartet2.build("e2m1"),
}
TRAINING = (
    "--bf16 --fp8-format e4m3 --fp8-recipe mxfp8 --micro-batch-size 16 --global-batch-size 16 --lr 1.5e-3 "
    "--lr-decay-style constant --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --eval-iters 0 --num-threads 1 "
    "--num-workers 0 --no-progress-bar --seed 1"
)
Operands = dict[Operand, Tensor]


def tensors_after(steps: int, data: Path) -> dict[str, Operands]:
    """The operands of all linears in the step after `steps`, FP32, as rows."""
    shards = f"--data-path {data / 'stdlib_text_document'} --split 90,10,0 --data-cache-path {data / 'cache'}"
    words = [stdlib_text.MODEL, TRAINING, f"--train-iters {steps + 1}", shards, *stdlib_text.tokenizer_flags(data)]
    run = start_run(" ".join(words))
    batches = build_batches(run, run.datasets[0], 0, (steps + 1) * run.global_batch_size, num_workers=0)
    for step in range(steps):
        train_step(run, batches, Progress(step))
    found: dict[str, Operands] = {}
    for index, linear in enumerate(emulated_linears(run.training_state.chunks)):
        operands = found.setdefault(f"{index} {type(linear).__name__}", {})

        def keep(
            operand: Operand, tensor: Tensor, codes: Mapping[Gemm, Quantized], stored: Operands = operands
        ) -> None:
            stored[operand] = tensor.detach().reshape(-1, tensor.shape[-1]).float().clone()

        linear.observer = keep
    train_step(run, batches, Progress(steps))
    end_runs()
    return found


def square(values: Tensor) -> float:
    """Squared norm."""
    return values.double().square().sum().item()


def errors_of(recipe: LinearRecipe, operands: Operands, draws: int) -> dict[str, float]:
    """The measures of one linear."""
    x, w, dy = (operands[operand] for operand in (Operand.INPUT, Operand.WEIGHT, Operand.GRAD_OUTPUT))
    plan = LinearPlan(recipe=recipe, noise=RoundingNoise("gradient error") if recipe.is_stochastic else None)
    forward_x, forward_w = (
        dequantize(plan.quantize(tensor, operand, Gemm.FPROP))
        for tensor, operand in ((x, Operand.INPUT), (w, Operand.WEIGHT))
    )
    exact = {"dgrad": dy @ w, "wgrad": dy.t() @ x}
    own = {"dgrad": dy @ forward_w, "wgrad": dy.t() @ forward_x}
    y = x @ w.t()
    found = {"forward": square(forward_x @ forward_w.t() - y) / square(y)}
    all_draws = [gradients(x, w, dy, plan) for _ in range(draws)]
    for name, reference in exact.items():
        samples, size = torch.stack([each[name] for each in all_draws]), square(reference)
        mean = samples.mean(0)
        variance = square(samples - mean) / max(draws - 1, 1)  # of one draw, all elements together
        found[f"{name} mse"] = square(samples - reference) / draws / size
        found[f"{name} bias"] = (square(mean - reference) - variance / draws) / size
        found[f"{name} bias, own"] = (square(mean - own[name]) - variance / draws) / size
    return found


def gradients(x: Tensor, w: Tensor, dy: Tensor, plan: LinearPlan) -> dict[str, Tensor]:
    """One draw of both gradients."""
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    emulated_linear(x, w, None, plan).backward(dy)
    assert x.grad is not None and w.grad is not None
    return {"dgrad": x.grad, "wgrad": w.grad}


def table(results: Mapping[str, Mapping[str, float]]) -> str:
    """In Markdown, in thousandths."""
    columns = list(next(iter(results.values())))
    lines = [f"| recipe | {' | '.join(columns)} |", "|---|" + "---:|" * len(columns)]
    lines += [
        f"| {name} | {' | '.join(f'{1000 * errors[column]:.2f}' for column in columns)} |"
        for name, errors in results.items()
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="of training before the tensors are taken")
    parser.add_argument("--draws", type=int, default=16, help="of random numbers")
    parser.add_argument("--data", type=Path, default=Path("runs/gradient_error/data"), help="folder of the text")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args(argv)
    stdlib_text.prepare_data(arguments.data)
    linears = tensors_after(arguments.steps, arguments.data)
    results: dict[str, dict[str, float]] = {}
    for name, recipe in RECIPES.items():
        errors = [errors_of(recipe, operands, arguments.draws) for operands in linears.values()]
        results[name] = {key: sum(each[key] for each in errors) / len(errors) for key in errors[0]}
    print(f"{len(linears)} linears, {arguments.steps} steps, {arguments.draws} draws; in thousandths\n")
    print(table(results))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
