"""Rules for CUDA graphs: what a captured step excludes."""

from __future__ import annotations

from collections.abc import Iterator

from megafp8.config import derived, dimensions, multi_token, sharding
from megafp8.config.expert_layers import is_mixture
from megafp8.config.features import given_flags
from megafp8.config.fused_adam import fused_adam_problem
from megafp8.config.grouped_experts import grouped_expert_problems
from megafp8.config.mixture import PEER, expert_ranks_flag, has_expert_ranks, token_dispatcher
from megafp8.config.rules.pipeline import is_interleaved
from megafp8.config.schema import RunConfig
from megafp8.config.schema.setting import AUTO
from megafp8.config.settings import with_values

NO_GRAPH = "use --cuda-graph-impl none"


def cuda_graph_problems(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """The settings with which forward-backward cannot be captured in a CUDA graph: the flag, why, and the fix."""
    checks = (
        *_kernel_problems(config), *_host_problems(config), *_expert_problems(config), *_rank_problems(config)
    )  # fmt: skip
    yield from ((flag, reason, fix) for is_there, flag, reason, fix in checks if is_there)


def default_graph_problems(config: RunConfig) -> Iterator[tuple[str, str]]:
    """What keeps `--cuda-graph-impl auto` from a graph: the flag, and why."""
    yield from ((flag, reason) for flag, reason, _ in cuda_graph_problems(config))
    yield from _settings_without_default_graph(config)


def _settings_without_default_graph(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Settings whose graph has to be asked for: the flag, and the reason. To make one the default, delete its line."""
    parallel, schedule = config.parallel, config.precision.fp8_schedule
    context, messages = parallel.context_parallel_size, parallel.cp_comm_type
    has_other_ranks = max(parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size) > 1
    flag, untested = f"--context-parallel-size {context}", "its graph has not been tested on GPUs"
    # With documents "p2p" is one of the others (`dimensions.cp_exchange`).
    tested = ("p2p", "allgather", "a2a") if config.data.reset_attention_mask else ("p2p",)
    checks = (
        (is_interleaved(config), "virtual pipeline stages", "their graph has been tested in BF16 on two GPUs only"),
        (context > 2, flag, untested),
        (context == 2 and messages not in tested, f"{flag} with --cp-comm-type {messages}", untested),
        (context == 2 and has_other_ranks, f"{flag} with tensor- or pipeline-parallel ranks", untested),
        (parallel.shards_weights, sharding.FLAG, sharding.UNTESTED_GRAPH),
        (derived.measures_attention_logits(config), derived.logits_flag(config), untested),
        (
            schedule is not None,
            f"--fp8-schedule {schedule}",
            "graphs captured at a phase are tested with one recipe",
        ),
    )
    yield from ((what, f"{why}; --cuda-graph-impl local tries it") for is_there, what, why in checks if is_there)


def _dropout_rates(config: RunConfig) -> Iterator[tuple[str, float]]:
    """The flags of dropout with rates above 0."""
    model = config.model
    for flag, rate in (("--attention-dropout", model.attention_dropout), ("--hidden-dropout", model.hidden_dropout)):
        if rate > 0:
            yield flag, rate


Checks = Iterator[tuple[bool, str, str, str]]  # whether the problem is there, the flag, why, and the fix


def _kernel_problems(config: RunConfig) -> Checks:
    """Random numbers of dropout, and precisions that change."""
    model = config.model
    granularity = derived.recompute_granularity(config.training)
    jitter = (("--moe-input-jitter-eps", model.moe_input_jitter_eps),) if model.moe_input_jitter_eps else ()
    for flag, rate in (*_dropout_rates(config), *jitter):
        yield (
            granularity is not None,
            f"{flag} {rate}",
            f"in a CUDA graph, recomputation (--recompute-granularity {granularity}) would draw other random numbers "
            f"than the forward pass",
            "leave out one of them",
        )
    yield (
        config.training.fine_grained_activation_offloading,
        "--fine-grained-activation-offloading",
        "megatron-core 0.16 does not wait for its copies in a CUDA graph, and a graph of 0.19 is not faster than "
        "launched kernels",
        NO_GRAPH,
    )
    yield (
        bool(multi_token.num_depths(model)),
        f"--mtp-num-layers {model.mtp_num_layers}",
        "multi-token prediction is not tested in CUDA graphs",
        NO_GRAPH,
    )


def _host_problems(config: RunConfig) -> Checks:
    """Waits of the host, and shapes or numbers of microbatches that change."""
    training = config.training
    optimizer = fused_adam_problem(config)
    is_of_experts = has_expert_ranks(config) and token_dispatcher(config) != PEER  # `_expert_problems` reports them
    yield (
        optimizer is not None and not is_of_experts,
        str(optimizer),
        "CUDA graphs need the one-pass optimizer, because megatron-core's waits for the number of tokens",
        f"use {sharding.OPTIMIZER_FLAGS}, Adam, FP32 master weights, no loss scale and no tensor-parallel ranks beside "
        "expert-parallel ones",
    )
    for flag, given in (
        ("--rampup-batch-size", bool(training.rampup_batch_size)),
        ("--step-batch-size-schedule", bool(training.step_batch_size_schedule)),
    ):
        yield given, flag, "a CUDA graph has a fixed number of microbatches", NO_GRAPH
    yield (
        "sinkhorn" in config.model.moe_router_load_balancing_type,
        "--moe-router-load-balancing-type sinkhorn",
        "the host waits for each of its iterations",
        "use an auxiliary loss, or --cuda-graph-impl none",
    )
    yield (
        training.micro_batch_size == AUTO,
        "--micro-batch-size auto",
        "trials of micro-batch sizes run without CUDA graphs",
        "use --cuda-graph-impl auto, which decides once the size is known, or give the size as a number",
    )


def _expert_problems(config: RunConfig) -> Checks:
    """Numbers of tokens that the host reads: those that ranks exchange, and those of single experts."""
    if not is_mixture(config.model):
        return
    if has_expert_ranks(config) and token_dispatcher(config) != PEER:
        fix = f"use --moe-token-dispatcher-type peer, for experts in one launch on the GPUs of a node, or {NO_GRAPH}"
        yield True, expert_ranks_flag(config), "the host reads how many tokens its ranks exchange", fix
        return
    in_e4m3 = with_values(config, {"precision.fp8_format": "e4m3"})
    is_format = config.precision.fp8_format is not None and not any(grouped_expert_problems(in_e4m3))
    fix = "use --fp8-format e4m3, or --cuda-graph-impl none" if is_format else f"change that, or {NO_GRAPH}"
    for problem in grouped_expert_problems(config):
        yield True, problem, "without all experts in one launch, the host reads how many tokens an expert has", fix


def _rank_problems(config: RunConfig) -> Checks:
    """Communication between ranks."""
    parallel, tensor = config.parallel, config.parallel.tensor_model_parallel_size
    is_ring = parallel.context_parallel_size > 2 and "p2p" in dimensions.cp_exchange(config)
    for are_separate, what, fix in (
        (is_interleaved(config), "virtual pipeline stages", "leave out the virtual stages"),
        (is_ring, f"--context-parallel-size {parallel.context_parallel_size}", "use --cp-comm-type allgather or a2a"),
    ):
        yield (
            tensor > 1 and are_separate,
            f"--tensor-model-parallel-size {tensor}",
            f"with one queue for kernels (CUDA_DEVICE_MAX_CONNECTIONS=1), separate messages of {what} may wait for "
            f"each other in a CUDA graph",
            fix,
        )
    yield (
        is_interleaved(config) and parallel.overlap_p2p_comm,
        _virtual_stages_flag(config),
        "a graph with messages beside the layers of other virtual stages hung on two H100s",
        "use --no-overlap-p2p-communication",
    )
    yield parallel.keeps_gathered, *sharding.NO_GRAPH, NO_GRAPH
    yield (
        parallel.tp_comm_overlap,
        "--tp-comm-overlap",
        "user buffers synchronize ranks outside CUDA graphs",
        "remove it",
    )
    yield (
        parallel.distributed_backend == "gloo",
        "--distributed-backend gloo",
        "Gloo collectives run on the host",
        "remove it",
    )


def _virtual_stages_flag(config: RunConfig) -> str:
    """The flag that gives the virtual stages of an interleaved pipeline, with its value."""
    flags = (
        "--pipeline-model-parallel-layout VALUE",
        "--num-layers-per-virtual-pipeline-stage VALUE",
        "--num-virtual-stages-per-pipeline-rank VALUE",
    )
    return next(iter(given_flags(config, flags).values()), "virtual stages")


def cuda_graph_steps_are_identical(config: RunConfig, world_size: int) -> Iterator[str]:
    """A CUDA graph replays the same kernels: no host decisions, random numbers or waits inside forward-backward."""
    if derived.uses_cuda_graph(config):
        for flag, reason, fix in cuda_graph_problems(config):
            yield f"{flag} with --cuda-graph-impl {config.training.cuda_graph_impl}: {reason}; {fix}"


def cuda_graph_has_warmup_steps(config: RunConfig, world_size: int) -> Iterator[str]:
    """The first step creates communicators and workspaces, which a capture cannot."""
    if derived.uses_cuda_graph(config) and config.training.cuda_graph_warmup_steps == 0:
        yield (
            f"--cuda-graph-warmup-steps 0 with --cuda-graph-impl {config.training.cuda_graph_impl}: the first step "
            "creates communicators and workspaces, which is not possible in a CUDA graph; use at least 1"
        )


def evaluation_graph_problems(config: RunConfig) -> Iterator[str]:
    """The flags with which the forward passes of an evaluation are no CUDA graph."""
    flags = (
        "--pipeline-model-parallel-size VALUE", sharding.FLAG, "--num-experts VALUE", "--reset-attention-mask"
    )  # fmt: skip
    return iter(given_flags(config, flags).values())


def cuda_graph_of_evaluations_is_possible(config: RunConfig, world_size: int) -> Iterator[str]:
    """Where the forward passes of an evaluation are those of a step."""
    if not config.training.cuda_graph_evaluation:
        return
    for flag in evaluation_graph_problems(config):
        yield (
            f"--cuda-graph-evaluation with {flag}: such graphs have run only for one stage of dense layers, without "
            f"{sharding.NAME} and without --reset-attention-mask; remove the former"
        )
