"""Ranges of `--profile`: in the trace of a run, in the profiled steps alone, and without effect on the training."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Optional

import pytest
import torch
from forked_runs import run_forked
from ranks import run_ranks
from small_run import COMMON, FP8, STYLES, VIRTUAL, build_run, fingerprint, small_config, train, weights
from torch import nn

from megafp8.analysis.runs import load_run
from megafp8.cli import report
from megafp8.metrics.timers import StepTimer
from megafp8.training.extensions import profiler, profiler_ranges
from megafp8.training.extensions.profiler import Profiler
from megafp8.training.extensions.profiler_ranges import _add_ranges, named_ranges, ranged_modules
from megafp8.training.run import Run

STEPS = 4
EMULATED = f"--bf16 --transformer-impl emulated {FP8}"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
EXPERTS = (
    "--transformer-impl local --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 "
    "--moe-token-dispatcher-type alltoall"
)


class Opened:
    """Counts the ranges that are opened, and checks that the inner one is closed first."""

    def __init__(self) -> None:
        self.names, self.stack = Counter[str](), list[str]()

    def __call__(self, name: str) -> Opened:
        self.entering = name
        return self

    def __enter__(self) -> None:
        self.names[self.entering] += 1
        self.stack.append(self.entering)

    def __exit__(self, *error: object) -> None:
        self.stack.pop()


def num_hooks(run: Run) -> int:
    modules = [module for chunk in run.training_state.chunks for module in chunk.modules()]
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in modules)


def trained(flags: str, has_ranges: bool, world_size: int = 1) -> tuple[Any, str, Optional[Counter[str]]]:
    """Losses and gradient norms, weights, and the ranges of the third step."""
    run, opened = build_run(small_config("llama", flags, world_size)), Opened()
    if not has_ranges:
        return train(run, STEPS), fingerprint(weights(run)), None
    before, curves = num_hooks(run), [train(run, 2)]
    with named_ranges(run.training_state.chunks, run.timer, opened):
        curves.append(train(run, 1, first_step=3))
    assert not opened.stack and num_hooks(run) == before
    found = Counter(opened.names)
    curves.append(train(run, 1, first_step=4))
    assert opened.names == found  # none outside
    losses = [values for curve in curves for values in zip(curve.losses, curve.grad_norms, strict=True)]
    return losses, fingerprint(weights(run)), found


@pytest.mark.parametrize(
    ("flags", "world_size"),
    [("", 1), (EMULATED, 1), (f"{EMULATED} {RECOMPUTE}", 1), (EXPERTS, 1), (VIRTUAL, 2)],
    ids=["fp32", "fp8", "recompute", "experts", "pipeline"],
)
def test_training_is_bitwise_the_same_and_every_module_has_its_ranges(flags: str, world_size: int) -> None:
    plain = run_ranks(world_size, trained, flags, False, world_size)
    ranged = run_ranks(world_size, trained, flags, True, world_size)
    names = Counter[str]()
    for (curve, bits, _), (losses, ranged_bits, found) in zip(plain, ranged, strict=True):
        assert losses == list(zip(curve.losses, curve.grad_norms, strict=True)) and ranged_bits == bits
        names += found
    linears = ["linear_qkv", "linear_proj", *([] if "experts" in flags else ["linear_fc1", "linear_fc2"])]
    num_microbatches = 8 // (2 if world_size > 1 else 4)
    num_forward = num_microbatches * (2 if "recompute" in flags else 1)
    for layer in range(4 if world_size > 1 else 2):
        for linear in linears:
            assert names[f"layers.{layer}.{linear} fprop"] == num_forward
            assert names[f"layers.{layer}.{linear} backward"] >= num_microbatches
        for other in ("attention", "input_layernorm", "pre_mlp_layernorm", "q_layernorm", "k_layernorm", "mlp"):
            assert names[f"layers.{layer}.{other} forward"] == num_forward
            assert names[f"layers.{layer}.{other} backward"] >= num_microbatches
    for other in ("embedding", "final_layernorm", "output_layer"):
        assert names[f"{other} forward"] == num_microbatches and names[f"{other} backward"] >= num_microbatches
    assert names["forward-backward"] == names["optimizer"] == world_size


def test_a_nested_module_has_nodes_of_its_own_once() -> None:
    """The backward pass of an inner module is not also that of the outer one, and no leaf is in any."""
    inner = nn.Linear(4, 4)
    outer = nn.Sequential(inner, nn.SiLU())
    opened = Opened()
    for name, module in (("outer forward", outer), ("inner fprop", inner)):
        _add_ranges(module, name, opened)
    values = torch.ones(2, 4, requires_grad=True)
    (outer(values * 2) + 1).sum().backward()
    assert opened.names["inner fprop"] == opened.names["outer forward"] == 1
    assert opened.names["outer backward"] == 1  # SiLU
    assert opened.names["inner backward"] == 2  # addmm, and the transpose of the weight


def test_a_forward_pass_that_fails_closes_its_range() -> None:
    class Broken(nn.Module):
        def forward(self, values: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("broken")

    module, opened = Broken(), Opened()
    _add_ranges(module, "broken forward", opened)
    with pytest.raises(RuntimeError, match="broken"):
        module(torch.ones(1))
    assert opened.names["broken forward"] == 1 and not opened.stack


def test_a_fused_mlp_has_the_range_of_the_layer() -> None:
    """Its linears are called by no one: operations of Transformer Engine compute in their place."""

    def names() -> tuple[list[str], list[str]]:
        run = build_run(small_config("llama"))
        (chunk,) = run.training_state.chunks
        mlps = [module for module in chunk.modules() if hasattr(module, "linear_fc1")]
        before = [name for name, _ in ranged_modules(chunk)]
        for mlp in mlps:
            mlp._make_fused_impl, mlp.is_split = None, False
        return before, [name for name, _ in ranged_modules(chunk)]

    (before, after), = run_ranks(1, names)  # fmt: skip
    fused = [f"layers.{layer}.{linear} fprop" for layer in (0, 1) for linear in ("linear_fc1", "linear_fc2")]
    assert set(before) - set(after) == set(fused) and {"layers.0.mlp forward", "layers.1.mlp forward"} <= set(after)


@pytest.mark.parametrize("name", ["layers.3.linear_fc1 fprop", "layers.3.mlp forward"])
def test_gemms_of_transformer_engine_have_ranges_of_their_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    te = ModuleType("transformer_engine.pytorch.module.linear")
    te.general_gemm = lambda a, b, out_dtype=None, *, layout="TN": {  # type: ignore[attr-defined]
        "TN": lambda: b @ a.T, "NN": lambda: b @ a, "NT": lambda: b.T @ a}[layout]()  # fmt: skip
    definition = ModuleType("transformer_engine.pytorch.cpp_extensions.gemm")
    definition.general_gemm = plain = te.general_gemm  # type: ignore[attr-defined]
    for module in (te, definition):
        monkeypatch.setitem(sys.modules, module.__name__, module)

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, w)
            return te.general_gemm(w, x)

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x, w = ctx.saved_tensors
            return te.general_gemm(w, dy, layout="NN"), te.general_gemm(x, dy, layout="NT")

    class Linear(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Product.apply(x, self.weight)

    linear, opened = Linear(4, 3), Opened()
    monkeypatch.setattr(profiler_ranges, "ranged_modules", lambda chunk: [(name, chunk)])
    x = torch.ones(2, 4, requires_grad=True)
    with named_ranges([linear], StepTimer(), opened):
        assert definition.general_gemm is plain  # else a module that is imported in the meantime would keep the range
        output = linear(x)
        output.sum().backward()
    prefix = name.split(" ")[0]
    assert opened.names == dict.fromkeys((name, *(f"{prefix} {x}" for x in ["fprop", "backward", "dgrad", "wgrad"])), 1)
    assert te.general_gemm is plain and not opened.stack
    assert torch.equal(output, x @ linear.weight.T) and torch.equal(linear.weight.grad, torch.full((3, 4), 2.0))


def test_replays_of_a_graph_are_said_to_have_no_ranges_once(monkeypatch: pytest.MonkeyPatch) -> None:
    entered = []

    class Ranges:
        def __enter__(self) -> None:
            entered.append("in")

        def __exit__(self, *error: object) -> None:
            entered.append("out")

    monkeypatch.setattr(profiler, "named_ranges", lambda chunks, timer: Ranges())
    written = []
    extension = Profiler()
    action = torch.profiler.ProfilerAction
    extension.profile = SimpleNamespace(current_action=action.WARMUP, step=lambda: None)  # type: ignore[assignment]
    graph, model = SimpleNamespace(has_graphs=True), SimpleNamespace(chunks=[])
    run = SimpleNamespace(graph=graph, training_state=model, timer=StepTimer())
    state: Any = SimpleNamespace(run=run, step=7, sinks=SimpleNamespace(write=written.append))
    for each, inside in ((action.WARMUP, []), (action.RECORD, ["in"]), (action.RECORD_AND_SAVE, ["in"])):
        extension.profile.current_action = each  # type: ignore[union-attr]
        extension.after_step(state, None)  # type: ignore[arg-type]
        assert entered == inside
    extension.profile.current_action = action.NONE  # type: ignore[union-attr]
    extension.after_step(state, None)  # type: ignore[arg-type]
    assert entered == ["in", "out"] and len(written) == 1
    assert "--cuda-graph-impl none" in written[0].detail


def test_the_profile_of_a_run_has_ranges_and_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = f"{COMMON} {STYLES['llama']} {EMULATED} --train-iters 6 --eval-iters 0 --log-interval 1"
    plain, profiled = tmp_path / "plain", tmp_path / "profiled"
    profile = "--profile --profile-step-start 2 --profile-step-end 4"
    for folder, more in ((plain, ""), (profiled, profile)):
        ended = run_forked(1, f"{flags} {more} --save {folder}")
        assert ended.statuses == (0,), ended.output
    losses = [[(step.loss, step.grad_norm) for step in load_run(folder).steps] for folder in (plain, profiled)]
    assert len(losses[0]) == 6 and losses[0] == losses[1]
    events = json.loads((profiled / "profile/rank0.json").read_text())["traceEvents"]
    names = Counter(event["name"] for event in events if event.get("cat") == "user_annotation")
    assert names["layers.1.linear_fc1 fprop"] == 4 and names["layers.1.linear_fc1 backward"] >= 4
    assert names["optimizer"] == names["forward-backward"] == 2 and names["data-wait"]
    assert report.main(["profile", str(profiled)]) == 0
    text = capsys.readouterr().out
    assert "times per step of 2" in text and "none, since the planner does not know" in text
    assert all(f"\n{part} " in text for part in ("GEMM", "attention", "norm", "optimizer"))
