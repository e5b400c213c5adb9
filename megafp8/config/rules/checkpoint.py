"""Rules about saving and loading checkpoints, and about Weights & Biases."""

from __future__ import annotations

import os
from collections.abc import Iterator

from megafp8.config.rules.base import Rule, flags_without_effect, no_effect_without
from megafp8.config.schema import RunConfig


def saving_needs_a_folder(config: RunConfig, world_size: int) -> Iterator[str]:
    """Settings of saving need --save."""
    checkpoint = config.checkpoint
    if checkpoint.save is not None:
        return
    requested = {
        f"--save-interval {checkpoint.save_interval}": checkpoint.save_interval is not None,
        f"--ckpt-keep {checkpoint.ckpt_keep}": checkpoint.ckpt_keep is not None,
        "--async-save": checkpoint.async_save,
        f"--non-persistent-save-interval {checkpoint.non_persistent_save_interval}": (
            checkpoint.non_persistent_save_interval is not None
        ),
        "--no-save-optim": checkpoint.no_save_optim,
        "--no-save-rng": checkpoint.no_save_rng,
    }
    yield from flags_without_effect(requested, "--save")


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
    """Settings of loading need --load."""
    checkpoint = config.checkpoint
    if checkpoint.load is not None:
        return
    requested = {
        "--no-load-optim": checkpoint.no_load_optim,
        "--no-load-rng": checkpoint.no_load_rng,
        "--finetune": checkpoint.finetune and checkpoint.pretrained_checkpoint is None,
        "--exit-on-missing-checkpoint": checkpoint.exit_on_missing_checkpoint,
        f"--ckpt-step {checkpoint.ckpt_step}": checkpoint.ckpt_step is not None,
        "--use-checkpoint-opt_param-scheduler": checkpoint.use_checkpoint_opt_param_scheduler,
        "--override-opt_param-scheduler": checkpoint.override_opt_param_scheduler,
        "--override-sample-order": checkpoint.override_sample_order,
        "--override-precision": checkpoint.override_precision,
        f"--ckpt-verify {checkpoint.ckpt_verify}": checkpoint.ckpt_verify != "hash"
        and checkpoint.pretrained_checkpoint is None,
    }
    yield from flags_without_effect(requested, "--load")


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


def wandb_settings_need_a_project(config: RunConfig, world_size: int) -> Iterator[str]:
    """Settings of Weights & Biases need --wandb-project."""
    logging = config.logging
    if logging.wandb_project:
        return
    requested = {
        "--wandb-entity": logging.wandb_entity,
        "--wandb-exp-name": logging.wandb_exp_name,
        "--wandb-save-dir": logging.wandb_save_dir,
    }
    # Megatron-LM's scripts pass empty strings for names that are not set.
    for flag, value in requested.items():
        if value:
            yield no_effect_without(f"{flag} {value}", "--wandb-project")


RULES: tuple[Rule, ...] = (
    saving_needs_a_folder,
    second_folder_is_used,
    late_saves_end_before_collectives,
    late_saves_end_before_the_run,
    loading_needs_a_folder,
    grace_is_for_signals,
    schedule_has_one_source,
    wandb_settings_need_a_project,
)
