"""Time model of a layer's experts: their GEMMs, casts and permutation on one rank, and the exchange of tokens.

    rows        tokens of a rank x experts of a token x expert tensor-parallel ranks: the load counts as balanced
    GEMMs       of each expert of the rank, with rows / experts rows. Experts fill the SMs together: all of them in one
                launch (`config/grouped_experts.py`), else 4, the streams of Transformer Engine's grouped linear
    gradients   in one launch, wgrad is added to FP32 as it leaves the GEMM, which hides little of it
    casts       in one launch, codes are written where the data is made, in place of BF16 numbers: only a first pass
                for the amax counts. Blockwise gradients of SwiGLU, which are written in BF16 before, are left out
    permutation reads and writes of hidden states, in order of experts and back; twice with several expert-parallel
                ranks, because rows arrive in the order of ranks
    exchange    alltoall: hidden states of every expert of a token to its rank and back; allgather: all tokens to all
                ranks; flex and peer: hidden states once to each rank that has one of a token's experts, or a part
                of it, if the router selects at random. No computation hides it. Ranks of a node exchange by NVLink,
                others by one network adapter each, both at once

Not counted: the router, the exchange of token counts, and a load that is not balanced.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megafp8.config import derived, mixture
from megafp8.config.activations import is_gated
from megafp8.config.grouped_experts import grouped_expert_problems, one_launch_suggestion
from megafp8.config.schema import RunConfig
from megafp8.planning.communication import RankGroup, all_to_all_s, ring_collective_s
from megafp8.planning.compute import BF16_BYTES, TILE, LayerTime, bytes_per_element, cast_s, gemm_flops_per_s
from megafp8.planning.planned_run import LinearGemm, PlannedRun, linear_gemms
from megafp8.recipes import registry
from megafp8.resources.mixture_memory import BYTES
from megafp8.resources.recipe_shares import BF16

ONCE_A_RANK = ("flex", mixture.PEER)
"""Dispatchers that send a token once to each rank that has an expert of it."""
TE_STREAMS = 4
"""Streams of Transformer Engine's grouped linear."""
BF16_HOST_EXPERT_S, FP8_HOST_EXPERT_S = 0.15e-3, 0.29e-3
"""Seconds in which the host launches the kernels of one expert, forward and backward, without one launch for all.
Measured on one H200 with Transformer Engine's grouped linear and 128 experts, which waits for the host: 19.2 ms in BF16
and 36.9 ms with delayed scaling."""

STORED_PRODUCTS = 218
"""Products of a sum that take as long as storing it in an FP8 GEMM of one launch, forward pass and input gradients.
Measured on one H200: 1,176 TFLOP/s on average with sums of 768 to 2,048 products (50.5 ms a step of 6 layers of
Qwen3-30B-A3B), 1,335 to 1,422 with 4,096 to 28,672 (Mixtral 8x7B)."""
BLOCKWISE_FRACTION = 0.67
"""Speed of these GEMMs to that of a linear's with scales of blocks on Hopper: they took 94.1 ms in place of 50.5."""


def rows_per_rank(config: RunConfig) -> int:
    """Rows that the experts of a rank compute for one microbatch."""
    parallel = config.parallel
    assert config.data.seq_length is not None and config.training.micro_batch_size is not None
    shards = parallel.context_parallel_size * parallel.tensor_model_parallel_size
    tokens = config.data.seq_length * config.training.micro_batch_size // shards
    return tokens * config.model.moe_router_topk * mixture.expert_tensor_size(parallel)


def flex_rows(config: RunConfig) -> float:
    """Rows that a rank sends to all ranks, its own part included, for one microbatch, if each token is sent once to a
    rank."""
    model, parallel = config.model, config.parallel
    assert model.num_experts is not None
    splits, elsewhere = mixture.expert_tensor_size(parallel), model.num_experts - mixture.experts_per_rank(config)
    is_skipped = math.comb(elsewhere, model.moe_router_topk) / math.comb(model.num_experts, model.moe_router_topk)
    tokens = rows_per_rank(config) // splits // model.moe_router_topk
    return tokens * parallel.expert_model_parallel_size * splits * (1 - is_skipped)


def exchanged_bytes(config: RunConfig) -> int:
    """Bytes that a rank sends to other expert-parallel ranks for one layer and microbatch, forward and backward.

    Hidden states of tokens travel to their experts and back, and their gradients likewise.
    `--moe-dispatch-in-fp8` sends one of the four as codes.
    """
    model, parallel = config.model, config.parallel
    assert model.hidden_size is not None
    splits, ranks = mixture.expert_tensor_size(parallel), parallel.expert_model_parallel_size
    rows = rows_per_rank(config) // splits
    if mixture.token_dispatcher(config) == "allgather":
        sent: float = rows // model.moe_router_topk * (ranks * splits - 1)
    elif mixture.token_dispatcher(config) in ONCE_A_RANK:
        sent = flex_rows(config) * (ranks * splits - 1) / (ranks * splits)
    else:
        sent = rows * (ranks - 1) // ranks
    return int(4 * sent * model.hidden_size * mean_bytes(config, BYTES[derived.params_dtype(config.precision)]))


def mean_bytes(config: RunConfig, num_bytes: int) -> float:
    """Bytes of a number in the four exchanges, on average; tokens as they are have `num_bytes` for each."""
    return (3 * num_bytes + (1 if config.parallel.moe_dispatch_in_fp8 else num_bytes)) / 4


def expert_gemms(run: PlannedRun) -> list[LinearGemm]:
    """The GEMMs of one expert for one microbatch."""
    config = run.config
    rows = max(1, rows_per_rank(config) // mixture.experts_per_rank(config))
    width = mixture.moe_ffn_hidden_size(config.model) // mixture.expert_tensor_size(config.parallel)
    width_in = 2 * width if is_gated(config.model) else width
    shapes = {"linear_fc1": (width_in, run.sizes.hidden_size), "linear_fc2": (run.sizes.hidden_size, width)}
    return [gemm for name, shape in shapes.items() for gemm in linear_gemms(name, rows, *shape)]


def experts_gemm_s(run: PlannedRun, recipe: str, gemm: LinearGemm) -> float:
    """Seconds of one GEMM of all experts of a rank."""
    local = mixture.experts_per_rank(run.config)
    at_once = local if is_one_launch(run.config) else min(local, TE_STREAMS)
    waves = at_once * (gemm.m / TILE) * (gemm.n / TILE) / run.gpu.num_sms
    flops_per_s = gemm_flops_per_s(run, recipe) * waves / (waves + 0.5)
    if gemm.kind != "wgrad" and recipe != BF16 and is_one_launch(run.config):
        has_slow_blocks = run.gpu.compute_capability < registry.get(recipe).slow_gemm_until
        flops_per_s *= (BLOCKWISE_FRACTION if has_slow_blocks else 1) * gemm.k / (gemm.k + STORED_PRODUCTS)
    moved_bytes = bytes_per_element(recipe) * gemm.k * (gemm.m + gemm.n) + BF16_BYTES * gemm.m * gemm.n
    starts_s = run.calibration.gemm_start_s * local / at_once
    return starts_s + local * max(gemm.flops / flops_per_s, run.memory_s(moved_bytes))


def addition_s(run: PlannedRun) -> float:
    """Seconds in which one launch reads and writes the FP32 gradients of a layer's experts; 0 for other kernels."""
    num_weights = sum(gemm.m * gemm.n for gemm in expert_gemms(run) if gemm.kind == "wgrad")
    num_bytes = 2 * BYTES["fp32"] if is_one_launch(run.config) else 0
    return run.memory_s(num_bytes * num_weights * mixture.experts_per_rank(run.config))


def expert_casts_s(run: PlannedRun, recipe: str, num_tokens: int, num_inputs: int, num_outputs: int) -> float:
    """Seconds of quantizing operands of a layer's experts, beside what is read and written in BF16 as well.

    Args:
        num_tokens: numbers of the tokens before they are copied to their rows.
        num_inputs: numbers that SwiGLU or its gradients read.
        num_outputs: numbers of both operands.
    """
    if recipe == BF16:
        return 0.0
    if not is_one_launch(run.config):
        return cast_s(run, recipe, num_outputs, 2 * mixture.experts_per_rank(run.config))
    num_read = (num_tokens + num_inputs) * registry.get(recipe).needs_amax_pass
    return cast_s(run, recipe, 0, 2) + run.memory_s(BF16_BYTES * num_read)


def is_one_launch(config: RunConfig) -> bool:
    """Whether all experts of a rank run in one launch per GEMM."""
    return not any(grouped_expert_problems(config))


@dataclass(frozen=True)
class ExpertsTime:
    """Seconds of the routed experts of one layer for one microbatch.

    Attributes:
        exchange: of tokens, in each direction.
        host: in which the host launches the kernels, forward and backward.
    """

    forward: LayerTime
    backward: LayerTime
    exchange: float
    host: float


def experts_time(run: PlannedRun, recipe: str) -> ExpertsTime:
    """The experts of one layer whose linears have `recipe`; `bf16` in high precision."""
    config, hidden = run.config, run.sizes.hidden_size
    rows, local = rows_per_rank(config), mixture.experts_per_rank(config)
    width = mixture.moe_ffn_hidden_size(config.model) // mixture.expert_tensor_size(config.parallel)
    num_outputs = 2 if is_gated(config.model) else 1
    wgrad_recipe = recipe if config.precision.fp8_wgrad else BF16
    recipes = {"fprop": recipe, "dgrad": recipe, "wgrad": wgrad_recipe}
    seconds = dict.fromkeys(recipes, 0.0)
    for gemm in expert_gemms(run):
        seconds[gemm.kind] += experts_gemm_s(run, recipes[gemm.kind], gemm)
    num_tokens = run.sharded_tokens * hidden
    is_peer = mixture.token_dispatcher(config) == mixture.PEER
    is_sorted_twice = config.parallel.expert_model_parallel_size > 1 and not is_peer
    num_sorts = 2 if is_sorted_twice and local > 1 else 1
    permutation_s = run.memory_s(BF16_BYTES * hidden * num_sorts * (3 * rows + run.sharded_tokens))
    forward = LayerTime(
        fprop=seconds["fprop"],
        activation=run.memory_s(BF16_BYTES * rows * width * (num_outputs + 1)),
        permutation=permutation_s,
        casts=expert_casts_s(run, recipe, num_tokens, rows * num_outputs * width, rows * (hidden + width)),
    )
    backward = LayerTime(
        dgrad=seconds["dgrad"],
        wgrad=seconds["wgrad"] + addition_s(run),
        activation=run.memory_s(BF16_BYTES * rows * width * (1 + 2 * num_outputs)),
        permutation=permutation_s,
        casts=expert_casts_s(
            run, recipe, num_tokens, rows * (num_outputs + 1) * width, rows * (num_outputs * width + hidden)
        ),
    )
    host_s = 0.0 if is_one_launch(config) else local * (BF16_HOST_EXPERT_S if recipe == BF16 else FP8_HOST_EXPERT_S)
    return ExpertsTime(forward, backward, exchange_s(run), host_s)


def exchange_s(run: PlannedRun) -> float:
    """Seconds of the exchange of one layer and microbatch in one direction: to the experts and back."""
    config = run.config
    splits, ranks = mixture.expert_tensor_size(config.parallel), config.parallel.expert_model_parallel_size
    row_bytes = BF16_BYTES * run.sizes.hidden_size
    if mixture.token_dispatcher(config) == "allgather":
        group = RankGroup(ranks * splits, 1)
        return 2 * ring_collective_s(run, group, row_bytes * run.sharded_tokens * group.size)
    if mixture.token_dispatcher(config) in ONCE_A_RANK:
        return 2 * all_to_all_s(run, RankGroup(ranks * splits, 1), row_bytes * flex_rows(config))
    rows = rows_per_rank(config)
    gather_s = ring_collective_s(run, RankGroup(splits, 1), row_bytes * rows)
    sent_bytes = mean_bytes(config, BF16_BYTES) * run.sizes.hidden_size * rows / splits
    return 2 * (all_to_all_s(run, RankGroup(ranks, splits), sent_bytes) + gather_s)


def expert_warnings(run: PlannedRun) -> list[str]:
    """What a plan reports about the experts of a layout: their GEMMs, and whether FP8 pays; nothing if dense."""
    config = run.config
    if not mixture.is_mixture(config.model):
        return []
    fc1, fc2 = (gemm for gemm in expert_gemms(run) if gemm.kind == "fprop")
    local = mixture.experts_per_rank(config)
    launches = "in one launch" if is_one_launch(config) else "one by one"
    lines = [
        f"experts of layout 1: {local} a rank, {launches}, GEMMs {fc1.m} x {fc1.k} x {fc1.n} and {fc2.m} x {fc2.k} x "
        f"{fc2.n} of each, if the load is balanced; the exchange of tokens overlaps with nothing"
    ]
    if run.recipe != BF16:
        quantized, bf16 = (total_s(experts_time(run, recipe)) for recipe in (run.recipe, BF16))
        if bf16 < MIN_SPEEDUP * quantized:
            lines.append(
                f"FP8 does not pay in these experts: {bf16 / quantized:.2f} of BF16's speed, with casts and launches; "
                f"{MORE_TOKENS if is_one_launch(config) else one_launch_suggestion(config)}"
            )
    return lines


MORE_TOKENS = "more tokens for each expert need a larger micro batch or more expert-parallel ranks"


MIN_SPEEDUP = 1.05
"""Experts that are less than this many times as fast as in BF16 get a warning."""


def total_s(time: ExpertsTime) -> float:
    """Seconds of the experts without the exchange, or of the host that launches them."""
    return max(time.forward.total + time.backward.total, time.host)
