"""Automatic settings: what a run chooses where the command line leaves a choice, each with its reason.

    --use-distributed-optimizer      on GPUs with Adam, unless the checkpoint to resume was saved without it
    --overlap-grad-reduce            with the distributed optimizer of several data-parallel ranks
    --overlap-param-gather           the same
    registered NCCL buffers          with the latter (`device/nccl_buffers.py`)
    --cross-entropy-loss-fusion      Transformer Engine's kernel, with its layers
    --moe-token-dispatcher-type      peer for expert-parallel ranks of one node, with experts in one launch
    --cuda-graph-impl                local where a step can be captured and memory allows it
    --cuda-graph-evaluation          on one GPU whose steps are a graph, without experts
    --moe-expert-kernels             all experts in one launch, with Transformer Engine's layers and these settings

On a CPU only a checkpoint that was saved with the distributed optimizer turns one of them on. On every device:

    --no-gradient-accumulation-fusion  with sharded weights: there is no buffer with complete gradients

All these keep the recipe of every layer and the dtype of all state. Sums may have another order, and fused kernels may
round at other points. The same holds for fused operations, a default of `config/rules/precision.py`. Under delayed
scaling these also cast weights in every microbatch, with scales that may have changed. Recipes and dtypes are changed
only by `--performance max`, with Transformer Engine's layers:

    --precision output_layer=RECIPE  the output layer in FP8, where the recipe of the layers names one for it
    --use-precision-aware-optimizer  with both moments of Adam in BF16, where the one-pass update has them

A flag always wins. The configuration that a run records has the values that were chosen.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple, Optional

from megafp8.config import derived, dimensions, precision_map, rules, sharding, topology
from megafp8.config.expert_layers import is_mixture
from megafp8.config.fused_adam import fused_adam_problem
from megafp8.config.grouped_experts import grouped_expert_problems, peer_problems
from megafp8.config.layer_backends import LayerBackend
from megafp8.config.mixture import PEER, token_dispatcher
from megafp8.config.optimizers import has_flat_shards
from megafp8.config.rules.cuda_graph import default_graph_problems, evaluation_graph_problems
from megafp8.config.run_sizes import run_sizes
from megafp8.config.schema import PrecisionConfig, RunConfig
from megafp8.config.schema.setting import Role
from megafp8.config.settings import settings_by_name, settings_with, value_of, with_values
from megafp8.device import capability, nccl_buffers
from megafp8.device.capability import Target
from megafp8.device.gpus import Gpu, gpu_of
from megafp8.recipes import registry
from megafp8.resilience import fault_injection
from megafp8.resources.memory import cuda_graph_memory_bytes, estimate_stages
from megafp8.resources.micro_batch import gib
from megafp8.resources.mixture_memory import FREE_MEMORY_FRACTION, non_torch_bytes


class Choice(NamedTuple):
    """The value of an automatic setting as a flag shows it, and why it was chosen.

    Attributes:
        is_detail: whether a run shows it under `--verbose` only: it changes neither results nor, by much, the speed.
    """

    flag: str
    value: str
    reason: str
    is_detail: bool = False


Values = dict[str, Any]
"""Values of settings by name."""
BF16_MOMENTS: Values = {
    "optimizer.use_precision_aware_optimizer": True,
    "optimizer.exp_avg_dtype": "bf16",
    "optimizer.exp_avg_sq_dtype": "bf16",
}
MAX_BETA2_IN_BF16 = 0.98
"""The second moment moves by 1 - beta2 of its distance to the squared gradient. BF16 rounds a change below 0.2% to 0.4%
away: at 0.98 a distance below 10% to 20%, at 0.999 one below 200% to 400%."""
REMOVAL = re.compile(r"[;:] remove [^;]*$")
"""The fix of an error that two flags cause, such as `; remove one`. A user who gave only one of them needs none."""
GRAPH_ROOM, MIXTURE_GRAPH_ROOM = 0.03, 0.08
"""Share of a run's predicted memory that must be free, within 95% of the GPU's, for the fragments of a graph, whose
capture cannot give them back. Of 133.4 GiB of an H200, a run of 131.3 failed in the capture
(benchmarks/results/attention.md), and one of 129.7 did not (Llama 3 8B on two H200s). Mixtures took up to 6.6% more
than predicted."""


Saved = Callable[[RunConfig], Optional[RunConfig]]
"""The configuration in the checkpoint whose optimizer state a run resumes; None without one."""


def choose(
    config: RunConfig,
    target: Target,
    world_size: int,
    saved_config: Saved = lambda config: None,
    given: Collection[str] = (),
) -> tuple[RunConfig, tuple[Choice, ...]]:
    """Replace automatic settings by values; each choice depends on those before it.

    Args:
        saved_config: called only where it decides.
        given: names of the settings given by flags.

    Returns:
        The configuration, and the choices in their order.
    """
    optimizer = partial(_distributed_optimizer, saved_config=saved_config)
    performance = partial(_performance, saved_config=saved_config, given=given)
    made: list[Choice] = []
    for chooser in (
        _dispatcher, optimizer, _accumulation, performance, _overlap, _nccl_buffers, _cross_entropy, _cuda_graph,
        _evaluation_graph, _expert_kernels,
    ):  # fmt: skip
        values, choices = chooser(config, target, world_size)
        config, made = with_values(config, values), made + choices
    return config, tuple(made)


def with_recorded(config: RunConfig, recorded: RunConfig) -> RunConfig:
    """The configuration with the choices of a run that was started from the same command line.

    Args:
        recorded: the configuration of that run, which has values for the automatic settings.
    """
    names = [name for name in settings_with(Role.AUTOMATIC) if value_of(config, name) in (None, "auto")]
    if config.parallel.shards_weights:
        names.append("precision.gradient_accumulation_fusion")
    if config.training.performance == recorded.training.performance == "max":
        if recorded.precision.precision_map[:-1] == config.precision.precision_map:
            names.append("precision.precision_map")  # `_output_layer` adds the last entry
        if config.optimizer.use_precision_aware_optimizer is None:
            names += BF16_MOMENTS
    return with_values(config, {name: value_of(recorded, name) for name in names})


def with_choices(config: RunConfig, gpu: Gpu, world_size: int, given: Collection[str] = ()) -> RunConfig:
    """The configuration that a run from step 0 would have on GPUs of a kind, with Transformer Engine installed.

    Args:
        given: names of the settings given by flags.
    """
    target = Target(gpu.name, "cuda", gpu.compute_capability, "assumed")
    return choose(config, target, world_size, given=given)[0]


def _has_te_layers(config: RunConfig, target: Target) -> bool:
    return target.kind == "cuda" and capability.layer_backend(config.model, config.precision, target).has_fused_kernels


def _accumulation(config: RunConfig, target: Target, world_size: int) -> tuple[Values, list[Choice]]:
    """Off with sharded weights: there is no buffer with complete gradients to which linears could add."""
    if not config.parallel.shards_weights or not config.precision.gradient_accumulation_fusion:
        return {}, []
    choice = Choice("--no-gradient-accumulation-fusion", "on", sharding.NO_BUFFER, is_detail=True)
    return {"precision.gradient_accumulation_fusion": False}, [choice]


def _performance(
    config: RunConfig, target: Target, world_size: int, *, saved_config: Saved, given: Collection[str]
) -> tuple[Values, list[Choice]]:
    """`--performance max`: what changes numerics a little, each part where the run allows it."""
    if config.training.performance != "max":
        return {}, []
    if not _has_te_layers(config, target):
        return {}, [Choice("--performance", "max", "adds nothing: needs Transformer Engine's layers")]
    added, choices = Values(), list[Choice]()
    for values, choice in (_output_layer(config.precision), _bf16_moments(config, saved_config, given)):
        if problem := _new_problem(config, added | values, target, world_size):
            choices.append(choice._replace(value="off", reason=REMOVAL.sub("", problem)))
        else:
            added, choices = added | values, [*choices, choice]
    if not added:
        choices.append(Choice("--performance", "max", "adds nothing: all its parts are left out, each with its reason"))
    return added, choices


def _output_layer(precision: PrecisionConfig) -> tuple[Values, Choice]:
    """In FP8, unless a map names the output layer."""
    name = derived.quantization_recipe(precision)
    recipe = registry.get(name).output_layer_recipe if name is not None else None
    entries = precision_map.entries(precision)
    mapped = (each for each in entries if precision_map.matches_pattern(precision_map.OUTPUT_LAYER, each.pattern))
    if recipe is None:
        reason = "layers are not in FP8" if name is None else f"{name} has no recipe for the output layer"
        return {}, Choice(f"--precision {precision_map.OUTPUT_LAYER}", "off", reason)
    if entry := next(mapped, None):
        reason = f"the precision map has {entry.pattern}"
        return {}, Choice(f"--precision {precision_map.OUTPUT_LAYER}", "as given", reason)
    text = f"{precision_map.OUTPUT_LAYER}={recipe}"
    values = {"precision.precision_map": (*precision.precision_map, text)}
    return values, Choice("--precision", text, "--performance max")


def _bf16_moments(config: RunConfig, saved_config: Saved, given: Collection[str]) -> tuple[Values, Choice]:
    """In the one-pass update, which then moves two thirds of the bytes. A resumed run keeps its checkpoint's dtypes."""
    settings, flag = config.optimizer, "--use-precision-aware-optimizer"
    if settings.use_precision_aware_optimizer is not None or any(name in given for name in BF16_MOMENTS):
        return {}, Choice(flag, "as given", "flags choose the dtypes of moments")
    if problem := fused_adam_problem(with_values(config, BF16_MOMENTS)):
        return {}, Choice(flag, "off", f"the one-pass update excludes {problem}")
    saved = saved_config(config)
    if saved is not None and not saved.optimizer.use_precision_aware_optimizer:
        return {}, Choice(flag, "off", "as the checkpoint")
    if saved is None and settings.adam_beta2 > MAX_BETA2_IN_BF16:
        reason = f"--adam-beta2 {settings.adam_beta2:g}: BF16 would lose most changes of the second moment"
        return {}, Choice(flag, "off", reason)
    reason = "--performance max" if saved is None else "as the checkpoint"
    return BF16_MOMENTS, Choice(flag, "moments in BF16", reason)


def _new_problem(config: RunConfig, values: Values, target: Target, world_size: int) -> Optional[str]:
    """The first problem that settings cause, or why they would change the layers in use; None if there is none."""
    before, after = (
        [
            *capability.unsupported_recipes(each.precision, target),
            *capability.unsupported_layers(each.model, each.precision),
            *rules.setting_problems(each, world_size),
            *capability.capability_problems(each, target),
        ]
        for each in (config, with_values(config, values))
    )
    return next((problem for problem in after if problem not in before), None)


def _distributed_optimizer(
    config: RunConfig, target: Target, world_size: int, saved_config: Saved
) -> tuple[Values, list[Choice]]:
    """On GPUs: one-pass update, sharded state. A resumed run keeps its checkpoint's form, to continue to the bit."""
    if config.parallel.use_distributed_optimizer is not None:
        return {}, []
    if config.parallel.shards_weights:
        return {"parallel.use_distributed_optimizer": False}, []
    saved = saved_config(config)
    if saved is not None:
        is_sharded, reason = bool(saved.parallel.use_distributed_optimizer), "as the checkpoint"
    else:
        is_sharded = target.kind == "cuda" and config.optimizer.optimizer == "adam"
        reason = "one-pass update, sharded state"
    choice = [Choice("--use-distributed-optimizer", "on", reason)] if is_sharded else []
    return {"parallel.use_distributed_optimizer": is_sharded}, choice


def _overlap(config: RunConfig, target: Target, world_size: int) -> tuple[Values, list[Choice]]:
    """Communication of the distributed optimizer beside forward and backward, where there is any."""
    parallel = config.parallel
    replicas = _ranks_that_share(config, world_size)
    has_buffers = bool(parallel.use_distributed_optimizer) and not parallel.shards_weights
    helps = has_buffers and target.kind == "cuda" and replicas > 1
    reduces = helps if parallel.overlap_grad_reduce is None else parallel.overlap_grad_reduce
    gathers = parallel.overlap_param_gather
    if gathers is None:
        # Only beside buckets whose reduction overlaps.
        gathers = helps and reduces and has_flat_shards(config.optimizer, parallel)
    values: Values = {"parallel.overlap_grad_reduce": reduces, "parallel.overlap_param_gather": gathers}
    chosen = (name for name, value in values.items() if value and value_of(config, name) is None)
    reason = f"{replicas} ranks share gradients"
    return values, [Choice(settings_by_name()[name].flags[0], "on", reason, is_detail=True) for name in chosen]


def _ranks_that_share(config: RunConfig, world_size: int) -> int:
    """The data- and context-parallel ranks that have the same weights; also for sizes that rules refuse."""
    return world_size // max(1, topology.model_parallel_size(config) // max(1, config.parallel.context_parallel_size))


def _nccl_buffers(config: RunConfig, target: Target, world_size: int) -> tuple[Values, list[Choice]]:
    gpu, num_replicas = gpu_of(target), _ranks_that_share(config, world_size)
    reaches_peers = gpu is not None and gpu.reaches_peers
    values, choice = nccl_buffers.choose(config.parallel, target.kind, num_replicas, reaches_peers)
    return dict(values), [] if choice is None else [Choice(*choice, is_detail=True)]


def _cross_entropy(config: RunConfig, target: Target, world_size: int) -> tuple[Values, list[Choice]]:
    """Transformer Engine's kernel reads and writes the logits once, in BF16 or FP32."""
    precision = config.precision
    fused, kernel = precision.cross_entropy_loss_fusion, precision.cross_entropy_fusion_impl
    choices = []
    if fused is None:
        fused = _has_te_layers(config, target) and not (precision.deterministic_mode or precision.fp16)
        kernel = kernel or ("te" if fused else None)
        choices = (
            [Choice("--cross-entropy-loss-fusion", str(kernel), "Transformer Engine's layers", is_detail=True)]
            if fused
            else []
        )
    values = {"cross_entropy_loss_fusion": fused, "cross_entropy_fusion_impl": kernel or "native"}
    return {f"precision.{name}": value for name, value in values.items()}, choices


def _cuda_graph(config: RunConfig, target: Target, world_size: int) -> tuple[Values, list[Choice]]:
    """A graph wherever nothing prevents it, and GPUs have run such graphs."""
    if config.training.cuda_graph_impl != "auto":
        return {}, []
    none = {"training.cuda_graph_impl": "none"}
    if target.kind != "cuda":
        return none, []
    if fault_injection.FAULTS_VARIABLE in os.environ:
        return none, [Choice("--cuda-graph-impl", "none", f"{fault_injection.FAULTS_VARIABLE} acts between kernels")]
    implementation = capability.layer_backend(config.model, config.precision, target)
    problems = itertools.chain(
        implementation.graph_limits(config, target.transformer_engine is not None),
        default_graph_problems(config), implementation.untested_graphs(config, world_size),
    )  # fmt: skip
    if problem := next(problems, None):
        return none, [Choice("--cuda-graph-impl", "none", ": ".join(problem))]
    local = {"training.cuda_graph_impl": "local"}
    if shortage := _memory_shortage(with_values(config, local), target, world_size, implementation):
        return none, [Choice("--cuda-graph-impl", "none", shortage)]
    return local, [Choice("--cuda-graph-impl", "local", "supported by all settings")]


def _evaluation_graph(config: RunConfig, target: Target, world_size: int) -> tuple[Values, list[Choice]]:
    """In the memory of the graph of the steps, where GPUs have run such graphs."""
    if config.training.cuda_graph_evaluation is not None:
        return {}, []
    name = "training.cuda_graph_evaluation"
    has_both = config.training.eval_iters > 0 and derived.uses_cuda_graph(config)
    if not has_both or world_size > 1 or next(evaluation_graph_problems(config), None):
        return {name: False}, []
    return {name: True}, [
        Choice("--cuda-graph-evaluation", "on", "the steps are a CUDA graph on one GPU", is_detail=True)
    ]


def _dispatcher(config: RunConfig, target: Target, world_size: int) -> tuple[Values, list[Choice]]:
    """Through the memory of other GPUs, where the ranks that divide the experts have those of one node."""
    ranks, name = config.parallel.expert_model_parallel_size, "moe_token_dispatcher_type"
    is_given = config.parallel.moe_token_dispatcher_type != "auto"
    if is_given or not is_mixture(config.model) or ranks == 1 or not _has_te_layers(config, target):
        return {}, []
    gpu = gpu_of(target)
    # A dry run for other machines may itself have been started by a launcher.
    is_here = os.environ.get("WORLD_SIZE") == str(world_size)
    node_size = int(os.environ.get("LOCAL_WORLD_SIZE", 0)) if is_here else 0
    node_size = node_size or (gpu.gpus_per_node if gpu else 0)
    problems = itertools.chain(
        peer_problems(config),
        [] if gpu and gpu.reaches_peers else ["a kind of GPU whose links were not measured"],
        [f"{ranks} ranks on nodes of {node_size}"] if node_size % ranks else [],
    )
    if problem := next(problems, None):
        return {}, [Choice("--moe-token-dispatcher-type", token_dispatcher(config), problem)]
    reason = "GPUs of a node write tokens into each other's memory"
    return {f"parallel.{name}": PEER}, [Choice("--moe-token-dispatcher-type", PEER, reason)]


def _expert_kernels(config: RunConfig, target: Target, world_size: int) -> tuple[Values, list[Choice]]:
    """After the graph, whose reason is the setting that excludes one launch."""
    is_chosen = config.parallel.moe_expert_kernels is not None
    if is_chosen or not is_mixture(config.model) or not _has_te_layers(config, target):
        return {}, []
    problem = next(grouped_expert_problems(config), None)
    kernels, reason = ("te", problem) if problem else ("triton", "all experts in one launch")
    return {"parallel.moe_expert_kernels": kernels}, [Choice("--moe-expert-kernels", kernels, reason)]


def _memory_shortage(config: RunConfig, target: Target, world_size: int, implementation: LayerBackend) -> str:
    """Why the memory does not suffice for a CUDA graph, by the planner; empty if it does.

    Without `--vocab-size` the estimate leaves out the logits' memory.
    """
    gpu = gpu_of(target)
    if gpu is None or rules.setting_problems(config, world_size):
        return ""
    vocab_size = dimensions.padded_vocab_size(config, config.model.vocab_size or 1)
    sizes = run_sizes(config, world_size, vocab_size)
    stages = estimate_stages(sizes, implementation=implementation)
    estimate = max(stages, key=lambda each: each.total_bytes)
    room = MIXTURE_GRAPH_ROOM if is_mixture(config.model) else GRAPH_ROOM
    fragments_bytes = int(room * estimate.total_bytes)
    eager_bytes = cuda_graph_memory_bytes(sizes, estimate, implementation=implementation)
    limit_bytes = int(gpu.memory_bytes * (1 - FREE_MEMORY_FRACTION))
    free_bytes = limit_bytes - estimate.total_bytes - non_torch_bytes(config, world_size)
    if fragments_bytes + eager_bytes <= free_bytes:
        return ""
    eager = f" and {gib(eager_bytes)} for steps and validations that are no graph" if eager_bytes else ""
    return (
        f"{gib(max(free_bytes, 0))} GiB are expected to be free, and a graph needs {gib(fragments_bytes)} for fragments"
        f"{eager}"
    )
