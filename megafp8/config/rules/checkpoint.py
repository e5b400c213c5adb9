"""Rules about saving and loading checkpoints."""

from __future__ import annotations

import os
from collections.abc import Iterator

from megafp8.config.rules.base import all_positive, flags_without_effect, no_effect_without
from megafp8.config.schema import RunConfig
from megafp8.utils.integers import round_up


def retained_steps_are_saved(config: RunConfig, world_size: int) -> Iterator[str]:
    """Steps whose checkpoints are kept are steps with checkpoints."""
    retained, saved = config.checkpoint.save_retain_interval, config.checkpoint.save_interval
    if retained is None or config.checkpoint.save is None:
        return
    if saved is None:
        yield no_effect_without(f"--save-retain-interval {retained}", "--save-interval")
    elif all_positive(retained, saved) and retained % saved:
        yield (
            f"--save-retain-interval {retained} is not a multiple of --save-interval {saved}, so most of them have "
            f"no checkpoint: use --save-retain-interval {round_up(retained, saved)}"
        )


def second_folder_is_used(config: RunConfig, world_size: int) -> Iterator[str]:
    """The folder of non-persistent checkpoints needs such checkpoints, and differs from --save."""
    checkpoint = config.checkpoint
    second = checkpoint.non_persistent_global_ckpt_dir
    if second is None:
        return
    if checkpoint.non_persistent_save_interval is None:
        yield no_effect_without(f"--non-persistent-global-ckpt-dir {second}", "--non-persistent-save-interval")
    elif checkpoint.save is not None and os.path.abspath(second) == os.path.abspath(checkpoint.save):
        yield (
            f"--non-persistent-global-ckpt-dir {second} is the same folder as --save, so regular checkpoints would be "
            "deleted: choose another"
        )


def late_saves_end_before_collectives(config: RunConfig, world_size: int) -> Iterator[str]:
    """A save times out before the collectives in which other ranks wait for it."""
    timeout_s, collective_s = config.checkpoint.async_save_timeout, 60 * config.parallel.distributed_timeout_minutes
    if config.checkpoint.async_save and timeout_s >= collective_s:
        yield (
            f"--async-save-timeout {timeout_s} must be below the timeout of collectives, {collective_s} seconds "
            f"(--distributed-timeout-minutes {config.parallel.distributed_timeout_minutes}): lower the first or raise "
            "the second"
        )


def late_saves_end_before_the_run(config: RunConfig, world_size: int) -> Iterator[str]:
    """A save times out before the watchdog ends the run."""
    timeout_s, limit_s = config.checkpoint.async_save_timeout, config.training.checkpoint_timeout_s
    if config.checkpoint.async_save and 0 < limit_s <= timeout_s:
        yield (
            f"--async-save-timeout {timeout_s} must be below --checkpoint-timeout-s {limit_s:g}, after which the "
            "watchdog stops the run: lower the first or raise the second"
        )


def loading_needs_a_folder(config: RunConfig, world_size: int) -> Iterator[str]:
    """What applies to --load and to --pretrained-checkpoint needs one of them."""
    checkpoint = config.checkpoint
    if checkpoint.load is not None or checkpoint.pretrained_checkpoint is not None:
        return
    features = ("--finetune", "--ckpt-verify VALUE", "--use-checkpoint-args")
    yield from flags_without_effect(config, features, "--load")


def grace_is_for_signals(config: RunConfig, world_size: int) -> Iterator[str]:
    """The grace period applies to signals that are handled."""
    training = config.training
    if training.exit_signal_grace_s is not None and not training.exit_signal_handler:
        yield (
            f"--exit-signal-grace-s {training.exit_signal_grace_s:g} has no effect with --no-exit-signal-handler: a "
            "signal ends the process immediately; remove one"
        )


def schedule_has_one_source(config: RunConfig, world_size: int) -> Iterator[str]:
    """On resume, the schedule comes either from the checkpoint or from the flags."""
    checkpoint = config.checkpoint
    if checkpoint.use_checkpoint_opt_param_scheduler and checkpoint.override_opt_param_scheduler:
        yield (
            "--use-checkpoint-opt_param-scheduler and --override-opt_param-scheduler contradict each other: keep one"
        )
