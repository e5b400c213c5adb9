"""Planted faults: what they change and what they do not, and that a run notices and repairs them."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ranks import run_ranks
from small_run import build_run, fingerprint, small_config, weights

from megafp8.analysis.runs import LoadedRun, load_run
from megafp8.checkpoint.progress import Progress
from megafp8.metrics.layer_statistics import swiglu_alignment
from megafp8.models.layer_runtime import emulated_linears_by_name
from megafp8.training import pretrain
from megafp8.training.evaluation import build_batches
from megafp8.training.extensions.planted_fault import LayerFault, align, query_key_mask
from megafp8.training.step import train_step

TENSORWISE = "--bf16 --fp8-format hybrid --fp8-recipe tensorwise"
LOOP = "--lr-warmup-iters 1 --eval-iters 0 --no-progress-bar --save-interval 100 --train-iters 6"
FAST = "--planted-fault-step 2 --planted-fault-growth 32 --planted-fault"


def run_loop(folder: Path, flags: str, is_fallback: bool = False) -> tuple[Progress, str]:
    """The training loop; in high precision if `is_fallback`."""
    config = small_config("llama", f"{LOOP} --save {folder} --load {folder} {TENSORWISE} {flags}")

    def start() -> tuple[Progress, str]:
        run = build_run(config)
        for _, linear in emulated_linears_by_name(run.training_state.chunks) if is_fallback else ():
            linear.move_to_high_precision()
        return pretrain.train(run), fingerprint(weights(run))

    return run_ranks(1, start)[0]


def events(folder: Path, *names: str) -> list[tuple[int, str]]:
    run: LoadedRun = load_run(folder)
    return [(event.step, event.name) for event in run.events if event.name in names]


def test_the_size_of_an_outlier_channel_changes_no_bit_in_high_precision(tmp_path: Path) -> None:
    """Two sizes: without the fault, which is one more operation, some CPUs sum the gradients in another order."""
    small = FAST.replace("growth 32", "growth 2")
    _, less = run_loop(tmp_path / "less", f"{small} outlier-channel", is_fallback=True)
    _, more = run_loop(tmp_path / "more", f"{FAST} outlier-channel", is_fallback=True)
    assert less == more
    assert run_loop(tmp_path / "fp8", f"{FAST} outlier-channel")[1] != run_loop(tmp_path / "none", "")[1]


@pytest.mark.parametrize("fault", ["outlier-channel", "aligned-swiglu"])
def test_a_gradual_fault_is_resumed_and_noticed(fault: str, tmp_path: Path) -> None:
    flags = f"{FAST} {fault} --fp8-guard warn --fp8-guard-interval 1"
    _, straight = run_loop(tmp_path / "straight", flags)
    run_loop(tmp_path / "resumed", f"{flags} --exit-interval 4")
    assert run_loop(tmp_path / "resumed", flags)[1] == straight
    found = events(tmp_path / "straight", "guard")
    assert found and min(step for step, _ in found) >= 2


@pytest.mark.parametrize("fault", ["inflated-qk", "spike-batch"])
def test_faults_without_quantization(fault: str) -> None:
    """The losses change from the step of the fault on."""

    def losses(flags: str) -> list[float]:
        run = build_run(small_config("gpt2", f"--bf16 --train-iters 3 {flags}"))
        batches, found = build_batches(run, run.datasets[0], 0, 3 * run.global_batch_size, num_workers=0), []
        planted = LayerFault(run) if flags else None
        for step in (1, 2, 3):
            if planted is not None:
                planted.start(step)
            found.append(train_step(run, batches, Progress(step - 1)).loss)
        return found

    growth = "--planted-fault-growth 32" if fault == "inflated-qk" else ""
    (plain,) = run_ranks(1, losses, "")
    (planted,) = run_ranks(1, losses, f"--planted-fault {fault} --planted-fault-step 2 {growth}")
    assert planted[0] == plain[0] and planted[1] != plain[1]


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("inflated-qk", "--planted-fault inflated-qk with --qk-layernorm: queries and keys are normalized after"),
        ("spike-batch --planted-fault-growth 2", "--planted-fault-growth 2 has no effect without a gradual"),
        ("outlier-channel --planted-fault-growth 1", "--planted-fault-growth 1.0 must be in (1, 1000]"),
        ("spike-batch --planted-fault-step 101", "is after the last step of the run, 100"),
    ],
)
def test_faults_that_could_not_show_are_refused(flags: str, problem: str) -> None:
    with pytest.raises(AssertionError, match=re.escape(problem)):
        small_config("llama", f"{TENSORWISE} --planted-fault {flags}")


@pytest.mark.parametrize("policy", ["skip", "bf16"])
def test_an_infinite_activation_is_skipped_in_its_own_step(policy: str, tmp_path: Path) -> None:
    flags = f"{FAST.partition(' --planted-fault-growth')[0]} --planted-fault infinite-activation --max-skipped-steps 1"
    progress, _ = run_loop(tmp_path, f"{flags} --on-nonfinite-activation {policy}")
    assert events(tmp_path, "step skipped") == [(2, "step skipped")]
    assert [samples.step for samples in progress.history.skipped] == [2]
    fallbacks = [linear.name for linear in progress.history.moved_linears]
    assert fallbacks == (["layers.0.linear_fc2"] if policy == "bf16" else [])


def test_a_spike_batch_is_skipped_in_its_own_step(tmp_path: Path) -> None:
    flags = "--planted-fault-step 5 --planted-fault spike-batch --spike-policy skip --max-skipped-steps 1"
    # The batch is 4 standard deviations above the trend, and harder batches up to 1.
    run_loop(tmp_path, f"{flags} --spike-window 4 --spike-min-steps 3 --spike-sigma 2")
    assert events(tmp_path, "step skipped") == [(5, "step skipped")]
    run_loop(tmp_path / "clean", "")
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
        fault = "--planted-fault aligned-swiglu --planted-fault-step 1"
        run = build_run(small_config("llama", f"{TENSORWISE} --train-iters 20 {flags} {fault}"))
        batches = build_batches(run, run.datasets[0], 0, 20 * run.global_batch_size, num_workers=0)
        planted = LayerFault(run)
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


def test_faults_that_have_no_place_are_refused() -> None:
    with pytest.raises(AssertionError, match="planted-fault inflated-qk: the layer must be complete on every rank"):
        small_config("llama", f"{TENSORWISE} --tensor-model-parallel-size 2 --planted-fault inflated-qk", 2)
