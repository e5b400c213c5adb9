"""Experts of a mixture on one GPU, forward and backward: BF16 and FP8, against Transformer Engine's grouped linears.

    python benchmarks/gpu_experts.py [--shape M1] [--rounds 3] [--profile] [--json FILE]

Router and attention are left out. Gather, SwiGLU, the sum of a token's rows and all six GEMMs are timed, with wgrad
added to an FP32 buffer; weights are cast once for every 8 calls. Modes alternate; the result is the median over rounds
of the time of `CALLS` calls between two synchronizations. `graph` replays a CUDA graph of the call. Transformer Engine
has its tokens gathered by the same kernel, and reads the group sizes on the host.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch
from torch import Tensor

from benchmarks import timing
from megafp8.kernels import expert_casts, expert_wgrad
from megafp8.kernels.expert_wgrad import Operand
from megafp8.kernels.rounding import format_spec
from megafp8.kernels.routed_rows import RoutedRows, route, values_of_rows
from megafp8.models import grouped_experts
from megafp8.quantization import grouped_linear
from megafp8.recipes.formats import E4M3, E5M2, Format

CALLS, MICROBATCHES = 8, 8


class Shape(NamedTuple):
    hidden: int
    ffn: int
    experts: int
    top_k: int
    tokens: int


SHAPES = {
    "M1": Shape(2048, 768, 128, 8, 16384),
    "M2": Shape(2048, 768, 16, 8, 16384),
    "M3": Shape(4096, 14336, 8, 2, 8192),
    "tiny": Shape(256, 128, 8, 2, 256),
}


class Layer:
    """Weights, tokens and a routing of one shape."""

    def __init__(self, shape: Shape):
        torch.manual_seed(0)
        self.shape = shape
        self.fc1 = self.weight(shape.experts, 2 * shape.ffn, shape.hidden)
        self.fc2 = self.weight(shape.experts, shape.hidden, shape.ffn)
        self.inputs = torch.randn(shape.tokens, shape.hidden, device="cuda").bfloat16().requires_grad_()
        scores = torch.randn(shape.tokens, shape.experts, device="cuda") * 0.5
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, scores.topk(shape.top_k).indices, True)
        self.chosen = chosen
        self.probs = torch.where(chosen, scores, -torch.inf).softmax(1).requires_grad_()
        self.rows = route(chosen, shape.top_k)
        self.grad = torch.randn(shape.tokens, shape.hidden, device="cuda").bfloat16()

    @staticmethod
    def weight(*sizes: int) -> Tensor:
        weight = (torch.randn(*sizes, device="cuda") * sizes[-1] ** -0.5).bfloat16().requires_grad_()
        weight.main_grad = torch.zeros(sizes, device="cuda")  # type: ignore[attr-defined]
        return weight

    def codes(self, gradients: Format = E4M3) -> grouped_experts.ExpertCodes:
        specs = format_spec(E4M3), format_spec(gradients)
        return grouped_experts.cast_weights(self.fc1.detach(), self.fc2.detach(), specs[0], gradient_spec=specs[1])

    def ours(self, codes: Optional[grouped_experts.ExpertCodes], with_routing: bool = True) -> Tensor:
        """One forward and backward pass."""
        self.inputs.grad = self.probs.grad = None
        rows = route(self.chosen, self.shape.top_k) if with_routing else self.rows
        result = grouped_experts.experts(self.inputs, self.probs, self.fc1, self.fc2, self.chosen, rows, codes)
        result.backward(self.grad)
        return result

    def flops(self) -> float:
        return 18.0 * self.shape.tokens * self.shape.top_k * self.shape.hidden * self.shape.ffn


class Peer:
    """Transformer Engine's grouped linears on the same rows."""

    def __init__(self, layer: Layer, recipe: str):
        import transformer_engine.pytorch as te
        from transformer_engine.common import recipe as recipes

        shape, self.layer, self.te = layer.shape, layer, te
        settings = {"params_dtype": torch.bfloat16, "bias": False, "fuse_wgrad_accumulation": True, "device": "cuda"}
        self.fc1 = te.GroupedLinear(shape.experts, shape.hidden, 2 * shape.ffn, **settings)
        self.fc2 = te.GroupedLinear(shape.experts, shape.ffn, shape.hidden, **settings)
        for weight in (*self.fc1.parameters(), *self.fc2.parameters()):
            weight.main_grad = torch.zeros(weight.shape, device="cuda")  # type: ignore[attr-defined]
        self.recipe = {
            "bf16": None, "delayed": recipes.DelayedScaling(), "tensorwise": recipes.Float8CurrentScaling(),
            "blockwise": recipes.Float8BlockScaling(),
        }[recipe]  # fmt: skip
        ends = layer.rows.ends.tolist()
        self.sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        self.live = ends[-1]
        self.calls = 0

    def step(self) -> Tensor:
        layer = self.layer
        layer.inputs.grad = layer.probs.grad = None
        first = self.calls % MICROBATCHES == 0
        self.calls += 1
        x = Gather.apply(layer.inputs, layer.rows)[: self.live]
        p = values_of_rows(layer.probs, layer.rows)[: self.live, None]
        with self.te.autocast(enabled=self.recipe is not None, recipe=self.recipe):
            h = self.fc1(x, self.sizes, is_first_microbatch=first)
            y = weighted_swiglu(h, p)
            z = self.fc2(y, self.sizes, is_first_microbatch=first)
        z = torch.nn.functional.pad(z, (0, 0, 0, len(layer.rows.token_of_row) - self.live))
        result = Sum.apply(z, layer.rows)
        result.backward(layer.grad)
        return result


@torch.compile
def weighted_swiglu(h: Tensor, p: Tensor) -> Tensor:
    a, b = h.chunk(2, 1)
    return (torch.nn.functional.silu(a.float()) * b.float() * p).to(h.dtype)


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, rows: RoutedRows) -> Tensor:
        ctx.rows = rows
        return expert_casts.gather(inputs, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return expert_casts.sum_rows(grad.contiguous(), ctx.rows), None


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, rows: RoutedRows) -> Tensor:
        ctx.rows = rows
        return expert_casts.sum_rows(inputs, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return expert_casts.gather(grad.contiguous(), ctx.rows), None


def captured(call: Callable[[], Any]) -> Callable[[], None]:
    """A replay of the call as a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def modes_of(layer: Layer, peers: Sequence[str]) -> dict[str, Callable[[], Any]]:
    """A call is one microbatch; the first of 8 casts the weights."""
    weights, hybrid = layer.codes(), layer.codes(E5M2)
    modes: dict[str, Callable[[], Any]] = {
        "bf16": lambda: layer.ours(None),
        "bf16 graph": captured(lambda: layer.ours(None)),
        "fp8": lambda: layer.ours(weights),
        "fp8 graph": captured(lambda: layer.ours(weights)),
        "hybrid graph": captured(lambda: layer.ours(hybrid)),
        "cast of weights": layer.codes,
    }
    for recipe in peers:
        try:
            peer = Peer(layer, recipe)
            peer.step()
            modes[f"TE {recipe}"] = peer.step
        except Exception as error:  # noqa: BLE001 - the others are still of interest
            print(f"TE {recipe} failed: {error!r:.300}", flush=True)
    return modes


def milliseconds(call: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3 / CALLS


def errors_of(layer: Layer) -> dict[str, float]:
    """Relative error of each result of FP8 and BF16 against FP32 on a few experts, and of FP8 GEMMs that accumulate
    fast against those that do not."""
    found = {}
    results = {}
    for name, codes in (("bf16", None), ("fp8", layer.codes())):
        for weight in (layer.fc1, layer.fc2):
            weight.main_grad.zero_()  # type: ignore[attr-defined]
        output = layer.ours(codes).detach()
        results[name] = {
            "output": output, "dinput": layer.inputs.grad, "dprobs": layer.probs.grad,
            "dfc1": layer.fc1.main_grad.clone(), "dfc2": layer.fc2.main_grad.clone(),  # type: ignore[attr-defined]
        }  # fmt: skip
    for part, reference in results["bf16"].items():
        found[f"fp8 to bf16: {part}"] = relative(results["fp8"][part], reference)
    codes, spec = layer.codes(), format_spec(E4M3)
    x = expert_casts.gather_codes(layer.inputs.detach(), layer.rows, layer.chosen, spec)
    dz = expert_casts.gather_codes(layer.grad, layer.rows, layer.chosen, spec)
    for name, gemm, operands in (
        ("fprop fc1", grouped_linear.fp8_fprop, (x, codes.fc1)),
        ("dgrad fc2", grouped_linear.fp8_dgrad, (dz, codes.fc2)),
        ("wgrad (hidden x hidden)", wgrad, (dz.transposed, x.transposed)),
    ):
        fast, split = (gemm(*operands, layer.rows, is_fast) for is_fast in (True, False))
        live = slice(0, int(layer.rows.ends[-1])) if name[0] != "w" else slice(None)
        found[f"fast to split: {name}"] = relative(fast[live], split[live])
        for how, is_fast in (("fast", True), ("split", False)):
            call = functools.partial(gemm, *operands, layer.rows, is_fast)
            found[f"ms {how}: {name}"] = milliseconds(call)
    return found


def wgrad(grad_output: Operand, inputs: Operand, rows: RoutedRows, is_fast: bool) -> Tensor:
    sizes = len(rows.ends), len(grad_output.codes), len(inputs.codes)  # type: ignore[union-attr]
    result = torch.empty(sizes, device="cuda")
    expert_wgrad.add_wgrad(result, grad_output, inputs, rows, is_fast=is_fast, is_overwritten=True)
    return result


def relative(one: Tensor, other: Tensor) -> float:
    return ((one.float() - other.float()).norm() / other.float().norm()).item()


def profile(name: str, call: Callable[[], Any]) -> None:
    """Kernel times of one call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    rows = sorted(found.key_averages(), key=lambda each: -each.device_time_total)[:22]
    print(f"\n{name}: {sum(each.device_time_total for each in found.key_averages()) / 1e3:.2f} ms of kernels")
    for each in rows:
        print(f"  {each.device_time_total / 1e3:7.3f} ms {each.count:4d} x {each.key[:110]}")


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Print a table of each shape."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["M1", "M2", "M3"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", nargs="*", default=["bf16", "delayed"])
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    results = {}
    header = ("shape", "mode", "ms", "TFLOP/s", "speed to bf16 graph")
    for shape in options.shape:
        layer = Layer(SHAPES[shape])
        for what, value in errors_of(layer).items():
            print(f"{shape} {what}: {value:.4g}", flush=True)
        modes = modes_of(layer, options.peers)
        times: dict[str, list[float]] = {name: [] for name in modes}
        for number in range(options.rounds + 1):
            for name in list(modes) if number % 2 else reversed(modes):
                taken = milliseconds(modes[name])
                if number:
                    times[name].append(taken)
        medians = {name: statistics.median(values) for name, values in times.items()}
        results[shape] = times
        cells = [
            (shape, name, taken, layer.flops() / taken / 1e9, medians["bf16 graph"] / taken)
            for name, taken in medians.items()
        ]
        print(timing.format_table(header, cells), flush=True)
        if options.profile:
            for name in ("bf16", "fp8"):
                profile(f"{shape} {name}", modes[name])
        del layer, modes
        torch.cuda.empty_cache()
    if options.json:
        timing.write_json(options.json, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
