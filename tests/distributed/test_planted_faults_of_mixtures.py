"""Planted faults of mixtures are noticed as in dense models; some need a dense MLP or a shared expert."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Optional

import pytest
import torch
from planted_runs import train_with
from ranks import run_ranks
from small_run import build_run, small_config

from benchmarks import layer_faults
from benchmarks.layer_faults import Fault, LayerFault
from megafp8.analysis.runs import load_run
from megafp8.checkpoint.progress import Progress
from megafp8.mcore.modules import named_linears
from megafp8.metrics.records import EventRecord

TENSORWISE = "--bf16 --fp8-format hybrid --fp8-recipe tensorwise"
MIXTURE = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --swiglu --disable-bias-linear"
DENSE, SHARED = "--moe-layer-freq [0,1]", "--moe-shared-expert-intermediate-size 64"
LOOP = "--lr-warmup-iters 1 --eval-iters 0 --no-progress-bar --save-interval 100 --train-iters 6"
SKIP = "--max-skipped-steps 1"


def run_loop(
    folder: Path, flags: str, fault: Optional[Fault] = None, model: str = MIXTURE
) -> tuple[Progress, list[EventRecord], list[float]]:
    """Progress, events and losses of a run."""
    config = small_config("gpt2", f"{LOOP} --save {folder} --load {folder} {TENSORWISE} {model} {flags}")
    (progress,) = run_ranks(1, lambda: train_with(build_run(config), fault))
    loaded = load_run(folder)
    return progress, list(loaded.events), [step.loss for step in loaded.steps]


def steps_of(events: list[EventRecord], name: str) -> list[int]:
    return [event.step for event in events if event.name == name]


def test_inflated_logits_of_a_mixture_are_noticed(tmp_path: Path) -> None:
    guard = "--fp8-guard warn --fp8-guard-interval 1"
    _, clean, plain = run_loop(tmp_path / "clean", guard)
    _, events, losses = run_loop(tmp_path / "planted", guard, Fault("inflated-qk", first_step=2, growth=32))
    found = [event for event in events if event.name == "guard"]
    assert any("attention logits" in event.detail for event in found) and min(event.step for event in found) >= 2
    assert not any("attention logits" in event.detail for event in clean)
    assert losses[0] == plain[0] and losses[1] != plain[1]


def test_a_spike_batch_of_a_mixture_is_skipped_in_its_own_step(tmp_path: Path) -> None:
    fault, flags = Fault("spike-batch", first_step=5), f"--spike-policy skip {SKIP}"
    window = "--spike-window 4 --spike-min-steps 3 --spike-sigma 2"  # as in test_planted_faults.py
    for name, model in (("mixture", MIXTURE), ("dense", "--swiglu --disable-bias-linear")):
        _, events, losses = run_loop(tmp_path / name, f"{flags} {window}", fault, model)
        _, _, plain = run_loop(tmp_path / f"{name}-clean", "", model=model)
        assert steps_of(events, "step skipped") == [5] and losses[4] != plain[4], name


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
@pytest.mark.parametrize("policy", ["skip", "bf16"])
def test_an_infinite_activation_of_an_expert_is_skipped_in_its_own_step(
    policy: str, dispatcher: str, tmp_path: Path
) -> None:
    flags = f"{SKIP} --on-nonfinite-activation {policy} --moe-token-dispatcher-type {dispatcher}"
    progress, events, _ = run_loop(tmp_path, flags, Fault("infinite-activation", first_step=2))
    assert steps_of(events, "step skipped") == [2]
    fallbacks = [linear.name for linear in progress.history.moved_linears]
    assert len(fallbacks) == (policy == "bf16") and all(re.match(r"layers\.0\.experts\.", name) for name in fallbacks)


def test_an_expert_without_tokens_leaves_the_fault_to_the_next_one(monkeypatch) -> None:
    linears = [torch.nn.Linear(4, 4) for _ in range(3)]
    names = [f"layers.0.experts.{number}.linear_fc2" for number in range(3)]
    monkeypatch.setattr(layer_faults, "unwrap_model", lambda chunks: chunks)
    monkeypatch.setattr(layer_faults, "named_linears", lambda chunk: zip(names, linears, strict=True))
    config = small_config("gpt2", f"{TENSORWISE} {MIXTURE}")
    run = SimpleNamespace(config=config, vocab_size=8, training_state=SimpleNamespace(chunks=[0]))
    fault = LayerFault(run, Fault("infinite-activation"))
    inputs = [torch.ones(0, 4), torch.ones(2, 4), torch.ones(2, 4)]

    def infinite() -> list[int]:
        seen: list[int] = []
        handles = [
            linear.register_forward_pre_hook(lambda _, args, number=number: seen.append(number * bool(
                torch.isinf(args[0]).any()))) for number, linear in enumerate(linears)
        ]  # fmt: skip
        for linear, values in zip(linears, inputs, strict=True):
            linear(values)
        for handle in handles:
            handle.remove()
        return seen

    fault.start(1)
    assert infinite() == [0, 1, 0]
    inputs[0] = torch.ones(2, 4)  # the next microbatch of the step
    assert infinite() == [0, 1, 0]
    fault.end_step()
    fault.start(2)
    assert infinite() == [0, 0, 0]


@pytest.mark.parametrize(("words", "mlp"), [(DENSE, "layers.0"), (SHARED, "layers.1.shared_experts")])
@pytest.mark.parametrize(("fault", "linear"), [("outlier-channel", "linear_fc1"), ("aligned-swiglu", "linear_fc2")])
def test_an_mlp_of_all_tokens_has_the_fault(fault: str, linear: str, words: str, mlp: str, tmp_path: Path) -> None:
    planted = Fault(fault, first_step=2, growth=32)
    _, events, _ = run_loop(tmp_path, "--fp8-guard warn --fp8-guard-interval 1", planted, f"{MIXTURE} {words}")
    found = [event for event in events if event.name == "guard"]
    assert any(f" of {mlp}.{linear}.input is " in event.detail for event in found)
    assert min(event.step for event in found) >= 2


@pytest.mark.parametrize("fault", ["outlier-channel", "aligned-swiglu"])
def test_routed_experts_do_not_have_the_fault(fault: str) -> None:
    def locations() -> tuple[list[str], list[str]]:
        run = build_run(small_config("gpt2", f"{TENSORWISE} {MIXTURE} {DENSE} {SHARED}"))
        planted = LayerFault(run, Fault(fault))
        named = [pair for chunk in planted.chunks for pair in named_linears(chunk)]
        return tuple([name for name, linear in named if linear in found] for found in (planted.linears, planted.gated))

    ((linears, gated),) = run_ranks(1, locations)
    mlps = ["layers.0", "layers.1.shared_experts"]
    assert gated == [f"{mlp}.linear_fc1" for mlp in mlps] * (fault == "aligned-swiglu")
    assert linears == [f"{mlp}.linear_{'fc1' if fault == 'outlier-channel' else 'fc2'}" for mlp in mlps]
