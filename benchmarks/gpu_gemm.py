"""Every GEMM of a model on this GPU: BF16, FP8, and FP8 with what quantizes for it: the speedup to expect of training.

    python benchmarks/gpu_gemm.py --json FILE -- --model-preset llama3-8b --seq-length 4096 --micro-batch-size 2 \\
        --tensor-model-parallel-size 4 --sequence-parallel --world-size 4
    python benchmarks/gpu_gemm.py --shapes A B C --recipes bf16 tensorwise delayed blockwise --json FILE

After `--` come flags of `pretrain_gpt.py`: the model, the microbatch and the layout, whose GEMMs on one rank are timed;
`--shapes` are those of `gpu_train.py`. The products are Transformer Engine's own calls: fprop with fast accumulation,
dgrad and wgrad split, weight gradients in FP32; the output layer in BF16 as in training. Quantizing is that of input
and gradient (both orientations, once a microbatch) and of the weight (once a step). Alone, without the norm or the
activation that some of it is fused with.

Times are of the GPU, by events, medians over rounds in which all candidates take turns; the L2 cache is flushed before
each, and the GPU kept busy while the host starts the kernels. The floor is the larger of the FLOPs at the peak and the
bytes at the memory's bandwidth. GEMMs alone run at a higher clock than in a step, where the GPU is at its power limit.
The last columns are the planner's (`megafp8/planning/`), which `--dry-run` uses.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import timing
from benchmarks.gpu_train import SHAPES
from megafp8.config import dimensions, flags, model_shapes, topology
from megafp8.config.precision_map import GEMMS, OUTPUT_LAYER
from megafp8.device.gpus import GPUS, Gpu, find_gpu
from megafp8.errors import ConfigError
from megafp8.planning import compute, plan
from megafp8.planning.fit import grad_output_rows, linear_casts_s
from megafp8.planning.planned_run import LinearGemm, PlannedRun, layer_gemms, output_layer_gemms

NATIVE = ("bf16", "tensorwise", "delayed", "blockwise")
OPERANDS = ("input", "grad_output", "weight")
FLUSHED_BYTES = 256 * 2**20
BUSY_CYCLES = 400_000  # about 0.2 ms, in which the host starts what is measured
WGRAD_BYTES = 4


@dataclass(frozen=True)
class Cast:
    """A tensor that is quantized, in both orientations.

    Attributes:
        operand: `input`, `grad_output` or `weight`.
    """

    operand: str
    rows: int
    columns: int


Candidate = tuple[str, "LinearGemm | Cast"]
"""Recipe, and what of it is timed."""
Times = dict[Candidate, float]
"""Microseconds."""


@dataclass(frozen=True)
class Model:
    """The GEMMs of one rank of a model.

    Attributes:
        layers: of the rank.
        microbatches: of a step.
    """

    name: str
    run: PlannedRun
    layers: int
    microbatches: int

    @property
    def linears(self) -> list[model_shapes.GemmDimensions]:
        """Of a layer."""
        return model_shapes.gemm_dimensions(self.run.config)

    def products(self, linear: str) -> list[LinearGemm]:
        """Fprop, dgrad, wgrad."""
        return [p for p in (*layer_gemms(self.run), *output_layer_gemms(self.run)) if p.linear == linear]

    def casts(self, linear: model_shapes.GemmDimensions) -> dict[str, Cast]:
        """What a linear quantizes."""
        return {
            "input": Cast("input", linear.rows, linear.in_features),
            "grad_output": Cast("grad_output", grad_output_rows(self.run, linear), linear.out_features),
            "weight": Cast("weight", linear.out_features, linear.in_features),
        }

    def candidates(self, recipes: Iterable[str]) -> list[Candidate]:
        """All that is timed; nothing twice."""
        found: list[Candidate] = [("bf16", product) for product in self.products(OUTPUT_LAYER)]
        for recipe in recipes:
            for linear in self.linears:
                found += [(recipe, product) for product in self.products(linear.name)]
                found += [(recipe, cast) for cast in self.casts(linear).values() if recipe != "bf16"]
        return list(dict.fromkeys(found))


def model_of(name: str, text: Sequence[str], gpu: Gpu) -> Model:
    """A model from flags of `pretrain_gpt.py`.

    Raises:
        ConfigError: they cannot be read, or say too little.
    """
    parsed, problems = flags.parse_with_problems([*text])
    world_size = parsed.world_size or topology.model_parallel_size(parsed.config)
    vocabulary = plan.vocabulary_size(parsed.config)
    if vocabulary is None:
        problems.append("give --vocab-size, or a preset that has one")
    for flag, value in (("--seq-length", parsed.config.data.seq_length),
                        ("--micro-batch-size", parsed.config.training.micro_batch_size)):  # fmt: skip
        if value is None:
            problems.append(f"give {flag}")
    if problems:
        raise ConfigError(problems)
    config = parsed.config
    padded = dimensions.padded_vocab_size(config, vocabulary or 0)
    run = PlannedRun(config=config, gpu=gpu, world_size=world_size, padded_vocab=padded)
    return Model(name, run, len(run.sizes.layers[0]), run.sizes.num_microbatches)


# ---- what the times come to ---------------------------------------------------------------------------------------


def floor_us(gpu: Gpu, recipe: str, product: LinearGemm) -> float:
    """No GEMM of this product can be faster."""
    result_bytes = WGRAD_BYTES if product.kind == "wgrad" else compute.BF16_BYTES
    read = compute.bytes_per_element(recipe) * product.k * (product.m + product.n)
    num_bytes = read + result_bytes * product.m * product.n
    peak = gpu.peak.flops["bf16" if recipe == "bf16" else "fp8"]
    return 1e6 * max(product.flops / peak, num_bytes / gpu.hbm_bytes_per_s)


@dataclass(frozen=True, kw_only=True)
class LinearRow:
    """One linear under one recipe, a microbatch; microseconds.

    Attributes:
        gemm_us: of the three products.
        floor_us: the same.
        casts_us: of quantizing, the weight's by its share.
        speed: to BF16, quantizing included.
        planned_speed: the planner's.
    """

    model: str
    linear: str
    recipe: str
    sizes: str
    gemm_us: dict[str, float]
    tflops: dict[str, float]
    floor_us: float
    casts_us: float
    gemm_speed: float
    speed: float
    planned_speed: Optional[float]


def linear_row(model: Model, times: Times, recipe: str, linear: model_shapes.GemmDimensions) -> LinearRow:
    """What was measured of a linear."""
    products = model.products(linear.name)
    of_recipe = {product.kind: times[recipe, product] for product in products}
    bf16_us, gemm_us = sum(times["bf16", product] for product in products), sum(of_recipe.values())
    casts_us = 0.0
    if recipe != "bf16":
        shares = {"input": 1.0, "grad_output": 1.0, "weight": 1.0 / model.microbatches}
        casts_us = sum(share * times[recipe, model.casts(linear)[name]] for name, share in shares.items())
    return LinearRow(
        model=model.name, linear=linear.name, recipe=recipe,
        sizes=f"{model.run.sizes.tokens} x {linear.in_features} to {linear.out_features}",
        gemm_us=of_recipe, tflops={p.kind: p.flops / of_recipe[p.kind] / 1e6 for p in products},
        floor_us=sum(floor_us(model.run.gpu, recipe, product) for product in products), casts_us=casts_us,
        gemm_speed=bf16_us / gemm_us, speed=bf16_us / (gemm_us + casts_us),
        planned_speed=planned(model, recipe, linear),
    )  # fmt: skip


def planned(model: Model, recipe: str, linear: model_shapes.GemmDimensions) -> float:
    """The planner's speed of a linear to BF16."""
    run, products = model.run, model.products(linear.name)
    bf16_s, fp8_s = (
        sum(compute.gemm_s(run, name, *product.shape) for product in products) for name in ("bf16", recipe)
    )
    return bf16_s / (fp8_s + linear_casts_s(run, recipe, linear))


def rows_of(model: Model, times: Times, recipes: Iterable[str]) -> list[LinearRow]:
    """Every linear under every recipe."""
    return [linear_row(model, times, recipe, linear) for linear in model.linears for recipe in recipes]


def step_totals(model: Model, times: Times, rows: Sequence[LinearRow], recipe: str) -> dict[str, float]:
    """All GEMMs of a rank in a step, milliseconds, and how many times as fast as in BF16."""
    repeats = model.layers * model.microbatches / 1e3
    output_ms = sum(times["bf16", product] for product in model.products(OUTPUT_LAYER)) * model.microbatches / 1e3

    def of_layers(name: str, with_casts: bool) -> float:
        mine = [row for row in rows if row.recipe == name]
        return repeats * sum(sum(row.gemm_us.values()) + with_casts * row.casts_us for row in mine)

    bf16_ms, gemm_ms, all_ms = of_layers("bf16", False), of_layers(recipe, False), of_layers(recipe, True)
    return {
        "layers_gemm_ms": gemm_ms, "layers_casts_ms": all_ms - gemm_ms, "output_layer_ms": output_ms,
        "layers_speed": bf16_ms / all_ms, "step_gemm_speed": (bf16_ms + output_ms) / (all_ms + output_ms),
    }  # fmt: skip


def report(model: Model, times: Times, recipes: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Tables for people, and the same for programs."""
    rows = rows_of(model, times, recipes)
    header = ("linear", "recipe", *(f"{gemm} us (TFLOP/s)" for gemm in GEMMS), "casts us", "floor us", "GEMMs to BF16",
              "with casts", "planned")  # fmt: skip
    cells = [
        (f"{row.linear} {row.sizes}", row.recipe,
         *(f"{row.gemm_us[gemm]:.0f} ({row.tflops[gemm]:.0f})" for gemm in GEMMS), row.casts_us, row.floor_us,
         row.gemm_speed, row.speed, row.planned_speed)
        for row in rows
    ]  # fmt: skip
    totals = {recipe: step_totals(model, times, rows, recipe) for recipe in recipes}
    of_step = ("GEMMs of a step", "layers ms", "casts ms", "output layer ms", "layers to BF16", "all to BF16")
    step = timing.format_table(of_step, [(recipe, *total.values()) for recipe, total in totals.items()])
    text = f"{timing.format_table(header, cells)}\n\n{step}"
    return text, {"model": model.name, "linears": rows, "totals": totals}


# ---- on the GPU ---------------------------------------------------------------------------------------------------


class OnGpu:
    """Runs and times candidates on this GPU."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.flushed = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device="cuda")

    def gpu(self) -> Gpu:
        """This GPU, as the planner knows it; else the H200's peaks."""
        return find_gpu(self.torch.cuda.get_device_name()) or GPUS["h200"]

    def measure(self, candidates: Sequence[Candidate], rounds: int) -> Times:
        """Medians. Tensors are made for a few candidates at a time: those of one product or cast."""
        found: Times = {}
        for work in dict.fromkeys(work for _, work in candidates):
            runs = {recipe: self.prepare(recipe, work) for recipe, of_work in candidates if of_work == work}
            times = timing.take_turns(runs, rounds=rounds, warmup=3, times_ms=self.times_ms)
            found |= {(recipe, work): 1e3 * side.median_wall_ms for recipe, side in times.items()}
            del runs
            self.torch.cuda.empty_cache()
        return found

    def times_ms(self, run: Callable[[], Any]) -> tuple[float, float]:
        """Time on the GPU, in both places of `take_turns`."""
        events = [self.torch.cuda.Event(enable_timing=True) for _ in range(2)]
        self.flushed.zero_()
        self.torch.cuda._sleep(BUSY_CYCLES)
        events[0].record()
        run()
        events[1].record()
        self.torch.cuda.synchronize()
        return (events[0].elapsed_time(events[1]),) * 2

    def numbers(self, rows: int, columns: int) -> Any:
        """A BF16 matrix of normal numbers: products of zeros run at a higher clock."""
        return self.torch.randn(rows, columns, dtype=self.torch.bfloat16, device="cuda")

    def prepare(self, recipe: str, work: LinearGemm | Cast) -> Callable[[], Any]:
        """A function that does it once, on operands that are there."""
        if isinstance(work, Cast):
            source, quantizer = self.numbers(work.rows, work.columns), self.quantizer(recipe, work.operand)
            return lambda: quantizer(source)
        return self.product(recipe, work)

    def product(self, recipe: str, product: LinearGemm) -> Callable[[], Any]:
        """A product as Transformer Engine's linears start it."""
        from transformer_engine.pytorch.cpp_extensions import general_gemm

        torch, rows, columns, summed = self.torch, *product.shape
        # (first operand, its shape), (second operand, its shape), layout, result
        first, second, layout = {
            "fprop": (("weight", columns, summed), ("input", rows, summed), "TN"),
            "dgrad": (("weight", summed, columns), ("grad_output", rows, summed), "NN"),
            "wgrad": (("input", summed, columns), ("grad_output", summed, rows), "NT"),
        }[product.kind]
        operands = []
        for name, *shape in (first, second):
            matrix = self.numbers(*shape)
            operands.append(matrix if recipe == "bf16" else self.quantizer(recipe, name)(matrix))
        dtype = torch.float32 if product.kind == "wgrad" else torch.bfloat16
        result = torch.empty(rows, columns, dtype=dtype, device="cuda")
        is_split = recipe == "blockwise" or product.kind != "fprop"
        return lambda: general_gemm(
            *operands, out_dtype=dtype, layout=layout, out=result, use_split_accumulator=is_split,
            grad=product.kind != "fprop",
        )  # fmt: skip

    def quantizer(self, recipe: str, operand: str) -> Any:
        """As the recipe has it, for both orientations."""
        from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
        from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer
        from transformer_engine_torch import DType

        is_e5m2 = operand == "grad_output" and recipe != "blockwise"
        kind, device = DType.kFloat8E5M2 if is_e5m2 else DType.kFloat8E4M3, self.torch.device("cuda")
        if recipe == "blockwise":
            dimensions = 2 if operand == "weight" else 1
            return Float8BlockQuantizer(kind, rowwise=True, columnwise=True, block_scaling_dim=dimensions)
        if recipe == "tensorwise":
            return Float8CurrentScalingQuantizer(kind, device)
        scale, amax = self.torch.full((1,), 16.0, device=device), self.torch.zeros(1, device=device)
        return Float8Quantizer(scale, amax, kind)


def parse_models(parser: argparse.ArgumentParser, argv: Optional[Sequence[str]]) -> argparse.Namespace:
    """Read a command line that names models, beside what the parser takes already; `models` has their flags by name."""
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=[], help="models and batches of gpu_train.py")
    parser.add_argument("--rounds", type=int, default=15, help="times that each candidate is timed")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("flags", nargs="*", metavar="-- FLAG", help="of pretrain_gpt.py: model, microbatch, layout")
    options = parser.parse_args(argv)
    options.models = {shape: shlex.split(SHAPES[shape]) for shape in options.shapes}
    if options.flags:
        options.models[" ".join(options.flags)] = options.flags
    if not options.models:
        parser.error("give --shapes, or flags of pretrain_gpt.py after --")
    return options


def parse(argv: Optional[Sequence[str]] = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipes", nargs="+", choices=NATIVE, default=list(NATIVE), help="beside BF16")
    options = parse_models(parser, argv)
    options.recipes = ["bf16", *(recipe for recipe in options.recipes if recipe != "bf16")]
    return options


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Time, and print."""
    options = parse(argv)
    device = OnGpu()
    gpu = device.gpu()
    results, measured = [], []
    for name, text in options.models.items():
        model = model_of(name, text, gpu)
        times = device.measure(model.candidates(options.recipes), options.rounds)
        text, result = report(model, times, options.recipes)
        print(
            f"\n{name}: {model.layers} layers of {model.run.sizes.tokens} tokens, {model.microbatches} microbatches, "
            f"{device.torch.cuda.get_device_name()}\n{text}",
            flush=True,
        )
        results.append(result)
        measured += [{"recipe": recipe, **vars(work), "us": us} for (recipe, work), us in times.items()]
        if options.json:
            timing.write_json(options.json, {"gpu": gpu.name, "results": results, "times": measured})
    return 0


if __name__ == "__main__":
    sys.exit(main())
