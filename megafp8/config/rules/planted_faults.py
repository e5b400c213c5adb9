"""Rules of `--planted-fault`: where a fault can be planted, and whether it can show."""

from __future__ import annotations

from collections.abc import Iterator

from megafp8.config import iterations, latent_attention, precision_map, topology
from megafp8.config.planted_faults import (
    ALIGNED_SWIGLU,
    HIGH_PRECISION_FAULTS,
    INFLATED_QK,
    MLP_FAULTS,
    SUDDEN_FAULTS,
)
from megafp8.config.planted_linears import LINEARS, has_mlp_of_all_tokens, planted_linears
from megafp8.config.rules.base import Rule, all_positive, batch_schedule, has_whole_replicas, no_effect_without
from megafp8.config.schema import ModelConfig, RunConfig, TrainingConfig
from megafp8.config.settings import settings_by_name, value_of


def planted_fault_has_a_location(config: RunConfig, world_size: int) -> Iterator[str]:
    """--planted-fault needs complete layers, most faults quantized ones, and its settings need it."""
    training, model, parallel, precision = config.training, config.model, config.parallel, config.precision
    flag = f"--planted-fault {training.planted_fault}"
    if training.planted_fault == "none":
        for name in ("planted_fault_step", "planted_fault_growth"):
            setting = settings_by_name()[f"training.{name}"]
            if value_of(config, setting.name) != setting.default:
                yield no_effect_without(f"{setting.flags[0]} {value_of(config, setting.name)}", "--planted-fault")
        return
    if training.planted_fault not in HIGH_PRECISION_FAULTS and not precision_map.is_quantized(precision):
        yield no_effect_without(flag, "--fp8-format, --fp4-format or --precision")
    if parallel.tensor_model_parallel_size > 1 or parallel.pipeline_model_parallel_size > 1:
        yield f"{flag}: the layer must be complete on every rank; use tensor- and pipeline-parallel size 1"
    if precision.fp8_param_gather:
        yield f"{flag} with --fp8-param-gather: the weights have no copy that the fault could change; remove one"
    problems = list(problems_and_fixes(training.planted_fault, model))
    yield from (f"{reason}; {fix}" for reason, fix in problems)
    linear = LINEARS.get(training.planted_fault)
    if linear is None or problems or not precision_map.is_quantized(precision) or not all_positive(model.num_layers):
        return
    if not planted_linears(training.planted_fault, model, precision):
        kind = " of a dense MLP or a shared expert" if training.planted_fault in MLP_FAULTS else ""
        yield (
            f"{flag}: it is planted into a quantized {linear}{kind}, and all are in high precision; quantize one with "
            "--precision, or remove the flag"
        )


def unsupported_in_model(fault: str, model: ModelConfig) -> Iterator[str]:
    """Why a model cannot have a fault, or normalization undoes it; nothing if it can."""
    return (reason for reason, _ in problems_and_fixes(fault, model))


def problems_and_fixes(fault: str, model: ModelConfig) -> Iterator[tuple[str, str]]:
    """The reasons of `unsupported_in_model`, each with what a run may do instead."""
    flag = f"--planted-fault {fault}"
    if fault in MLP_FAULTS and all_positive(model.num_layers) and not has_mlp_of_all_tokens(model):
        yield (
            f"{flag} with --num-experts {model.num_experts}: it is planted into dense MLPs and shared experts, and the "
            "model has only routed experts",
            "add --moe-shared-expert-intermediate-size, or dense layers with --moe-layer-freq, or plant another fault",
        )
    if fault == INFLATED_QK and latent_attention.is_latent(model):
        yield f"{flag} with --multi-latent-attention: queries and keys have no common linear", "remove one"
    if fault == ALIGNED_SWIGLU and not model.swiglu:
        yield (
            f"{flag} without --swiglu: it aligns the weights of SwiGLU",
            "add --swiglu, or use --planted-fault outlier-channel",
        )
    for norm, is_given in (("--qk-layernorm", model.qk_layernorm), ("--qk-l2-norm", model.qk_l2_norm)):
        if fault == INFLATED_QK and is_given:
            yield (
                f"{flag} with {norm}: queries and keys are normalized after the fault, so that the logits cannot grow",
                "remove one",
            )


def planted_fault_shows(config: RunConfig, world_size: int) -> Iterator[str]:
    """A planted fault begins within the run, and its growth has an effect."""
    training = config.training
    fault, first, growth = training.planted_fault, training.planted_fault_step, training.planted_fault_growth
    if fault == "none":
        return
    num_steps, schedule = training.train_iters, batch_schedule(config, world_size)
    if num_steps is None and schedule is not None and all_positive(training.train_samples):
        num_steps = iterations.train_iters(config, world_size)
    if num_steps is not None and first > num_steps:
        yield (
            f"--planted-fault-step {first} is after the last step of the run, {num_steps}: nothing would be planted; "
            f"use at most --planted-fault-step {num_steps}"
        )
    if fault in SUDDEN_FAULTS and growth != TrainingConfig().planted_fault_growth:
        yield no_effect_without(f"--planted-fault-growth {growth:g}", "a gradual --planted-fault, as inflated-qk")


def alignment_reaches_master_weights(config: RunConfig, world_size: int) -> Iterator[str]:
    """--planted-fault aligned-swiglu turns rows of weights; master weights that do not turn would undo it."""
    parallel = config.parallel
    if config.training.planted_fault != ALIGNED_SWIGLU:
        return
    flag = f"--planted-fault {ALIGNED_SWIGLU}"
    if config.optimizer.use_precision_aware_optimizer:
        yield f"{flag} with --use-precision-aware-optimizer: its master weights cannot be turned; remove one"
    if parallel.use_torch_fsdp2:
        yield f"{flag} with --use-torch-fsdp2: a rank has parts of the weights; remove one"
    elif parallel.use_distributed_optimizer and has_whole_replicas(config, world_size):
        ranks = topology.data_parallel_size(config, world_size, with_context_parallel=True)
        if ranks > 1:
            yield (
                f"{flag} with --use-distributed-optimizer: each of {ranks} ranks has a part of the master weights; use "
                "--no-use-distributed-optimizer, or one rank"
            )


RULES: tuple[Rule, ...] = (planted_fault_has_a_location, planted_fault_shows, alignment_reaches_master_weights)
