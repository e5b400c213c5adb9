"""Loss scales: dynamic in FP16, constant in any precision, in records and checkpoints, and at their limits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from megatron.core.utils import to_local_if_dtensor, unwrap_model
from ranks import run_ranks
from small_run import FP8, PLAIN, Curve, build_run, fingerprint, small_config, statistics_record_of, train, weights

from megafp8.analysis.runs import load_run
from megafp8.checkpoint.progress import Progress
from megafp8.checkpoint.save import save_checkpoint
from megafp8.checkpoint.state_dict import chained_optimizers
from megafp8.errors import NumericsError
from megafp8.optimizer.schedules import can_lower_loss_scale, current_loss_scale, get_grad_scaler
from megafp8.training.pretrain import train as train_run
from megafp8.training.resume import resume
from megafp8.training.run import Run

SHARDED = "--use-distributed-optimizer"
HIGH = 2.0**32  # at which every gradient of the small model overflows


def optimizer_hash(run: Run) -> str:
    """Of master weights, moments and step numbers, with FSDP2 of this rank's rows."""
    tensors: dict[str, torch.Tensor] = {}
    for part in chained_optimizers(run.training_state.optimizer):
        for group in part.optimizer.param_groups:
            for number, parameter in enumerate(group["params"]):
                state = part.optimizer.state[parameter] | {"master": parameter, "step": torch.tensor(group["step"])}
                tensors |= {
                    f"{number}.{name}": torch.as_tensor(to_local_if_dtensor(value)).view(-1)
                    for name, value in state.items()
                }
    return fingerprint(tensors)


@pytest.mark.parametrize("optimizer", ["", SHARDED])
def test_overflow_halves_the_loss_scale_and_changes_nothing_else(optimizer: str) -> None:
    flags = "--fp16 --initial-loss-scale 64 --hysteresis 1 --spike-policy skip --max-skipped-steps 1"
    config = small_config("llama", f"{flags} {optimizer}", 2)

    def step() -> tuple[list[bool], bool, float]:
        run = build_run(config)
        norms = train(run, 2).grad_norms
        get_grad_scaler(run.training_state.optimizer)._scale.fill_(HIGH)
        before = fingerprint(weights(run)), optimizer_hash(run), str(run.training_state.schedule.state_dict())
        norms += train(run, 1, 3).grad_norms
        after = fingerprint(weights(run)), optimizer_hash(run), str(run.training_state.schedule.state_dict())
        scale = current_loss_scale(run.training_state.optimizer)
        norms += train(run, 1, 1).grad_norms
        return [norm is None for norm in norms], before == after, scale

    assert run_ranks(2, step) == [([False, False, True, True], True, HIGH / 2)] * 2


def test_loss_scale_hysteresis_and_growth_window(tmp_path: Path) -> None:
    """Two overflows halve the scale. Then every two good steps double it. Records have scale and counters."""
    flags = "--fp16 --initial-loss-scale 4096 --hysteresis 2 --loss-scale-window 2 --train-iters 9 --eval-iters 0"
    config = small_config("llama", f"{flags} --no-progress-bar --lr 1e-4 --save {tmp_path}")
    progress = run_ranks(1, lambda: train_run(build_run(config)))[0]
    records = load_run(tmp_path)
    scales = [step.loss_scale for step in records.steps]
    skipped = [step.is_skipped for step in records.steps]
    assert progress.history.num_overflows == sum(skipped) >= 3
    scale, num_good, num_borne = 4096, 0, 0
    for seen, is_skipped in zip(scales, skipped, strict=True):
        assert seen == scale
        num_good, num_borne = (0, num_borne + 1) if is_skipped else (num_good + 1, num_borne)
        if is_skipped and num_borne >= 2:
            scale /= 2
        if num_good == 2:
            scale, num_good, num_borne = scale * 2, 0, 0
    assert scales[:2] == [4096, 4096] and min(scales) < 4096
    assert any(after > before for before, after in zip(scales, scales[1:], strict=False))
    (event,) = (event for event in records.events if event.name == "skipped")
    assert event.detail == f"{sum(skipped)} steps had no update because gradients overflowed at their loss scale"


@pytest.mark.parametrize("flags", [f"{PLAIN} {SHARDED}", "--bf16", f"--bf16 {FP8}", f"--bf16 {SHARDED}"])
def test_constant_power_of_two_loss_scale_is_bit_equal(flags: str) -> None:
    """Multiplication by 2^k is exact within the exponent range. FP8 scales absorb it, and the division removes it."""

    def run_with(scale: str) -> tuple[Curve, str]:
        run = build_run(small_config("llama", f"{flags} {scale}"))
        return train(run, 3), fingerprint(weights(run))

    plain, scaled = (run_ranks(1, run_with, scale)[0] for scale in ("", "--loss-scale 1024"))
    assert scaled == plain
    assert run_ranks(1, run_with, "--loss-scale 1000")[0][1] != plain[1], "the scale acts"


def test_constant_loss_scale_in_fp16_follows_the_unscaled_run() -> None:
    """The rounding of FP16 depends on the scale, so the curves are close but not equal."""
    one, many = (
        run_ranks(1, lambda flags=flags: train(build_run(small_config("llama", flags)), 4))[0]
        for flags in ("--fp16 --loss-scale 1", "--fp16 --loss-scale 64")
    )
    assert many.losses == pytest.approx(one.losses, rel=2**-10)  # a rounding of FP16
    assert many.grad_norms == pytest.approx(one.grad_norms, rel=2**-10)


def constant_gradient(run: Run, value: float) -> None:
    """Set the gradient of a norm weight of this rank to this value, from now on."""
    layer = unwrap_model(run.training_state.chunks)[-1].decoder.layers[-1]
    layer.pre_mlp_layernorm.weight.register_hook(lambda gradient: torch.full_like(gradient, value))


@pytest.mark.parametrize(
    ("flags", "value", "says"),
    [
        ("--initial-loss-scale 4 --min-loss-scale 4", float("inf"), "the loss scale is at its minimum of 4: lower"),
        ("--loss-scale 8", float("inf"), "the loss scale is fixed at 8: lower --loss-scale"),
        ("--loss-scale 8", 40000.0, "gradients overflow in the sum over all ranks"),
    ],
)
def test_overflow_at_the_minimum_loss_scale_is_a_nonfinite_gradient(flags: str, value: float, says: str) -> None:
    """All ranks stop before the update, or skip it where that is allowed."""

    def stop() -> tuple[str, bool]:
        run = build_run(small_config("llama", f"--fp16 {flags}", 2))
        constant_gradient(run, value)
        before = fingerprint(weights(run))
        with pytest.raises(NumericsError) as caught:
            train(run, 1)
        return str(caught.value), fingerprint(weights(run)) == before

    for text, is_unchanged in run_ranks(2, stop):
        assert says in text and "loss or gradients are not finite (samples 0-7)" in text
        assert is_unchanged


def test_gradient_norm_above_fp16_range_is_not_an_overflow() -> None:
    """Squares are summed in FP32: a norm above 65504 is no overflow."""

    def step() -> Curve:
        run = build_run(small_config("llama", "--fp16 --loss-scale 1"))
        constant_gradient(run, 30000.0)  # two microbatches make 60000
        return train(run, 1)

    assert run_ranks(1, step)[0].grad_norms[0] * 32 * 8 > 65504, "before it was divided by the tokens"


@dataclass(frozen=True)
class End:
    """The end of a run: weights, and the state of its loss scaler."""

    weights: str
    scaler: dict[str, float]


@pytest.mark.parametrize(("world_size", "optimizer"), [(1, ""), (2, SHARDED)])
def test_resume_continues_the_loss_scale_window(world_size: int, optimizer: str, tmp_path: Path) -> None:
    flags = f"--fp16 --initial-loss-scale 1024 --loss-scale-window 4 --lr 1e-4 {optimizer}"
    config = small_config("llama", f"{flags} --load {tmp_path} --save {tmp_path}", world_size)

    def leg(first_step: int, num_steps: int, is_saved: bool) -> End:
        run = build_run(config)
        assert resume(run)[0].step == first_step - 1 if first_step > 1 else True
        train(run, num_steps, first_step)
        if is_saved:
            step = first_step + num_steps - 1
            save_checkpoint(tmp_path, config, run.training_state, Progress(step, step * run.global_batch_size))
        state = get_grad_scaler(run.training_state.optimizer).state_dict()
        return End(fingerprint(weights(run)), {name: float(value) for name, value in state.items()})

    unbroken = run_ranks(world_size, leg, 1, 7, False)
    middle = run_ranks(world_size, leg, 1, 4, True)
    assert middle[0].scaler["growth_tracker"] > 0 and middle[0].scaler["hysteresis_tracker"] != 2
    assert run_ranks(world_size, leg, 5, 3, False) == unbroken


@pytest.mark.parametrize(("before", "after"), [("--loss-scale 64", ""), ("", "--loss-scale 64")])
def test_resume_between_constant_and_dynamic_loss_scale(before: str, after: str, tmp_path: Path) -> None:
    """The new run's own scale is used."""

    def leg(flags: str) -> float:
        flags = f"--fp16 --initial-loss-scale 256 {flags} --load {tmp_path} --save {tmp_path}"
        config = small_config("llama", flags)
        run = build_run(config)
        resume(run)
        scale = current_loss_scale(run.training_state.optimizer)
        save_checkpoint(tmp_path, config, run.training_state, Progress(1, 8))
        return scale

    run_ranks(1, leg, before)
    assert run_ranks(1, leg, after)[0] == (64 if after else 256)


def test_gradient_noise_is_of_unscaled_gradients() -> None:
    statistics = "--bf16 --fp8-log-interval 1 --fp8-what-if tensorwise --micro-batch-size 2"
    records = [
        run_ranks(
            1, lambda flags=flags: statistics_record_of(build_run(small_config("llama", f"{statistics} {flags}")))
        )[0]
        for flags in ("", "--loss-scale 1024")
    ]
    assert records[0].gradient_signal is not None
    assert (records[1].gradient_signal, records[1].gradient_noise) == (
        records[0].gradient_signal,
        records[0].gradient_noise,
    )


def test_only_a_dynamic_loss_scale_above_its_minimum_can_decrease() -> None:
    def answer(flags: str) -> bool:
        return can_lower_loss_scale(build_run(small_config("llama", flags)).training_state.optimizer)

    runs = ("", "--bf16 --loss-scale 8", "--fp16 --loss-scale 8", "--fp16 --initial-loss-scale 1", "--fp16")
    assert [run_ranks(1, answer, flags)[0] for flags in runs] == [False, False, False, False, True]
