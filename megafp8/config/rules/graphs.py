"""CUDA graphs: what is captured once has to be the same work on the same memory in every step."""

from __future__ import annotations

from collections.abc import Iterator

from megafp8.config import derived
from megafp8.config.rules.rule import Rule, without
from megafp8.config.schema import RunConfig, TrainingConfig
from megafp8.config.schema.setting import AUTO


def obstacles(config: RunConfig) -> Iterator[tuple[str, str]]:
    """What keeps the passes of a run from being a graph: each setting, and why with the mend."""
    model, parallel, precision, training = config.model, config.parallel, config.precision, config.training
    sizes = (
        ("--pipeline-model-parallel-size", parallel.pipeline_model_parallel_size),
        ("--context-parallel-size", parallel.context_parallel_size),
    )
    dropouts = (("--attention-dropout", model.attention_dropout), ("--hidden-dropout", model.hidden_dropout))
    granularity = derived.recompute_granularity(training)
    noisy = next((each for each in derived.used_recipes(precision) if each.is_stochastic(vars(precision))), None)
    optimizer = derived.one_pass_obstacle(config)
    checks = (
        *((rate > 0, f"{flag} {rate}", f"a graph draws no random numbers; give {flag} 0") for flag, rate in dropouts),
        *((size > 1, f"{flag} {size}", "graphs hold one stage's whole step; give 1") for flag, size in sizes),
        (
            noisy is not None, "" if noisy is None else noisy.flag,
            "its gradients are rounded at random, and a graph draws no random numbers; launch kernel by kernel",
        ),
        (
            granularity is not None, f"--recompute-granularity {granularity}",
            "recomputing sets the state of random generators; leave it out",
        ),
        (
            precision.fp8_schedule is not None, f"--fp8-schedule {precision.fp8_schedule}",
            "a graph has one precision; leave it out",
        ),
        (
            optimizer is not None, str(optimizer),
            "needs the one-pass optimizer (--use-distributed-optimizer, Adam, FP32 master weights, no loss scale): "
            "megatron-core's waits for the number of tokens",
        ),
        (
            parallel.tp_comm_overlap, "--tp-comm-overlap",
            "its buffers signal between ranks outside of graphs; leave it out",
        ),
        (
            parallel.distributed_backend == "gloo", "--distributed-backend gloo",
            "its collectives pass through the host; leave it out",
        ),
        (
            training.micro_batch_size == AUTO, "--micro-batch-size auto",
            "sizes are tried without a graph; find the size first, then give it",
        ),
    )
    yield from ((flag, reason) for is_there, flag, reason in checks if is_there)


def steps_are_alike(config: RunConfig, world_size: int) -> Iterator[str]:
    """No host decision, no random numbers and no wait of another rank's inside the passes."""
    if derived.has_step_graph(config):
        for flag, reason in obstacles(config):
            yield f"{flag} with --cuda-graph-impl {config.training.cuda_graph_impl}: {reason}"


def warm_up_is_for_graphs(config: RunConfig, world_size: int) -> Iterator[str]:
    """Steps before the capture need something to be captured."""
    steps = config.training.cuda_graph_warmup_steps
    if not derived.has_step_graph(config) and steps != TrainingConfig().cuda_graph_warmup_steps:
        yield without(f"--cuda-graph-warmup-steps {steps}", "--cuda-graph-impl local")


RULES: tuple[Rule, ...] = (steps_are_alike, warm_up_is_for_graphs)
