"""Planted faults: what they change and what they do not, and that a run notices and repairs them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Optional

import pytest
import torch
from planted_runs import train_with
from ranks import run_ranks
from small_run import build_run, fingerprint, small_config, weights

from benchmarks.layer_faults import Fault, LayerFault, align, query_key_mask
from megafp8.analysis.runs import LoadedRun, load_run
from megafp8.checkpoint.progress import Progress
from megafp8.metrics.layer_statistics import swiglu_alignment
from megafp8.models.layer_runtime import emulated_linears_by_name
from megafp8.training.evaluation import build_batches
from megafp8.training.step import train_step

TENSORWISE = "--bf16 --fp8-format hybrid --fp8-recipe tensorwise"
LOOP = "--lr-warmup-iters 1 --eval-iters 0 --no-progress-bar --save-interval 100 --train-iters 6"


def fast(kind: str) -> Fault:
    """A fault that is large after a few steps."""
    return Fault(kind, first_step=2, growth=32)


def run_loop(
    folder: Path, fault: Optional[Fault] = None, flags: str = "", is_fallback: bool = False
) -> tuple[Progress, str]:
    """The training loop; in high precision if `is_fallback`."""
    config = small_config("llama", f"{LOOP} --save {folder} --load {folder} {TENSORWISE} {flags}")

    def start() -> tuple[Progress, str]:
        run = build_run(config)
        for _, linear in emulated_linears_by_name(run.training_state.chunks) if is_fallback else ():
            linear.move_to_high_precision()
        return train_with(run, fault), fingerprint(weights(run))

    return run_ranks(1, start)[0]


def events(folder: Path, *names: str) -> list[tuple[int, str]]:
    run: LoadedRun = load_run(folder)
    return [(event.step, event.name) for event in run.events if event.name in names]


def test_the_size_of_an_outlier_channel_changes_no_bit_in_high_precision(tmp_path: Path) -> None:
    """Two sizes: without the fault, which is one more operation, some CPUs sum the gradients in another order."""
    _, less = run_loop(tmp_path / "less", Fault("outlier-channel", first_step=2, growth=2), is_fallback=True)
    _, more = run_loop(tmp_path / "more", fast("outlier-channel"), is_fallback=True)
    assert less == more
    assert run_loop(tmp_path / "fp8", fast("outlier-channel"))[1] != run_loop(tmp_path / "none")[1]


@pytest.mark.parametrize("fault", ["outlier-channel", "aligned-swiglu"])
def test_a_gradual_fault_is_resumed_and_noticed(fault: str, tmp_path: Path) -> None:
    flags = "--fp8-guard warn --fp8-guard-interval 1"
    _, straight = run_loop(tmp_path / "straight", fast(fault), flags)
    run_loop(tmp_path / "resumed", fast(fault), f"{flags} --exit-interval 4")
    assert run_loop(tmp_path / "resumed", fast(fault), flags)[1] == straight
    found = events(tmp_path / "straight", "guard")
    assert found and min(step for step, _ in found) >= 2


@pytest.mark.parametrize("fault", ["inflated-qk", "spike-batch"])
def test_faults_without_quantization(fault: str) -> None:
    """The losses change from the step of the fault on."""

    def losses(has_fault: bool) -> list[float]:
        run = build_run(small_config("gpt2", "--bf16 --train-iters 3"))
        batches, found = build_batches(run, run.datasets[0], 0, 3 * run.global_batch_size, num_workers=0), []
        planted = LayerFault(run, fast(fault)) if has_fault else None
        for step in (1, 2, 3):
            if planted is not None:
                planted.start(step)
            found.append(train_step(run, batches, Progress(step - 1)).loss)
        return found

    (plain,) = run_ranks(1, losses, False)
    (planted,) = run_ranks(1, losses, True)
    assert planted[0] == plain[0] and planted[1] != plain[1]


@pytest.mark.parametrize("policy", ["skip", "bf16"])
def test_an_infinite_activation_is_skipped_in_its_own_step(policy: str, tmp_path: Path) -> None:
    flags = f"--max-skipped-steps 1 --on-nonfinite-activation {policy}"
    progress, _ = run_loop(tmp_path, fast("infinite-activation"), flags)
    assert events(tmp_path, "step skipped") == [(2, "step skipped")]
    assert [samples.step for samples in progress.history.skipped] == [2]
    fallbacks = [linear.name for linear in progress.history.moved_linears]
    assert fallbacks == (["layers.0.linear_fc2"] if policy == "bf16" else [])


def test_a_spike_batch_is_skipped_in_its_own_step(tmp_path: Path) -> None:
    # The batch is 4 standard deviations above the trend, and harder batches up to 1.
    window = "--spike-window 4 --spike-min-steps 3 --spike-sigma 2"
    fault = Fault("spike-batch", first_step=5)
    run_loop(tmp_path, fault, f"--spike-policy skip --max-skipped-steps 1 {window}")
    assert events(tmp_path, "step skipped") == [(5, "step skipped")]
    run_loop(tmp_path / "clean")
    assert load_run(tmp_path).steps[4].loss != load_run(tmp_path / "clean").steps[4].loss


@pytest.mark.parametrize("is_flat", [False, True])
def test_weights_turn_to_the_same_direction(is_flat: bool) -> None:
    """Master weights of the distributed optimizer are flat."""
    weight = torch.nn.Parameter(torch.randn(16, 8, generator=torch.Generator().manual_seed(0)))
    weight.main_param = weight.detach().clone().view(-1 if is_flat else weight.shape)
    norm = weight[0].norm().item()
    for _ in range(60):
        align(weight)
    assert swiglu_alignment(weight) > 0.99 and weight[0].norm().item() == pytest.approx(norm, rel=1e-4)
    assert torch.equal(weight, weight.main_param.view(weight.shape))


@pytest.mark.parametrize("flags", ["", "--use-distributed-optimizer"])
def test_weights_stay_turned_after_updates(flags: str) -> None:
    def alignment() -> float:
        run = build_run(small_config("llama", f"{TENSORWISE} --train-iters 20 {flags}"))
        batches = build_batches(run, run.datasets[0], 0, 20 * run.global_batch_size, num_workers=0)
        planted = LayerFault(run, Fault("aligned-swiglu"))
        for step in range(20):
            planted.start(step + 1)
            train_step(run, batches, Progress(step))
        return min(swiglu_alignment(gated.weight) for gated in planted.gated)

    (found,) = run_ranks(1, alignment)
    assert found > 0.8


def test_queries_and_keys_are_inflated_and_values_are_not() -> None:
    model = SimpleNamespace(num_attention_heads=4, group_query_attention=True, num_query_groups=2)
    mask = query_key_mask(model, torch.zeros(1, 1, 2 * 4 * 3), 7.0)
    assert mask.tolist() == ([7.0] * 9 + [1.0] * 3) * 2
