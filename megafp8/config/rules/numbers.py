"""Numbers that are out of range by themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Optional

from megafp8.config.rules.rule import Rule
from megafp8.config.schema import AUTO, RunConfig
from megafp8.config.settings import settings_by_name, value_of


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


_COUNT = _Range(1)
_NOT_NEGATIVE = _Range(0)
_ABOVE_0 = _Range(0, low_open=True)
_SHARE = _Range(0, 1, high_open=True)
_PART = _Range(0, 1, low_open=True)
_PAIR = _Range(2)
_FP32_POWER = _Range(-126, 126)  # of two

_SETTINGS_OF_RANGE: tuple[tuple[_Range, str], ...] = (
    (
        _COUNT,
        "model.num_layers model.hidden_size model.ffn_hidden_size model.num_attention_heads model.kv_channels "
        "model.num_query_groups model.max_position_embeddings model.rotary_base model.vocab_size "
        "model.rotary_seq_len_interpolation_factor model.make_vocab_size_divisible_by model.window_size "
        "parallel.tensor_model_parallel_size parallel.pipeline_model_parallel_size parallel.context_parallel_size "
        "parallel.num_layers_per_virtual_pipeline_stage parallel.num_virtual_stages_per_pipeline_rank "
        "parallel.ddp_bucket_size parallel.distributed_timeout_minutes "
        "precision.fp8_amax_history_len optimizer.lr_decay_iters optimizer.lr_decay_samples "
        "optimizer.lr_wsd_decay_iters optimizer.lr_wsd_decay_samples optimizer.hysteresis "
        "data.seq_length data.tiktoken_num_special_tokens "
        "training.micro_batch_size training.global_batch_size training.train_iters training.train_samples "
        "training.eval_interval training.exit_interval training.exit_duration_in_mins "
        "training.recompute_num_layers training.num_threads checkpoint.save_interval checkpoint.ckpt_keep "
        "training.spike_rollback_steps training.spike_skip_batches training.max_rollbacks "
        "training.check_weight_hash_across_dp_replicas_interval training.cuda_graph_warmup_steps "
        "checkpoint.ckpt_step checkpoint.async_save_timeout "
        "checkpoint.non_persistent_save_interval "
        "logging.log_interval logging.tensorboard_log_interval logging.fp8_log_interval",
    ),
    (
        _NOT_NEGATIVE,
        "checkpoint.ckpt_max_failures "
        "model.init_method_std precision.num_layers_at_start_in_bf16 precision.num_layers_at_end_in_bf16 "
        "optimizer.min_lr optimizer.lr_warmup_init optimizer.lr_warmup_iters optimizer.lr_warmup_samples "
        "optimizer.decoupled_min_lr optimizer.weight_decay optimizer.start_weight_decay optimizer.end_weight_decay "
        "optimizer.clip_grad data.num_workers training.eval_iters training.seed training.manual_gc_interval "
        "training.step_timeout_s training.checkpoint_timeout_s training.max_crashes training.max_skipped_steps "
        "logging.profile_step_start logging.profile_step_end logging.logging_level",
    ),
    (
        _ABOVE_0,
        "model.norm_epsilon model.rope_scaling_factor optimizer.lr optimizer.decoupled_lr optimizer.adam_eps "
        "optimizer.loss_scale optimizer.initial_loss_scale optimizer.min_loss_scale optimizer.loss_scale_window "
        "training.exit_signal_grace_s training.spike_sigma training.micro_batch_size_memory_limit "
        "parallel.rendezvous_timeout_s",
    ),
    (
        _SHARE,
        "model.attention_dropout model.hidden_dropout optimizer.adam_beta1 optimizer.adam_beta2 "
        "optimizer.sgd_momentum optimizer.lr_warmup_fraction",
    ),
    (_PART, "model.rotary_percent"),
    (_PAIR, "training.spike_window training.spike_min_steps"),
    (_FP32_POWER, "precision.fp8_margin"),
)

RANGES: Mapping[str, _Range] = MappingProxyType(
    {name: allowed for allowed, names in _SETTINGS_OF_RANGE for name in names.split()}
)
"""The values that a setting may have, under its name."""


def numbers_are_in_range(config: RunConfig, world_size: int) -> Iterator[str]:
    """Every count is at least 1, every probability below 1, and so on."""
    for name, allowed in RANGES.items():
        setting, value = settings_by_name()[name], value_of(config, name)
        if value is not None and not allowed.holds(value) and not (setting.auto and value == AUTO):
            yield f"{setting.flags[0]} {value} must be {allowed}"


def profiled_ranks_exist(config: RunConfig, world_size: int) -> Iterator[str]:
    """--profile-ranks are ranks of this run."""
    outside = [rank for rank in config.logging.profile_ranks if not 0 <= rank < world_size]
    if outside and config.logging.profile:
        yield f"--profile-ranks {' '.join(map(str, outside))}: the ranks of this run are 0 to {world_size - 1}"


def profile_ends_after_it_starts(config: RunConfig, world_size: int) -> Iterator[str]:
    """The profiled steps are at least one."""
    logging = config.logging
    if logging.profile and logging.profile_step_end <= logging.profile_step_start:
        yield (
            f"--profile-step-end {logging.profile_step_end} must be above --profile-step-start "
            f"{logging.profile_step_start}: the end is the step after the last profiled one"
        )


RULES: tuple[Rule, ...] = (numbers_are_in_range, profiled_ranks_exist, profile_ends_after_it_starts)
