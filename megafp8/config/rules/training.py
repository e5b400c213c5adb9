"""Rules about batch size and length of the run, profiles, skipped updates and loss spikes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megafp8.config import derived, precision_map, topology
from megafp8.config.rules.base import Rule, all_positive, batch_schedule, no_effect_without
from megafp8.config.schema import AUTO, RunConfig
from megafp8.errors import ConfigError
from megafp8.utils.integers import round_up


def batch_is_given(config: RunConfig, world_size: int) -> Iterator[str]:
    """The micro-batch size and the sequence length have no default."""
    if config.training.micro_batch_size is None:
        yield (
            "--micro-batch-size is missing: sequences per forward pass of a rank; 1 needs the least memory, auto finds "
            "the fastest size that fits"
        )
    if config.data.seq_length is None:
        yield "--seq-length is missing: tokens per training sequence"


def global_batch_divides(config: RunConfig, world_size: int) -> Iterator[str]:
    """Every data-parallel rank has the same number of microbatches per step."""
    micro, batch = config.training.micro_batch_size, config.training.global_batch_size
    if not all_positive(micro, batch) or micro is None or batch is None:
        return
    try:
        ranks = topology.data_parallel_size(config, world_size)
    except ConfigError:
        return
    if batch % (micro * ranks) and not config.training.decrease_batch_size_if_needed:
        yield (
            f"--global-batch-size {batch} is not a multiple of --micro-batch-size x data-parallel size = {micro} x "
            f"{ranks} = {micro * ranks} ({batch} / {micro * ranks} = {batch / (micro * ranks):.4g}): "
            f"use --global-batch-size {round_up(batch, micro * ranks)}"
        )


def automatic_size_divides_a_given_batch(config: RunConfig, world_size: int) -> Iterator[str]:
    """--micro-batch-size auto needs a global batch size, which must not depend on memory, and training steps."""
    training = config.training
    if training.micro_batch_size != AUTO:
        return
    if training.global_batch_size is None and not training.step_batch_size_schedule:
        yield "--micro-batch-size auto needs --global-batch-size, which is missing: sequences per optimizer step"
    if training.skip_train:
        yield "--micro-batch-size auto runs trial training steps, which --skip-train excludes: give a number"


def length_is_given_once(config: RunConfig, world_size: int) -> Iterator[str]:
    """The length of the run is given in steps or in samples."""
    iters, samples = config.training.train_iters, config.training.train_samples
    if iters is None and samples is None:
        yield "the length of the run is missing: give --train-iters (optimizer steps) or --train-samples (sequences)"
    elif iters is not None and samples is not None:
        yield f"--train-iters {iters} and --train-samples {samples} are both given: keep one"


def samples_fill_a_batch(config: RunConfig, world_size: int) -> Iterator[str]:
    """--train-samples is at least one global batch."""
    samples, schedule = config.training.train_samples, batch_schedule(config, world_size)
    if all_positive(samples) and samples is not None and schedule is not None:
        batch = schedule.batch_size_at(0)
        if samples < batch:
            yield f"--train-samples {samples} is less than one global batch of {batch}: use at least {batch}"


BATCH_RULES: tuple[Rule, ...] = (
    batch_is_given,
    global_batch_divides,
    automatic_size_divides_a_given_batch,
    length_is_given_once,
    samples_fill_a_batch,
)


def profiled_ranks_exist(config: RunConfig, world_size: int) -> Iterator[str]:
    """--profile-ranks are ranks of the run."""
    outside = [rank for rank in config.logging.profile_ranks if not 0 <= rank < world_size]
    if outside and config.logging.profile:
        yield (
            f"--profile-ranks {' '.join(map(str, outside))}: no such rank; the ranks of this run are 0 to "
            f"{world_size - 1}"
        )


def profile_ends_after_it_starts(config: RunConfig, world_size: int) -> Iterator[str]:
    """At least one step is profiled."""
    logging = config.logging
    if logging.profile and logging.profile_step_end <= logging.profile_step_start:
        yield (
            f"--profile-step-end {logging.profile_step_end} must be above --profile-step-start "
            f"{logging.profile_step_start}: the end step itself is not profiled"
        )


PROFILE_RULES: tuple[Rule, ...] = (profiled_ranks_exist, profile_ends_after_it_starts)


def skipping_needs_the_check(config: RunConfig, world_size: int) -> Iterator[str]:
    """Updates can be skipped only with the check for non-finite values."""
    training = config.training
    requested = {
        f"--max-skipped-steps {training.max_skipped_steps}": training.max_skipped_steps > 0,
        f"--spike-policy {training.spike_policy}": training.spike_policy != "off",
        f"--on-nonfinite-activation {training.on_nonfinite_activation}": training.on_nonfinite_activation != "warn",
    }
    for flag, given in requested.items():
        if given and not training.check_for_nan_in_loss_and_grad:
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
    for flag, given in (("--no-save-optim", checkpoint.no_save_optim), ("--no-save-rng", checkpoint.no_save_rng)):
        if given:
            yield f"--spike-policy rollback needs complete checkpoints, which {flag} excludes: remove one"


SKIPPED_UPDATE_RULES: tuple[Rule, ...] = (
    skipping_needs_the_check,
    skipping_spikes_has_a_limit,
    nonfinite_activations_are_seen,
    spikes_are_detectable,
    rollback_has_somewhere_to_go,
)
