"""Rules about skipped updates, loss spikes and non-finite operands."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megafp8.config import derived, precision_map
from megafp8.config.features import given_flags
from megafp8.config.rules.base import no_effect_without
from megafp8.config.schema import RunConfig


def skipping_needs_the_check(config: RunConfig, world_size: int) -> Iterator[str]:
    """Updates can be skipped only with the check for non-finite values."""
    if not config.training.check_for_nan_in_loss_and_grad:
        policies = ("--max-skipped-steps VALUE", "--spike-policy VALUE", "--on-nonfinite-activation VALUE")
        for flag in given_flags(config, policies).values():
            yield f"{flag} contradicts --no-check-for-nan-in-loss-and-grad: keep one"


def skipping_spikes_has_a_limit(config: RunConfig, world_size: int) -> Iterator[str]:
    """--spike-policy skip needs a limit of consecutive skipped updates."""
    if config.training.spike_policy == "skip" and config.training.max_skipped_steps == 0:
        yield (
            "--spike-policy skip with --max-skipped-steps 0 could not skip any step: set the maximum number of "
            "consecutive skipped steps, for example --max-skipped-steps 10"
        )


def nonfinite_activations_are_seen(config: RunConfig, world_size: int) -> Iterator[str]:
    """A reaction to non-finite operands needs linears that quantize, and a limit of consecutive skipped updates."""
    policy, precision = config.training.on_nonfinite_activation, config.precision
    flag = f"--on-nonfinite-activation {policy}"
    if policy == "warn":
        return
    if not precision_map.is_quantized(precision):
        yield no_effect_without(flag, "--fp8-format, --fp4-format or --precision")
    if policy != "stop" and config.training.max_skipped_steps == 0:
        yield (
            f"{flag} with --max-skipped-steps 0 could not skip any step: set the maximum number of consecutive skipped "
            "steps, for example --max-skipped-steps 10"
        )
    if policy == "bf16" and precision.fp8_param_gather:
        yield (
            f"{flag} with --fp8-param-gather: the weights have no copy in high precision; remove one, or use "
            "--on-nonfinite-activation skip"
        )
    if policy == "bf16" and config.parallel.expert_model_parallel_size > 1 and derived.is_stateful(precision):
        yield (
            f"{flag} with delayed scaling and --expert-model-parallel-size "
            f"{config.parallel.expert_model_parallel_size}: ranks of other experts would exchange amaxes of other "
            "linears; use --on-nonfinite-activation skip, or a recipe without amax history"
        )
    if config.model.mtp_num_layers:
        yield (
            f"{flag} with --mtp-num-layers {config.model.mtp_num_layers}: linears of multi-token prediction have no "
            "counters; use --on-nonfinite-activation warn"
        )


def spikes_are_detectable(config: RunConfig, world_size: int) -> Iterator[str]:
    """The window is large enough for the required number of updates."""
    training = config.training
    if training.spike_policy != "off" and training.spike_min_steps > training.spike_window:
        yield (
            f"--spike-min-steps {training.spike_min_steps} is above --spike-window {training.spike_window}: spikes "
            "could never be detected; lower --spike-min-steps"
        )


def rollback_has_somewhere_to_go(config: RunConfig, world_size: int) -> Iterator[str]:
    """--spike-policy rollback needs complete checkpoints, and a folder with those of this run only."""
    checkpoint = config.checkpoint
    if config.training.spike_policy != "rollback":
        return
    if checkpoint.save is None or checkpoint.save_interval is None:
        yield "--spike-policy rollback needs checkpoints of this run: give --save and --save-interval"
    elif checkpoint.finetune or checkpoint.load is None or Path(checkpoint.load) != Path(checkpoint.save):
        yield (
            "--spike-policy rollback needs a --save folder with checkpoints of this run only: give --load "
            f"{checkpoint.save} without --finetune (to start from other weights, use --pretrained-checkpoint)"
        )
    for flag in given_flags(config, ("--no-save-optim", "--no-save-rng")):
        yield f"--spike-policy rollback needs complete checkpoints, which {flag} excludes: remove one"
