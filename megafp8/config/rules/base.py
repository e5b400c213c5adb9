"""The type of rules, helpers that rules share, and the rule about unsupported settings.

Limits that depend on the machine are in `device.capability`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any, Optional, Union

from megafp8.config import iterations, topology
from megafp8.config.batch_schedule import BatchSchedule
from megafp8.config.data_phases import parse_phases
from megafp8.config.features import given_flags
from megafp8.config.schema import DataConfig, RunConfig
from megafp8.config.settings import settings_by_name, value_of
from megafp8.errors import ConfigError

Rule = Callable[[RunConfig, int], Iterator[str]]


def rules_of(*modules: ModuleType) -> tuple[Rule, ...]:
    """The rules that modules define, in their order: public generators with the parameters of a rule."""
    return tuple(rule for module in modules for name, rule in vars(module).items() if _is_rule(module, name, rule))


def _is_rule(module: ModuleType, name: str, value: object) -> bool:
    if not inspect.isgeneratorfunction(value) or name.startswith("_") or value.__module__ != module.__name__:
        return False
    return tuple(inspect.signature(value).parameters) == ("config", "world_size")


def all_positive(*values: Optional[float]) -> bool:
    """Whether no value is None and all are above 0, so that a rule can compute with them."""
    return all(value is not None and value > 0 for value in values)


def has_shape(config: RunConfig) -> bool:
    """Whether the sizes of the model and of model parallelism are given and positive."""
    model, parallel = config.model, config.parallel
    return all_positive(
        model.num_layers,
        model.hidden_size,
        model.num_attention_heads,
        model.num_query_groups,
        1 if model.ffn_hidden_size is None else model.ffn_hidden_size,
        1 if model.kv_channels is None else model.kv_channels,
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.context_parallel_size,
    )


def has_whole_replicas(config: RunConfig, world_size: int) -> bool:
    """Whether the ranks divide into model replicas."""
    try:
        topology.data_parallel_size(config, world_size)
    except ConfigError:
        return False
    return True


def read_batch_schedule(config: RunConfig, world_size: int) -> Union[BatchSchedule, str, None]:
    """The batch schedule, or what is wrong with its flags; None if a value that it needs is missing or out of range."""
    training = config.training
    if training.step_batch_size_schedule:
        needed = [config.data.seq_length]
    else:
        needs_ranks = training.global_batch_size is None or training.decrease_batch_size_if_needed
        needed = [training.global_batch_size] if training.global_batch_size is not None else []
        needed += [training.micro_batch_size] if needs_ranks else []
        if needs_ranks and not has_whole_replicas(config, world_size):
            return None
    if not all_positive(*needed):
        return None
    try:
        return iterations.batch_schedule(config, world_size)
    except ConfigError as error:
        return error.problems[0]


def batch_schedule(config: RunConfig, world_size: int) -> Optional[BatchSchedule]:
    """The batch schedule; None if it cannot be computed."""
    schedule = read_batch_schedule(config, world_size)
    return schedule if isinstance(schedule, BatchSchedule) else None


def batch_size(config: RunConfig, world_size: int) -> Optional[int]:
    """The global batch size, under a schedule the last; None if it cannot be computed."""
    schedule = batch_schedule(config, world_size)
    return None if schedule is None else schedule.last_batch_size


def microbatches(config: RunConfig, world_size: int) -> tuple[int, ...]:
    """The number of microbatches per step, of each global batch size of the run; empty if it cannot be computed."""
    schedule = batch_schedule(config, world_size)
    if not all_positive(config.training.micro_batch_size) or schedule is None:
        return ()
    try:
        return tuple(iterations.num_microbatches(config, world_size, each.batch_size) for each in schedule.phases)
    except ConfigError:
        return ()


def shards_by_flag(data: DataConfig) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The values of each flag and data phase that gives token shards, as a blend of prefixes and weights."""
    try:
        phases = parse_phases(data)
    except ConfigError:  # `data_phases_follow_each_other` reports it
        phases = ()
    return (
        ("--data-path", data.data_path),
        ("--train-data-path", data.train_data_path),
        ("--valid-data-path", data.valid_data_path),
        ("--test-data-path", data.test_data_path),
        *((phase.flag, phase.words) for phase in phases),
    )


def no_effect_without(flag: str, needs: str) -> str:
    """The message for a flag that has no effect without another."""
    return f"{flag} has no effect without {needs}: give {needs}, or remove it"


def flags_without_effect(config: RunConfig, features: Iterable[str], needs: str) -> Iterator[str]:
    """The messages for those of several features that a run has, and that have no effect without another."""
    return (no_effect_without(flag, needs) for flag in given_flags(config, features).values())


def excluded(config: RunConfig, flag: str, reasons: Mapping[str, str]) -> Iterator[str]:
    """The messages for those of several features that a run has, and that a flag excludes."""
    return (f"{flag} with {text}: {reasons[feature]}" for feature, text in given_flags(config, reasons).items())


def not_supported(config: RunConfig, flag: str, reasons: Mapping[str, str]) -> Iterator[str]:
    """As `excluded`, for features of which one has to be removed."""
    for feature, text in given_flags(config, reasons).items():
        yield f"{text} is not supported with {flag}: {reasons[feature]}; remove one of them"


# Settings of Megatron-LM that are parsed: the values that are supported, and why others are not.
UNSUPPORTED_SETTINGS: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    (
        "checkpoint.non_persistent_ckpt_type",
        ("global",),
        "a checkpoint on local disks is lost with any of the machines, because its parts are not replicated. Use "
        "global and a folder shared by all ranks (--non-persistent-global-ckpt-dir)",
    ),
    (
        "optimizer.muon_scalar_optimizer",
        ("adam",),
        "weights that Muon does not train are AdamW's. Use adam",
    ),
    (
        "optimizer.muon_fp32_matmul_prec",
        ("medium", "high", "highest"),
        "torch has no such precision, and Megatron-LM fails at the first step. Use medium, which is BF16",
    ),
    (
        "data.dataloader_type",
        ("single",),
        "the dataset index shuffles documents and samples, and the loader reads them in its order. Use single",
    ),
    (
        "checkpoint.ckpt_format",
        ("torch_dist",),
        "checkpoints have one format, which every layout can load. Use torch_dist; Megatron-LM converts its other "
        "formats with --ckpt-convert-format torch_dist",
    ),
    (
        "training.data_parallel_random_init",
        (False,),
        "initial weights depend only on the seed and the parameter names, so data-parallel ranks are equal. Remove it",
    ),
)


def unsupported_settings_are_refused(config: RunConfig, world_size: int) -> Iterator[str]:
    """A request for an unsupported feature is an error and is not ignored."""
    for name, supported, reason in UNSUPPORTED_SETTINGS:
        value = value_of(config, name)
        if value not in supported:
            yield f"{settings_by_name()[name].as_flag(value)}: {reason}"
