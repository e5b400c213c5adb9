"""`--use-torch-fsdp2` with a loss scale: FP16 follows the run without it, and all ranks agree about an overflow."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed as dist
from ranks import run_ranks
from small_run import Curve, build_run, fingerprint, small_config, train
from test_loss_scale import optimizer_hash

from megafp8.checkpoint.progress import Progress
from megafp8.checkpoint.save import save_checkpoint
from megafp8.fsdp import runtime
from megafp8.optimizer.schedules import current_loss_scale, get_grad_scaler
from megafp8.training.resume import resume
from megafp8.training.run import Run

FSDP = "--use-torch-fsdp2"
COMMON = "--no-gradient-accumulation-fusion --micro-batch-size 1"
DYNAMIC = f"--fp16 --initial-loss-scale 64 --hysteresis 1 {COMMON}"


def curve_of_flags(flags: str, num_steps: int = 4, world_size: int = 2) -> Curve:
    """Equal on all ranks."""
    config = small_config("llama", flags, world_size)
    curves = run_ranks(world_size, lambda: train(build_run(config), num_steps))
    assert all(curve == curves[0] for curve in curves)
    return curves[0]


@pytest.mark.parametrize(("world_size", "layout"), [(2, ""), (4, "--tensor-model-parallel-size 2 --sequence-parallel")])
def test_fp16_follows_the_run_without_fsdp(world_size: int, layout: str) -> None:
    """With the same skipped steps. The first two overflow."""
    flags = f"--fp16 --initial-loss-scale 1024 {COMMON} {layout}"
    plain, sharded = (curve_of_flags(f"{flags} {extra}", world_size=world_size) for extra in ("", FSDP))
    skipped = [norm is None for norm in plain.grad_norms]
    assert skipped[:2] == [True, True] and not all(skipped)
    assert [norm is None for norm in sharded.grad_norms] == skipped
    assert sharded.losses == pytest.approx(plain.losses, rel=2**-11)
    norms = [[norm for norm in curve.grad_norms if norm is not None] for curve in (sharded, plain)]
    assert norms[0] == pytest.approx(norms[1], rel=2**-11)


def test_constant_loss_scale_is_bit_equal_in_bf16() -> None:
    plain, scaled = (curve_of_flags(f"--bf16 {COMMON} {FSDP} {scale}", 3) for scale in ("", "--loss-scale 1024"))
    assert scaled == plain


@dataclass(frozen=True)
class Skip:
    """An overflow on one rank, as a rank sees it.

    Attributes:
        is_skipped: whether it had no update.
        is_unchanged: whether weights, master weights and moments stayed as they were.
        loss_scale: after it.
        norms: of a later step.
    """

    is_skipped: bool
    is_unchanged: bool
    loss_scale: float
    norms: tuple[float, ...]


def overflow_on_last_rank(flags: str) -> Skip:
    """A step in which a row of the last rank's reduced gradients is infinite."""
    run = build_run(small_config("llama", flags, 2))
    train(run, 1)
    chunk = run.training_state.chunks[0]
    scale_gradients = chunk.scale_gradients

    def overflow(factor: object) -> None:
        scale_gradients(factor)
        if dist.get_rank() == dist.get_world_size() - 1:
            next(chunk.parameters()).main_grad.to_local()[0] = float("inf")

    chunk.scale_gradients = overflow
    before = state(run)
    skipped = train(run, 1, 2)
    after = state(run)
    del chunk.scale_gradients
    norms = train(run, 1, 3).grad_norms
    return Skip(
        skipped.grad_norms == [None], before == after, current_loss_scale(run.training_state.optimizer), tuple(norms)
    )


def state(run: Run) -> tuple[str, str]:
    rows = {name: parameter.to_local() for name, parameter in run.training_state.chunks[0].named_parameters()}
    return fingerprint(rows), optimizer_hash(run)


@pytest.mark.parametrize("extra", ["", "--no-check-for-nan-in-loss-and-grad"])
def test_all_ranks_skip_when_one_overflows(extra: str) -> None:
    ranks = run_ranks(2, overflow_on_last_rank, f"{DYNAMIC} {FSDP} {extra}")
    assert ranks[0] == ranks[1]
    assert ranks[0].is_skipped and ranks[0].is_unchanged and ranks[0].loss_scale == 32
    assert all(norm > 0 for norm in ranks[0].norms)


def test_a_rank_that_checks_only_its_rows_disagrees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the agreement the last rank skips alone, so the test above can fail."""
    agree = runtime.agree_on_overflow

    def check_own_rows(parts: list) -> None:
        agree(parts)
        monkeypatch.setattr("megafp8.mcore.torch_fsdp.dist.all_reduce", lambda *_, **__: None)

    monkeypatch.setattr(runtime, "agree_on_overflow", check_own_rows)

    def scale_after_overflow() -> float:
        run = build_run(small_config("llama", f"{DYNAMIC} {FSDP}", 2))
        part = run.training_state.optimizer
        part = getattr(part, "chained_optimizers", [part])[0]
        for parameter in run.training_state.chunks[0].parameters():
            parameter.main_grad.to_local().fill_(float("inf") if dist.get_rank() else 1.0)
        part.prepare_grads()
        return current_loss_scale(run.training_state.optimizer)

    assert run_ranks(2, scale_after_overflow) == [64, 32]


def test_resume_with_and_without_fsdp(tmp_path: Path) -> None:
    """The loss scale and its counters come from the checkpoint, which fits both layouts."""

    def leg(flags: str, num_steps: int, is_saved: bool) -> tuple[list[float], dict[str, float]]:
        folder = f"--load {tmp_path} --save {tmp_path}"
        config = small_config("llama", f"{DYNAMIC} --loss-scale-window 3 {folder} {flags}", 2)
        run = build_run(config)
        done = resume(run)[0].step
        losses = train(run, num_steps, done + 1).losses
        if is_saved:
            save_checkpoint(
                tmp_path, config, run.training_state, Progress(num_steps, num_steps * run.global_batch_size)
            )
        scaler = get_grad_scaler(run.training_state.optimizer).state_dict()
        return losses, {name: float(value) for name, value in scaler.items()}

    unbroken = run_ranks(2, leg, FSDP, 4, False)[0]
    assert run_ranks(2, leg, FSDP, 2, True)[0][0] == unbroken[0][:2]
    again, plain = (run_ranks(2, leg, flags, 2, False)[0] for flags in (FSDP, ""))
    assert again == (unbroken[0][2:], unbroken[1])
    assert plain[1] == unbroken[1]
    assert plain[0] == pytest.approx(unbroken[0][2:], rel=2**-11)
