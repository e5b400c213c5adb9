"""Checks before a run starts: flags, sizes, paths and machine. All problems are reported at once."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from megafp8.checkpoint.foreign_folder import refuse_foreign_folders
from megafp8.config import derived, iterations, mixture, precision_map, rules
from megafp8.config.flags import ParsedArgs, drop_follow_ups
from megafp8.config.layer_backends import LayerBackend
from megafp8.config.megatron_flags import NO_EFFECT
from megafp8.config.micro_batch_sizes import is_auto, possible_sizes, setting_problems, with_size
from megafp8.config.rules.precision import fuses_swiglu_quantization, triton_cast_recipes, uses_op_fuser
from megafp8.config.schema import RunConfig
from megafp8.config.schema.precision import EXCLUDED_BY_DEFAULT, NO_PATTERN
from megafp8.config.settings import with_values
from megafp8.data.epochs import samples_of_epoch
from megafp8.data.manifest_tokenizer import tokenizer_of_shards
from megafp8.device import capability, layer_support
from megafp8.device.capability import Target
from megafp8.device.platform import enable_determinism, limit_device_connections, silence_other_ranks, world_size
from megafp8.errors import CheckpointError, ConfigError, DataError
from megafp8.mcore import cpu_patches
from megafp8.recipes import registry
from megafp8.resilience import fault_injection
from megafp8.resources.automatic import Choice, choose

# ---------------------------------------------------------------------------------------------------------------------
# The settings that megafp8 chose where the command line gives `auto` or nothing, in one line with the reasons.
# `resources/automatic.py` chooses those that are values of the configuration. The ones here follow from the
# configuration and the machine without a change of it.


def format_chosen(choices: Iterable[Choice], with_details: bool = True) -> str:
    """The choices as one line: `chosen: --transformer-impl emulated (no GPU)`; empty for none."""
    choices = tuple(choices)
    shown = [each for each in choices if with_details or not each.is_detail]
    if not shown:
        return ""
    parts = [f"{each.flag} {each.value} ({each.reason})" for each in shown]
    hidden = len(choices) - len(shown)
    return f"chosen: {', '.join(parts)}{f'; {hidden} more with --verbose' if hidden else ''}"


def chosen_settings(config: RunConfig, target: Target, implementation: LayerBackend) -> Iterator[Choice]:
    """The choices that follow from the settings and the machine.

    Transformer Engine chooses its attention kernel in the first step, after which `AttentionReport` records it.

    Args:
        config: with a micro-batch size.
        implementation: the layers in use, see `Run`.
    """
    if config.precision.transformer_impl == "auto":
        yield Choice("--transformer-impl", implementation.name, implementation_reason(target, implementation))
    if config.precision.attention_backend == "auto" and implementation.has_torch_attention:
        yield Choice("--attention-backend", "sdpa", f"the fused kernel of {implementation} layers")
    if implementation.has_fused_kernels:
        yield from chosen_kernels(config)


def implementation_reason(target: Target, implementation: LayerBackend) -> str:
    """Why `--transformer-impl auto` is these layers."""
    if target.kind != "cuda":
        return "no GPU"
    if target.transformer_engine is None:
        return "Transformer Engine is not installed"
    has = "has" if implementation.has_native_gemms else "lacks"
    return f"Transformer Engine {has} the recipes"


def chosen_kernels(config: RunConfig) -> Iterator[Choice]:
    """Kernels that replace those of Transformer Engine's layers."""
    if config.precision.use_transformer_engine_op_fuser is None and uses_op_fuser(config):
        swiglu = "; SwiGLU writes FP8" if fuses_swiglu_quantization(config) else ""
        yield Choice("--use-transformer-engine-op-fuser", "on", f"fused operations for the MLP{swiglu}", is_detail=True)
    if config.precision.quantize_kernels is None:
        used = precision_map.used_recipes(config.precision)
        recipes = [name for name in triton_cast_recipes(config) if name in used]
        if recipes:
            reason = f"faster for {' and '.join(recipes)}, the same bytes"
            yield Choice("--quantize-kernels", "triton", reason, is_detail=True)


# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ValidatedRun:
    """A command line that passed the checks.

    Attributes:
        target: the machine on which it runs.
        implementation: the layers in use.
        world_size: number of ranks.
        warnings: what the user should know but need not fix.
        requested: the configuration of the command line, before choices.
        choices: automatic settings, which `invocation.config` has as values.
    """

    invocation: ParsedArgs
    target: Target
    implementation: LayerBackend
    world_size: int
    warnings: tuple[str, ...]
    requested: RunConfig
    choices: tuple[Choice, ...] = ()


def check(parsed: ParsedArgs, problems: list[str]) -> ValidatedRun:
    """Check a command line, and patch megatron-core for this machine.

    Args:
        problems: found by the parser.

    Raises:
        ConfigError: all problems.
        CheckpointError: a folder to load from holds something else, such as a Hugging Face model.
    """
    # Before the problems of flags: without the weights, the shape of the model is missing, too.
    refuse_foreign_folders(parsed.config.checkpoint)
    warnings, problems = list(parsed.warnings), list(problems)
    config = parsed.config
    config = with_values(config, tokenizer_of_shards(config.data, config.model.vocab_size, warnings, problems))
    ranks = parsed.world_size or world_size()
    if parsed.num_epochs is not None:
        config = with_epochs(config, parsed.num_epochs, ranks, warnings, problems)
    silence_other_ranks(config.logging)  # before megatron-core is imported
    limit_device_connections(config.parallel.tensor_model_parallel_size)
    if config.precision.deterministic_mode:
        enable_determinism()
    target = capability.TARGETS[parsed.target] if parsed.target else capability.detect_target()
    target = dataclasses.replace(target, memory_gib=parsed.gpu_memory_gib, peak_tflops=parsed.gpu_peak_tflops)
    requested = config
    config, choices = choose(requested, target, ranks, saved_config, parsed.given)
    parsed = dataclasses.replace(parsed, config=config, num_epochs=None)
    found = setting_problems(config, ranks)  # of all rules, also with a size that is not known yet
    if is_auto(config.training) and not found:
        # Choices that wait for the size, such as a CUDA graph, may break rules: reported before the trials.
        for size in possible_sizes(config, ranks)[:1]:
            smallest = choose(with_size(requested, size), target, ranks, saved_config, parsed.given)[0]
            found += rules.setting_problems(smallest, ranks)
    found += capability.capability_problems(config, target)
    local_problems = rules.path_problems(config, ranks) + layer_support.package_problems(config.logging)
    local_problems += layer_support.offloading_problems(config.training)
    local_problems += layer_support.exchange_library_problems(mixture.exchange_library(config))
    implementation = capability.layer_backend(config.model, config.precision, target)
    local_problems += layer_support.attention_switch_problems(config.precision, implementation)
    found += fault_problems(config, implementation)
    warnings += rules.warnings(config, implementation, ranks)
    warnings += capability.emulation_warnings(config.model, config.precision, target)
    warnings += capability.environment_warnings(config.precision, implementation)
    warnings += layer_support.expert_launch_warnings(config, target.kind, implementation)
    if parsed.dry_run:
        warnings += unchecked_settings(config)
    if parsed.world_size is None and parsed.target is None:
        found += local_problems
    elif not parsed.dry_run:
        found.append(
            "--world-size and --target describe another machine and need --dry-run: add --dry-run or remove them"
        )
    else:
        warnings += (f"on this machine: {problem}" for problem in local_problems)
    if (parsed.gpu_memory_gib or parsed.gpu_peak_tflops) and parsed.target in (None, "cpu"):
        found.append(
            "--gpu-memory-gib and --gpu-peak-tflops describe a GPU like that of --target: add --target with the most "
            "similar GPU, or remove them"
        )
    found = problems + drop_follow_ups(parsed, found, problems)
    if config.overrides and target.problem is None:
        # Imported only here: megatron-core takes seconds to import, which other errors should not wait for.
        cpu_patches.install()
        from megafp8.mcore.config import override_problems

        found += override_problems(config)
    if found:
        raise ConfigError(found)
    cpu_patches.install()
    return ValidatedRun(parsed, target, implementation, ranks, tuple(warnings), requested, choices)


def with_epochs(
    config: RunConfig, num_epochs: float, world_size: int, warnings: list[str], problems: list[str]
) -> RunConfig:
    """The configuration with the steps that so many passes over the training data take, rounded up.

    Args:
        warnings: to which the number of steps is added.
        problems: to which the reason is added, if the data or the batch has no such number.
    """
    flag, training = f"--num-epochs {num_epochs:g}", config.training
    # Where the number is not known, any will do, so that rules find no further problem with it.
    steps = training.train_iters or 10**6
    if training.train_iters is not None or training.train_samples is not None:
        problems.append(f"{flag} and --train-iters or --train-samples are both given: keep one")
    elif iterations.has_batch_schedule(training):
        problems.append(f"{flag}: the batch size changes during the run; give --train-samples")
    elif config.data.data_phases:
        problems.append(f"{flag}: phases of data have no epochs; give --train-iters or --train-samples")
    else:
        try:
            samples, batch = samples_of_epoch(config.data), iterations.global_batch_size(config, world_size)
        except (ConfigError, DataError, ValueError) as error:
            problems.append(f"{flag}: {error}; give --train-iters")
        else:
            steps = math.ceil(num_epochs * samples / batch)
            length = f"{samples:,} samples = {samples / batch:,.1f} steps"
            warnings.append(f"{flag}: --train-iters {steps:,} (an epoch is {length})")
    return with_values(config, {"training.train_iters": steps})


def check_with_size(validated: ValidatedRun, size: int) -> ValidatedRun:
    """Check a command line with `--micro-batch-size auto` again, as if it had given this size.

    Choices depend on the size: there is no CUDA graph before it is known. All ranks get the same, as at the start.

    Raises:
        ConfigError: the size has problems.
    """
    return check(dataclasses.replace(validated.invocation, config=with_size(validated.requested, size)), [])


def unchecked_settings(config: RunConfig) -> list[str]:
    """Warnings of what a dry run, which has neither parameters nor nodes, does not check."""
    precision, found = config.precision, []
    if not precision.grad_reduce_in_fp8:
        return []
    patterns = [each for each in precision.grad_reduce_fp8_exclude if each not in (*EXCLUDED_BY_DEFAULT, NO_PATTERN)]
    if patterns:
        found.append(
            f"--grad-reduce-fp8-exclude {' '.join(patterns)}: a run, which has the parameters' names, is refused if a "
            "pattern matches none; a dry run does not check this"
        )
    if (intra_node := precision.grad_reduce_fp8_intra_node) != "fp8":
        needed = (
            "all ranks of a replica are on one node"
            if config.parallel.shards_weights
            else "each of several nodes has two or more of the ranks that share gradients, and as many as others"
        )
        found.append(
            f"--grad-reduce-fp8-intra-node {intra_node}: a run, which has nodes, is refused unless {needed}; a dry run "
            "does not check this"
        )
    return found


def fault_problems(config: RunConfig, implementation: LayerBackend) -> list[str]:
    """Problems of the plan of faults, and of a fault at a number that the run does not have: it would never fire."""
    try:
        plan = fault_injection.read_plan(os.environ.get(fault_injection.FAULTS_VARIABLE, ""))
    except ConfigError as error:
        return error.problems
    has_amaxes = implementation.emulates and derived.is_stateful(config.precision)
    if has_amaxes or all(fault.at != "step.amax" for fault in plan):
        return []
    known = " or ".join(recipe.flag for recipe in registry.stateful())
    return [
        f"{fault_injection.FAULTS_VARIABLE}: at=step.amax is in the histories of emulated layers with {known}, which "
        "this run does not have; choose another place, or give these flags and --transformer-impl emulated"
    ]


def saved_config(config: RunConfig) -> Optional[RunConfig]:
    """The configuration in the checkpoint whose optimizer state the run resumes; None if there is none."""
    checkpoint = config.checkpoint
    if checkpoint.load is None or checkpoint.finetune or checkpoint.no_load_optim:
        return None
    cpu_patches.install()
    # Imported only here: megatron-core takes seconds to import, which errors should not wait for.
    from megafp8.checkpoint.metadata import read_config
    from megafp8.checkpoint.resume_point import choose_checkpoint

    try:
        found = choose_checkpoint(Path(checkpoint.load), step=checkpoint.ckpt_step, with_hashes=False)
        return None if found is None else read_config(found.path)
    except CheckpointError:
        return None  # the resume reports it


def short_warnings(warnings: Sequence[str]) -> list[str]:
    """The warnings with those of several flags without effect joined to one that names the flags."""
    flags = [warning.partition(NO_EFFECT)[0] for warning in warnings if NO_EFFECT in warning]
    if len(flags) < 2:
        return list(warnings)
    others = [warning for warning in warnings if NO_EFFECT not in warning]
    return [*others, f"no effect: {', '.join(flags)}; --verbose prints the reasons"]
