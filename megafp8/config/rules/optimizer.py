"""Rules about the optimizer and the learning-rate schedule."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType
from typing import Optional

from megafp8.config import derived, iterations, sharding
from megafp8.config.features import VALUE, given_flags
from megafp8.config.lr_schedule import ScheduleSamples, schedule_samples
from megafp8.config.mup import width_multiplier
from megafp8.config.optimizers import MOMENTS, steps_problem, updates_matrices
from megafp8.config.rules.base import all_positive, batch_size, flags_without_effect, not_supported
from megafp8.config.schema import RunConfig


def learning_rate_is_given(config: RunConfig, world_size: int) -> Iterator[str]:
    """The learning rate has no default."""
    if config.optimizer.lr is None:
        yield "--lr is missing: the peak learning rate, for example 3e-4"


def learning_rate_is_the_peak(config: RunConfig, world_size: int) -> Iterator[str]:
    """The schedule starts and ends no higher than its peak."""
    optimizer, width = config.optimizer, max(1.0, width_multiplier(config.model))
    of_matrices = None if optimizer.lr is None else optimizer.lr / width
    init_peak = "--lr" if width == 1 else f"--lr / {width:g} (of matrices with --use-mup) ="
    for end_flag, end, peak_flag, peak in (
        ("--min-lr", optimizer.min_lr, "--lr", optimizer.lr),
        ("--lr-warmup-init", optimizer.lr_warmup_init, init_peak, of_matrices),
        ("--decoupled-min-lr", optimizer.decoupled_min_lr, "--decoupled-lr", optimizer.decoupled_lr),
    ):
        if end is not None and peak is not None and end > peak:
            yield f"{end_flag} {end:g} is above {peak_flag} {peak:g}: lower it"


def schedule_is_counted_like_the_run(config: RunConfig, world_size: int) -> Iterator[str]:
    """Run and schedule are both counted in steps or both in samples."""
    by_samples = config.training.train_iters is None and config.training.train_samples is not None
    unit, other_unit = ("iters", "samples") if by_samples else ("samples", "iters")
    features = [f"--lr-{part}-{unit} {VALUE}" for part in ("decay", "warmup", "wsd-decay")]
    for text in given_flags(config, features).values():
        yield (
            f"{text} with --train-{other_unit}: use {text.split()[0].replace(unit, other_unit)}, because the length of "
            "the run and the schedule need the same unit"
        )


def warmup_is_given_once(config: RunConfig, world_size: int) -> Iterator[str]:
    """Warm-up is given as a fraction or as a count."""
    fraction = config.optimizer.lr_warmup_fraction
    if fraction is not None:
        for text in given_flags(config, ("--lr-warmup-iters VALUE", "--lr-warmup-samples VALUE")).values():
            yield f"--lr-warmup-fraction {fraction:g} and {text} are both given: keep one"


def warmup_ends_within_the_schedule(config: RunConfig, world_size: int) -> Iterator[str]:
    """Warm-up is shorter than the schedule."""
    samples = known_schedule(config, world_size)
    if samples is not None and samples.warmup >= samples.decay:
        until = iterations.batch_schedule(config, world_size).steps_until
        yield (
            f"the warmup of {samples.warmup:g} samples ({until(samples.warmup):g} steps) is not shorter than the "
            f"schedule of {samples.decay} samples ({until(samples.decay):g} steps): lower --lr-warmup-iters, "
            "--lr-warmup-samples or --lr-warmup-fraction, or make the schedule longer"
        )


def wsd_has_its_decay(config: RunConfig, world_size: int) -> Iterator[str]:
    """The decay of WSD (warm-up, stable, decay) has no default length, and fits the schedule."""
    optimizer = config.optimizer
    if optimizer.lr_decay_style != "WSD":
        return
    if optimizer.lr_wsd_decay_iters is None and optimizer.lr_wsd_decay_samples is None:
        yield "--lr-decay-style WSD needs the length of its decay: --lr-wsd-decay-iters (or --lr-wsd-decay-samples)"
        return
    samples = known_schedule(config, world_size)
    if samples is not None and samples.wsd_decay is not None and samples.wsd_decay + samples.warmup > samples.decay:
        yield (
            f"WSD's decay of {samples.wsd_decay} samples and the warmup of {samples.warmup:g} samples exceed the "
            f"schedule of {samples.decay} samples: lower --lr-wsd-decay-iters or --lr-wsd-decay-samples"
        )


def weight_decay_has_its_ends(config: RunConfig, world_size: int) -> Iterator[str]:
    """A changing weight decay has a start and an end; a constant one has neither."""
    optimizer = config.optimizer
    start, end, style = optimizer.start_weight_decay, optimizer.end_weight_decay, optimizer.weight_decay_incr_style
    if style == "constant":
        if start is not None or end is not None:
            yield (
                "--start-weight-decay and --end-weight-decay have no effect with --weight-decay-incr-style constant: "
                "use linear or cosine, or give --weight-decay alone"
            )
    elif start is None or end is None:
        yield f"--weight-decay-incr-style {style} needs --start-weight-decay and --end-weight-decay"
    elif end < start:
        yield f"--end-weight-decay {end:g} is below --start-weight-decay {start:g}: weight decay can only increase"


def fixed_loss_scale_has_a_scaler(config: RunConfig, world_size: int) -> Iterator[str]:
    """megatron-core's FP32 optimizer without flat shards ignores the loss scale."""
    loss_scale, dtype = config.optimizer.loss_scale, derived.params_dtype(config.precision)
    has_fp32_optimizer = config.parallel.use_distributed_optimizer is False or updates_matrices(config.optimizer)
    if loss_scale is not None and dtype == "fp32" and has_fp32_optimizer:
        yield (
            f"--loss-scale {loss_scale:g} has no effect on megatron-core's FP32 optimizer: give "
            "--use-distributed-optimizer (also for one rank), --bf16 or --fp16, or remove it"
        )


def dynamic_loss_scale_can_move(config: RunConfig, world_size: int) -> Iterator[str]:
    """The dynamic loss scale starts at its minimum or above, and its window is an integer number of steps."""
    optimizer = config.optimizer
    if optimizer.min_loss_scale > optimizer.initial_loss_scale:
        yield (
            f"--min-loss-scale {optimizer.min_loss_scale:g} is above --initial-loss-scale "
            f"{optimizer.initial_loss_scale:g}: lower it"
        )
    if optimizer.loss_scale_window % 1:
        yield (f"--loss-scale-window {optimizer.loss_scale_window:g} must be an integer number of steps: round it")


def sharded_state_has_a_layout(config: RunConfig, world_size: int) -> Iterator[str]:
    """The moments of Adam and Muon can be sharded and saved, the state of SGD cannot."""
    name = config.optimizer.optimizer
    if config.parallel.use_distributed_optimizer and name not in MOMENTS:
        yield f"--use-distributed-optimizer supports only --optimizer adam and muon, not {name}: remove one of them"


MUON_EXCLUDES = MappingProxyType(
    {
        "--overlap-param-gather": "updated weights are sent by their owners and not gathered in buckets",
        sharding.FLAG: "ranks have rows of a matrix, and Muon needs all of it",
    }
)


def muon_has_complete_matrices(config: RunConfig, world_size: int) -> Iterator[str]:
    """Settings that cut matrices, or that keep no FP32 weights to which Muon could add its update."""
    if updates_matrices(config.optimizer):
        yield from not_supported(config, "--optimizer muon", MUON_EXCLUDES)


MUP_EXCLUDES = MappingProxyType(
    {
        "--optimizer muon": "its updates do not shrink with the width as those of Adam do",
        "--optimizer sgd": "the learning rates of muP are those of Adam",
        "--multi-latent-attention": "its softmax has a scale of its own, and its low ranks a width of their own",
        "--num-experts": "how a router and its experts scale with the width is not settled",
        "--mtp-num-layers": "its projection of two hidden states is not tested",
        "--softmax-scale VALUE": "--mup-base-head-dim and --mup-attn-scale-power give it",
        "--embedding-multiplier VALUE": "--mup-embedding-mult gives it",
        "--logits-scaling VALUE": "--mup-output-mult gives it",
    }
)


def mup_has_its_scaling(config: RunConfig, world_size: int) -> Iterator[str]:
    """Features whose scaling with the width is another or not known, and other flags for the multipliers of muP."""
    if config.model.use_mup:
        yield from not_supported(config, "--use-mup", MUP_EXCLUDES)


def newton_schulz_steps_fit(config: RunConfig, world_size: int) -> Iterator[str]:
    """A set of coefficients has a polynomial for each step."""
    problem = steps_problem(config.optimizer)
    if updates_matrices(config.optimizer) and problem is not None:
        yield problem


def low_precision_state_needs_its_switch(config: RunConfig, world_size: int) -> Iterator[str]:
    """The dtypes of optimizer state need the precision-aware optimizer, which needs the distributed optimizer."""
    optimizer = config.optimizer
    if not optimizer.use_precision_aware_optimizer:
        states = ("main-grads", "main-params", "exp-avg", "exp-avg-sq")
        dtypes = [f"--{state}-dtype {VALUE}" for state in states]
        yield from flags_without_effect(config, dtypes, "--use-precision-aware-optimizer")
        return
    if optimizer.optimizer != "adam":
        yield f"--use-precision-aware-optimizer supports only --optimizer adam, not {optimizer.optimizer}"
    if config.parallel.shards_optimizer is False:
        yield "--use-precision-aware-optimizer needs --use-distributed-optimizer"
    if optimizer.main_params_dtype == "fp16" and derived.params_dtype(config.precision) == "fp32":
        yield "--main-params-dtype fp16 with weights in FP32, which have no master weights: also give --bf16"
    if optimizer.main_grads_dtype == "bf16" and not config.precision.grad_reduce_in_bf16:
        yield (
            "--main-grads-dtype bf16: the optimizer reads the reduced gradients, which are FP32; also give "
            "--grad-reduce-in-bf16"
        )


def average_is_of_fp32_weights(config: RunConfig, world_size: int) -> Iterator[str]:
    """The moving average is that of FP32 weights, and the FP8 weights of a validation are cast from it."""
    optimizer, precision = config.optimizer, config.precision
    if optimizer.ema_decay is None or not optimizer.use_precision_aware_optimizer:
        return
    if optimizer.main_params_dtype != "fp32":
        yield (
            f"--ema-decay with --main-params-dtype {optimizer.main_params_dtype}: a moving average is that of FP32 "
            "weights, and updates of one are smaller than the rounding of FP16; remove one of them"
        )
    if precision.fp8_param_gather and derived.is_stateful(precision):
        yield (
            "--ema-decay with --use-precision-aware-optimizer and --fp8-param-gather under delayed scaling: Adam keeps "
            "the FP32 weights and casts them itself, so that no average could be validated; remove one of them"
        )


def average_is_updated(config: RunConfig, world_size: int) -> Iterator[str]:
    """The moving average has an update within the run, and --eval-ema has validations."""
    optimizer, training = config.optimizer, config.training
    if optimizer.ema_decay is None:
        return
    steps, interval = training.train_iters, optimizer.ema_interval
    if steps is not None and 0 < steps < interval:
        yield f"--ema-interval {interval} is above the {steps} steps of the run (--train-iters): give at most {steps}"
    if training.eval_ema and training.eval_iters == 0:
        yield "--eval-ema with --eval-iters 0, which leaves out all validations: remove one of them"


def known_schedule(config: RunConfig, world_size: int) -> Optional[ScheduleSamples]:
    """The lengths of the schedules; None if the length of the run or the batch size is unknown."""
    length = config.training.train_iters or config.training.train_samples
    if batch_size(config, world_size) is None or not all_positive(length):
        return None
    samples = schedule_samples(config, world_size)
    return samples if samples.decay > 0 else None
