"""Rules about batch size and length of the run, ranges of numbers, skipped updates and loss spikes."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Optional

from megafp8.config import derived, precision_map, topology
from megafp8.config.rules.base import Rule, all_positive, batch_schedule, no_effect_without
from megafp8.config.schema import AUTO, RunConfig
from megafp8.config.settings import settings_by_name, value_of
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
        if training.micro_batch_size_memory_limit is not None:
            effect = f"--micro-batch-size-memory-limit {training.micro_batch_size_memory_limit:g}"
            yield no_effect_without(effect, "--micro-batch-size auto")
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


@dataclass(frozen=True)
class _Range:
    low: float
    high: Optional[float] = None
    low_open: bool = False
    high_open: bool = False

    def holds(self, value: float) -> bool:
        above = value > self.low if self.low_open else value >= self.low
        if self.high is None:
            return above
        return above and (value < self.high if self.high_open else value <= self.high)

    def __str__(self) -> str:
        if self.high is None:
            return f"above {self.low:g}" if self.low_open else f"at least {self.low:g}"
        return f"in {'(' if self.low_open else '['}{self.low:g}, {self.high:g}{')' if self.high_open else ']'}"


_AT_LEAST_1 = _Range(1)
_NOT_NEGATIVE = _Range(0)
# Numbers far above all that models use, but small enough that no product of a few of them overflows.
_COEFFICIENT = _Range(0, 1e3)
_POSITIVE_COEFFICIENT = _Range(0, 1e3, low_open=True)
_LIMIT = _Range(0, 1e12)
_POSITIVE_LIMIT = _Range(0, 1e12, low_open=True)
_ROTARY = _Range(1, 1e12)
_SIGNED = _Range(-1e12, 1e12)
_GROWTH = _Range(1, 1e3, low_open=True)
_LOSS_SCALE = _Range(0, 2.0**126, low_open=True)
_FRACTION_BELOW_1 = _Range(0, 1, high_open=True)
_FRACTION_ABOVE_0 = _Range(0, 1, low_open=True)
_AT_LEAST_3 = _Range(3)
_FP32_EXPONENT = _Range(-126, 126)  # of two
_SETTINGS_BY_RANGE: Mapping[_Range, str] = {
    _AT_LEAST_1: (
        "model.num_layers model.hidden_size model.ffn_hidden_size model.num_attention_heads model.kv_channels "
        "model.moe_ffn_hidden_size model.moe_shared_expert_intermediate_size model.moe_router_topk "
        "model.moe_router_num_groups model.moe_router_group_topk parallel.expert_model_parallel_size "
        "parallel.moe_flex_dispatcher_num_sms "
        "parallel.expert_tensor_parallel_size model.mtp_num_layers "
        "model.q_lora_rank model.kv_lora_rank model.qk_head_dim model.qk_pos_emb_head_dim model.v_head_dim "
        "model.num_query_groups model.max_position_embeddings model.vocab_size "
        "model.rotary_seq_len_interpolation_factor model.make_vocab_size_divisible_by "
        "model.rotary_base_local "
        "model.yarn_original_max_position_embeddings "
        "parallel.tensor_model_parallel_size parallel.pipeline_model_parallel_size parallel.context_parallel_size "
        "parallel.num_layers_per_virtual_pipeline_stage parallel.num_virtual_stages_per_pipeline_rank "
        "parallel.decoder_first_pipeline_num_layers parallel.decoder_last_pipeline_num_layers "
        "parallel.microbatch_group_size_per_virtual_pipeline_stage "
        "parallel.ddp_bucket_size parallel.distributed_timeout_minutes parallel.num_distributed_optimizer_instances "
        "precision.fp8_amax_history_len optimizer.lr_decay_iters optimizer.lr_decay_samples "
        "optimizer.lr_wsd_decay_iters optimizer.lr_wsd_decay_samples optimizer.hysteresis "
        "data.seq_length data.tiktoken_num_special_tokens "
        "training.micro_batch_size training.global_batch_size training.train_iters training.train_samples "
        "training.eval_interval training.start_eval_at_iter training.eval_global_batch_size training.exit_interval "
        "training.exit_duration_in_mins "
        "training.recompute_num_layers training.num_threads checkpoint.save_interval checkpoint.ckpt_keep "
        "checkpoint.save_retain_interval model.padded_vocab_size "
        "training.spike_rollback_steps training.spike_skip_batches training.max_rollbacks "
        "training.fp8_guard_interval training.planted_fault_step "
        "training.check_weight_hash_across_dp_replicas_interval "
        "checkpoint.ckpt_step checkpoint.async_save_timeout "
        "checkpoint.non_persistent_save_interval "
        "optimizer.muon_num_ns_steps logging.log_interval logging.tensorboard_log_interval logging.fp8_log_interval"
    ),
    _ROTARY: "model.rotary_base model.rotary_scaling_factor",
    _GROWTH: "training.planted_fault_growth",
    _NOT_NEGATIVE: (
        "training.cuda_graph_warmup_steps training.min_offloaded_tensor_size "
        "checkpoint.ckpt_max_failures model.num_experts "
        "precision.num_layers_at_start_in_bf16 precision.num_layers_at_end_in_bf16 "
        "optimizer.lr_warmup_iters optimizer.lr_warmup_samples "
        "data.num_workers training.eval_iters training.seed training.manual_gc_interval "
        "training.max_crashes training.max_skipped_steps "
        "logging.profile_step_start logging.profile_step_end logging.profile_ranks logging.logging_level"
    ),
    _COEFFICIENT: (
        "model.moe_aux_loss_coeff model.moe_z_loss_coeff model.moe_router_bias_update_rate "
        "model.mtp_loss_scaling_factor "
        "model.init_method_std model.embedding_init_method_std model.mscale model.mscale_all_dim "
        "optimizer.min_lr optimizer.lr_warmup_init "
        "optimizer.decoupled_min_lr optimizer.weight_decay optimizer.start_weight_decay optimizer.end_weight_decay"
    ),
    _POSITIVE_COEFFICIENT: (
        "model.moe_router_topk_scaling_factor optimizer.lr optimizer.decoupled_lr optimizer.muon_extra_scale_factor"
    ),
    _LIMIT: "optimizer.clip_grad training.step_timeout_s training.checkpoint_timeout_s",
    _POSITIVE_LIMIT: (
        "model.rope_scaling_factor model.yarn_beta_fast model.yarn_beta_slow "
        "model.attention_logit_softcapping model.output_logit_softcapping model.activation_func_clamp_value "
        "model.softmax_scale model.logits_scaling model.embedding_multiplier model.residual_multiplier "
        "optimizer.loss_scale_window training.exit_signal_grace_s training.spike_sigma training.spike_norm_factor "
        "training.micro_batch_size_memory_limit parallel.rendezvous_timeout_s"
    ),
    _SIGNED: "model.glu_linear_offset model.moe_expert_capacity_factor",  # a capacity below 0 is none
    _LOSS_SCALE: "optimizer.loss_scale optimizer.initial_loss_scale optimizer.min_loss_scale",
    _FRACTION_BELOW_1: (
        "model.moe_input_jitter_eps "
        "model.attention_dropout model.hidden_dropout optimizer.adam_beta1 optimizer.adam_beta2 "
        "optimizer.sgd_momentum optimizer.muon_momentum optimizer.lr_warmup_fraction"
    ),
    _FRACTION_ABOVE_0: "model.rotary_percent model.norm_epsilon optimizer.adam_eps",
    _AT_LEAST_3: "training.spike_window training.spike_min_steps",
    _FP32_EXPONENT: "precision.fp8_margin precision.fp8_tensorwise_margin",
}
RANGES: Mapping[str, _Range] = MappingProxyType(
    {name: allowed for allowed, names in _SETTINGS_BY_RANGE.items() for name in names.split()}
)
"""The range of each numeric setting, by its name."""
_values_with_a_range = operator.attrgetter(*RANGES)


def numbers_are_in_range(config: RunConfig, world_size: int) -> Iterator[str]:
    """Every number is in its range."""
    for (name, allowed), value in zip(RANGES.items(), _values_with_a_range(config), strict=True):
        if value is None or all(map(allowed.holds, value if isinstance(value, tuple) else (value,))):
            continue
        setting = settings_by_name()[name]
        if not (setting.auto and value == AUTO):
            yield f"{setting.as_flag(value)} must be {allowed}"


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


RANGE_RULES: tuple[Rule, ...] = (numbers_are_in_range, profiled_ranks_exist, profile_ends_after_it_starts)
SPIKE_SETTINGS = ("spike_window", "spike_sigma", "spike_min_steps", "spike_norm_factor")
ROLLBACK_SETTINGS = ("spike_rollback_steps", "spike_skip_batches", "max_rollbacks")


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


def spike_settings_need_their_policy(config: RunConfig, world_size: int) -> Iterator[str]:
    """Settings of a spike policy need it."""
    policy = config.training.spike_policy
    for names, needs, is_there in (
        (SPIKE_SETTINGS, "--spike-policy", policy != "off"),
        (ROLLBACK_SETTINGS, "--spike-policy rollback", policy == "rollback"),
    ):
        for setting in (settings_by_name()[f"training.{name}"] for name in names):
            value = value_of(config, setting.name)
            if value != setting.default and not is_there:
                yield no_effect_without(f"{setting.flags[0]} {value}", needs)


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
    spike_settings_need_their_policy,
    spikes_are_detectable,
    rollback_has_somewhere_to_go,
)
