"""What a run does about numbers that are not finite, and about spikes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megafp8.config.rules.rule import Rule, without
from megafp8.config.schema import RunConfig
from megafp8.config.settings import settings_by_name, value_of

OF_EVERY_POLICY = ("spike_window", "spike_sigma", "spike_min_steps")
OF_ROLLBACK = ("spike_rollback_steps", "spike_skip_batches", "max_rollbacks")


def skipping_needs_the_check(config: RunConfig, world_size: int) -> Iterator[str]:
    """Without the check for numbers that are not finite, there is nothing to skip by."""
    training = config.training
    asked = {
        f"--max-skipped-steps {training.max_skipped_steps}": training.max_skipped_steps > 0,
        f"--spike-policy {training.spike_policy}": training.spike_policy != "off",
    }
    for flag in (flag for flag, given in asked.items() if given and not training.check_for_nan_in_loss_and_grad):
        yield f"{flag} contradicts --no-check-for-nan-in-loss-and-grad: keep one"


def skipping_spikes_has_a_limit(config: RunConfig, world_size: int) -> Iterator[str]:
    """--spike-policy skip says how many steps in a row it may skip."""
    if config.training.spike_policy == "skip" and config.training.max_skipped_steps == 0:
        yield (
            "--spike-policy skip with --max-skipped-steps 0 may skip no step: give how many in a row, for example "
            "--max-skipped-steps 10"
        )


def spike_settings_need_their_policy(config: RunConfig, world_size: int) -> Iterator[str]:
    """Settings of a policy belong to it."""
    policy = config.training.spike_policy
    for names, needs, is_there in (
        (OF_EVERY_POLICY, "--spike-policy", policy != "off"),
        (OF_ROLLBACK, "--spike-policy rollback", policy == "rollback"),
    ):
        for setting in (settings_by_name()[f"training.{name}"] for name in names):
            value = value_of(config, setting.name)
            if value != setting.default and not is_there:
                yield without(f"{setting.flags[0]} {value}", needs)


def spikes_can_be_told(config: RunConfig, world_size: int) -> Iterator[str]:
    """The window holds as many updates as there must be."""
    training = config.training
    if training.spike_policy != "off" and training.spike_min_steps > training.spike_window:
        yield (
            f"--spike-min-steps {training.spike_min_steps} is above --spike-window {training.spike_window}: no step "
            "would ever be a spike"
        )


def rollback_has_somewhere_to_go(config: RunConfig, world_size: int) -> Iterator[str]:
    """--spike-policy rollback needs whole checkpoints of this run, and of no other."""
    checkpoint = config.checkpoint
    if config.training.spike_policy != "rollback":
        return
    if checkpoint.save is None or checkpoint.save_interval is None:
        yield "--spike-policy rollback goes back to a checkpoint of this run: give --save and --save-interval"
    elif checkpoint.finetune or checkpoint.load is None or Path(checkpoint.load) != Path(checkpoint.save):
        yield (
            f"--spike-policy rollback takes every checkpoint in --save {checkpoint.save} for this run's: give --load "
            f"{checkpoint.save} and no --finetune (--pretrained-checkpoint gives weights to start from)"
        )
    for flag, given in (("--no-save-optim", checkpoint.no_save_optim), ("--no-save-rng", checkpoint.no_save_rng)):
        if given:
            yield f"--spike-policy rollback goes on from a checkpoint, which {flag} makes incomplete: remove one"


RULES: tuple[Rule, ...] = (
    skipping_needs_the_check,
    skipping_spikes_has_a_limit,
    spike_settings_need_their_policy,
    spikes_can_be_told,
    rollback_has_somewhere_to_go,
)
