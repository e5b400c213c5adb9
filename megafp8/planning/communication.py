"""Communication model: bytes per process group and the time they take.

A ring of n ranks moves (n - 1)/n of the data in an all-gather or reduce-scatter, and twice that in an all-reduce. Ranks
are ordered as in megatron-core: tensor, context, data, pipeline, or data last with --use-tp-pp-dp-mapping. A group
within one node has NVLink's bandwidth. A group that spans nodes has the bandwidth of as many network adapters as it has
ranks in a node. Latency follows NCCL's model of its ring (`src/graph/tuning.cc`, protocol Simple): 8.4 us per
collective, plus 3.4 us per step within a node or 14 us per step between nodes.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import NamedTuple

from megafp8.config import derived, dimensions, latent_attention, mixture
from megafp8.config.model_shapes import count_parameters
from megafp8.config.optimizers import has_flat_shards
from megafp8.planning.compute import BF16_BYTES, bytes_per_element
from megafp8.planning.planned_run import PlannedRun
from megafp8.resources.memory import parameters_on_stage
from megafp8.resources.mixture_memory import BYTES, expert_parameters_on_stage, keeps_experts_in_bf16
from megafp8.resources.recipe_shares import quantized_fraction

COLLECTIVE_START_S, NVLINK_STEP_S, NETWORK_STEP_S = 8.4e-6, 3.4e-6, 14e-6
NETWORK_FRACTION = 0.85
"""Fraction of the network adapters' bandwidth that is reached. Assumed: only one node was measured."""
GRADIENT_BLOCK = 128
"""Gradients that share a scale of one byte with --grad-reduce-in-fp8."""
MIN_BUCKET_SIZE, BUCKET_SIZE_PER_RANK = 40_000_000, 1_000_000
"""Parameters in a gradient bucket: megatron-core takes the larger of the first and the second times the group size."""


@dataclass(frozen=True)
class RankGroup:
    """A process group: `size` ranks whose global ranks are `stride` apart."""

    size: int
    stride: int


def tensor_group(run: PlannedRun) -> RankGroup:
    """The tensor-parallel group."""
    return RankGroup(run.sizes.tensor, 1)


def data_group(run: PlannedRun) -> RankGroup:
    """The group that reduces gradients: data- and context-parallel ranks.

    With --use-tp-pp-dp-mapping these are context-parallel neighbours in blocks that are a pipeline apart; one stride
    stands for both, that of the blocks where there is more than one.
    """
    is_apart = run.config.parallel.use_tp_pp_dp_mapping and run.data > 1
    return RankGroup(run.sizes.replicas, run.sizes.tensor * (run.pipeline if is_apart else 1))


def expert_data_group(run: PlannedRun) -> RankGroup:
    """The group that reduces gradients of experts: the ranks that have the same ones."""
    parallel = run.config.parallel
    stride = mixture.expert_tensor_size(parallel) * parallel.expert_model_parallel_size
    return RankGroup(run.sizes.expert_replicas, stride)


def pipeline_group(run: PlannedRun) -> RankGroup:
    """The pipeline-parallel group."""
    is_inner = run.config.parallel.use_tp_pp_dp_mapping
    return RankGroup(run.pipeline, run.sizes.tensor * run.context * (1 if is_inner else run.data))


def peak_bytes_per_s(run: PlannedRun, group: RankGroup) -> float:
    """Bandwidth of one rank in a ring of the group: that of the links, of which no part is lost."""
    in_node, num_nodes = _placement(run, group)
    return (
        run.gpu.link_bytes_per_s
        if num_nodes == 1
        else min(run.gpu.link_bytes_per_s, in_node * run.gpu.network_bytes_per_s)
    )


def ring_collective_s(run: PlannedRun, group: RankGroup, total_bytes: float) -> float:
    """Seconds of an all-gather or reduce-scatter of `total_bytes`. An all-reduce takes twice as long."""
    if group.size == 1:
        return 0.0
    in_node, num_nodes = _placement(run, group)
    seconds = total_bytes * (group.size - 1) / group.size / _bandwidth(run, in_node, num_nodes)
    return seconds + COLLECTIVE_START_S + (group.size - num_nodes) * NVLINK_STEP_S + (num_nodes - 1) * NETWORK_STEP_S


def send_s(run: PlannedRun, group: RankGroup, num_bytes: float) -> float:
    """Seconds of a point-to-point send to the next rank. If the group spans nodes, every send is assumed to."""
    if group.size == 1:
        return 0.0
    _, num_nodes = _placement(run, group)
    step_s = NVLINK_STEP_S if num_nodes == 1 else NETWORK_STEP_S
    return num_bytes / _bandwidth(run, 1, num_nodes) + COLLECTIVE_START_S + step_s


def all_to_all_s(run: PlannedRun, group: RankGroup, num_bytes: float) -> float:
    """Seconds in which each rank divides `num_bytes` evenly over all ranks, its own part included.

    Parts for the same node and for other nodes travel at once; each rank has one network adapter.
    """
    if group.size == 1:
        return 0.0
    in_node, num_nodes = _placement(run, group)
    part_bytes = num_bytes / group.size
    inside_s = part_bytes * (in_node - 1) / (run.gpu.link_bytes_per_s * run.calibration.nvlink_fraction)
    outside_s = part_bytes * (group.size - in_node) / (run.gpu.network_bytes_per_s * NETWORK_FRACTION)
    return max(inside_s, outside_s) + COLLECTIVE_START_S + (NVLINK_STEP_S if num_nodes == 1 else NETWORK_STEP_S)


def _placement(run: PlannedRun, group: RankGroup) -> tuple[int, int]:
    """Number of the group's ranks in one node, and number of nodes."""
    in_node = min(group.size, max(1, run.gpu.gpus_per_node // group.stride))
    return in_node, -(-group.size // in_node)


def _bandwidth(run: PlannedRun, in_node: int, num_nodes: int) -> float:
    """Bytes per second of one rank in a ring."""
    nvlink = run.gpu.link_bytes_per_s * run.calibration.nvlink_fraction
    if num_nodes == 1:
        return nvlink
    return min(nvlink, in_node * run.gpu.network_bytes_per_s * NETWORK_FRACTION)


# ---- traffic by kind of parallelism -------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorParallelTraffic:
    """Tensor-parallel communication of one layer for one microbatch.

    Forward all-gathers the inputs of linear_qkv and linear_fc1 and reduce-scatters the outputs of linear_proj and
    linear_fc2. Backward does the reverse, and gathers the inputs again for wgrad. This second gather overlaps with
    dgrad. The reduce-scatter of linear_qkv's and linear_fc1's dgrad overlaps with wgrad. Quantized linears gather
    codes; reductions are in BF16. Without sequence parallelism there are two all-reduces in each direction.

    Attributes:
        forward_s: exposed in the forward pass.
        backward_s: exposed in the backward pass.
        during_dgrad_s: overlapped with dgrad.
        during_wgrad_s: overlapped with wgrad.
        bytes: sent by one rank, forward and backward.
    """

    forward_s: float
    backward_s: float
    during_dgrad_s: float
    during_wgrad_s: float
    bytes: float


def tensor_parallel_traffic(run: PlannedRun, recipe: str, has_experts: bool = False) -> TensorParallelTraffic:
    """The traffic of one layer whose linears have this recipe.

    Args:
        has_experts: of a layer with experts. Without shared ones only attention gathers and reduces.
    """
    if has_experts and run.config.model.moe_shared_expert_intermediate_size is None:
        whole = tensor_parallel_traffic(run, recipe)
        return TensorParallelTraffic(*(each / 2 for each in astuple(whole)))
    group, num_elements = tensor_group(run), run.sizes.tokens * run.sizes.hidden_size
    reduce_s = ring_collective_s(run, group, BF16_BYTES * num_elements)
    num_sent = num_elements * (group.size - 1) / group.size
    if not run.config.parallel.sequence_parallel:
        return TensorParallelTraffic(4 * reduce_s, 0.0, 0.0, 4 * reduce_s, 8 * BF16_BYTES * num_sent)
    gather_s = ring_collective_s(run, group, bytes_per_element(recipe) * num_elements)
    return TensorParallelTraffic(
        forward_s=2 * gather_s + 2 * reduce_s,
        backward_s=2 * gather_s,
        during_dgrad_s=2 * gather_s,
        during_wgrad_s=2 * reduce_s,
        bytes=num_sent * (6 * bytes_per_element(recipe) + 4 * BF16_BYTES),
    )


def context_parallel_traffic(run: PlannedRun) -> tuple[float, float, float]:
    """Context-parallel communication of one layer for one microbatch: forward seconds, backward seconds, bytes sent.

    With p2p, keys and values travel around a ring, in the backward pass together with their gradients. With allgather,
    they are all-gathered and their gradients are reduce-scattered. With a2a, queries, keys, values and the output are
    exchanged in each direction. With a2a+p2p, the inner group exchanges, and keys and values travel around the ring of
    the outer one.
    """
    model, group = run.config.model, RankGroup(run.context, run.sizes.tensor)
    if group.size == 1:
        return 0.0, 0.0, 0.0
    query, kv = dimensions.query_projection_size(model), dimensions.kv_projection_size(model)
    if latent_attention.is_latent(model):  # the mean of keys and values
        query = kv = int(latent_attention.mean_channels(model))
    comm_type = dimensions.cp_exchange(run.config)
    if comm_type in ("p2p", "allgather"):
        kv_bytes = BF16_BYTES * run.sizes.tokens * 2 * kv // run.sizes.tensor
        ring_s = (group.size - 1) * send_s(run, group, kv_bytes)
        forward_s = ring_s if comm_type == "p2p" else ring_collective_s(run, group, group.size * kv_bytes)
        return forward_s, 2 * forward_s, 3 * (group.size - 1) * kv_bytes
    num_rings = 1
    if comm_type == "a2a+p2p":
        inner, num_rings = run.config.parallel.hierarchical_context_parallel_sizes
        group = RankGroup(inner, run.sizes.tensor)
    exchanged_bytes = BF16_BYTES * run.sizes.tokens * 2 * (query + kv) // run.sizes.tensor
    forward_s = ring_collective_s(run, group, exchanged_bytes)
    num_bytes = 2 * exchanged_bytes * (group.size - 1) / group.size
    tensor = run.sizes.tensor
    ring, kv_bytes = RankGroup(num_rings, tensor * group.size), BF16_BYTES * run.sizes.tokens * 2 * kv // tensor
    ring_s = (num_rings - 1) * send_s(run, ring, kv_bytes)
    return forward_s + ring_s, forward_s + 2 * ring_s, num_bytes + 3 * (num_rings - 1) * kv_bytes


def pipeline_send_bytes(run: PlannedRun) -> int:
    """Bytes that a pipeline stage sends to the next one per microbatch and model chunk; backward returns as many."""
    return BF16_BYTES * run.sharded_tokens * run.sizes.hidden_size


@dataclass(frozen=True)
class DataParallelTraffic:
    """Data-parallel communication of one step: gradients are reduced, parameters are gathered.

    With sharded weights that is in every microbatch, and in buckets of a layer. Replicas are added once in a step.
    """

    reduce_s: float
    gather_s: float
    reduce_bytes: float
    gather_bytes: float
    num_buckets: int


def reduced_bytes(run: PlannedRun, stage: int, quantizable: int, other: int, num_phases: int) -> float:
    """Bytes of gradients in the messages of a reduce-scatter (one phase) or an all-reduce (two).

    With `--grad-reduce-in-fp8` the weights of linears and of the output layer are codes with scales, and the second
    phase is BF16. All others are codes too if the patterns do not exclude embeddings.

    Args:
        quantizable, other: numbers of weights of linears, and of others.
    """
    config, precision = run.config, run.config.precision
    itemsize = BYTES[derived.grad_dtype(precision)]
    if not precision.grad_reduce_in_fp8:
        return num_phases * (quantizable + other) * itemsize
    is_last = stage == config.parallel.pipeline_model_parallel_size - 1
    output = count_parameters(config.model, run.padded_vocab).output_layer // run.sizes.tensor if is_last else 0
    excludes_embeddings = any("embed" in name for name in precision.grad_reduce_fp8_exclude)
    quantized = quantizable + (min(output, other) if excludes_embeddings else other)
    of_code = 1 + 1 / GRADIENT_BLOCK + (num_phases - 1) * BF16_BYTES
    return quantized * of_code + num_phases * (quantizable + other - quantized) * itemsize


def sharding_group(run: PlannedRun, group: RankGroup) -> RankGroup:
    """The group over which weights are sharded: with hybrid sharding the ranks of a replica."""
    return RankGroup(group.size // run.config.parallel.num_replicas, group.stride)


class ReductionLevel(NamedTuple):
    """A group in which gradients are reduced.

    Attributes:
        num_bytes: in the messages of a reduction.
        is_once_per_step: also where others are reduced in every microbatch.
    """

    ranks: RankGroup
    num_bytes: float
    is_once_per_step: bool = False


def reduction_levels(
    run: PlannedRun, stage: int, group: RankGroup, quantizable: int, other: int, num_phases: int
) -> list[ReductionLevel]:
    """The groups in which gradients are reduced: one, or two.

    Replicas of hybrid sharding add the shards of sums by an all-reduce. With `--grad-reduce-fp8-intra-node` on several
    nodes: within a node all gradients in the dtype of that level and, as an all-reduce, their sums in that of the
    gradients; then codes, of which a rank has its node's share.
    """
    precision, num_bytes = run.config.precision, reduced_bytes(run, stage, quantizable, other, num_phases)
    shards, is_quantized = sharding_group(run, group), precision.grad_reduce_fp8_intra_node == "fp8"
    if (replicas := group.size // shards.size) > 1:
        sums_bytes = reduced_bytes(run, stage, quantizable, other, 2) / shards.size
        if not is_quantized:
            num_bytes = float((quantizable + other) * BYTES[precision.grad_reduce_fp8_intra_node])
        between = RankGroup(replicas, group.stride * shards.size)
        return [ReductionLevel(shards, num_bytes), ReductionLevel(between, sums_bytes, is_once_per_step=True)]
    in_node, num_nodes = _placement(run, group)
    if not precision.grad_reduce_in_fp8 or is_quantized or 1 in (in_node, num_nodes):
        return [ReductionLevel(group, num_bytes)]
    itemsize = BYTES[precision.grad_reduce_fp8_intra_node] + (num_phases - 1) * BYTES[derived.grad_dtype(precision)]
    return [
        ReductionLevel(RankGroup(in_node, group.stride), float((quantizable + other) * itemsize)),
        ReductionLevel(RankGroup(num_nodes, group.stride * in_node), num_bytes / in_node),
    ]


def data_parallel_traffic(run: PlannedRun, stage: int) -> DataParallelTraffic:
    """The traffic of one rank of a pipeline stage."""
    quantizable, other = parameters_on_stage(run.sizes, stage)
    experts = expert_parameters_on_stage(run.sizes, stage)
    has_codes = run.config.precision.fp8_param_gather
    dense = _group_traffic(run, stage, data_group(run), quantizable - experts, other, has_codes)
    if not experts:
        return dense
    has_codes &= not keeps_experts_in_bf16(run.config.parallel)
    routed = _group_traffic(run, stage, expert_data_group(run), experts, 0, has_codes)
    return DataParallelTraffic(*(sum(each) for each in zip(astuple(dense), astuple(routed), strict=True)))


def _group_traffic(
    run: PlannedRun, stage: int, group: RankGroup, quantizable: int, other: int, has_codes: bool
) -> DataParallelTraffic:
    """The traffic of weights that a group shares: of linears, gathered as codes or not, and others."""
    config, parameters, parallel = run.config, quantizable + other, run.config.parallel
    num_phases = 1 if has_flat_shards(config.optimizer, config.parallel) or parallel.shards_weights else 2
    levels = reduction_levels(run, stage, group, quantizable, other, num_phases)
    num_codes = quantizable * quantized_fraction(run.sizes, stage) if has_codes else 0.0
    parameter_bytes = BF16_BYTES * (parameters - num_codes) + bytes_per_element(run.recipe) * num_codes
    bucket_size = config.parallel.ddp_bucket_size or max(MIN_BUCKET_SIZE, BUCKET_SIZE_PER_RANK * group.size)
    num_buckets, num_microbatches = -(-parameters // bucket_size), 1
    if parallel.shards_weights:
        assert config.model.num_layers is not None
        num_microbatches = run.sizes.num_microbatches
        num_buckets = num_microbatches * (config.model.num_layers + 1)
        parameter_bytes *= num_microbatches * (1 if parallel.keeps_gathered else 2)
    elif not parallel.use_distributed_optimizer:
        parameter_bytes = 0.0

    def seconds(ranks: RankGroup, num_bytes: float, num_messages: int = num_buckets) -> float:
        return num_messages * ring_collective_s(run, ranks, num_bytes / num_messages) if num_bytes else 0.0

    def sent_bytes(ranks: RankGroup, num_bytes: float) -> float:
        return num_bytes * (ranks.size - 1) / ranks.size

    gathers = sharding_group(run, group)
    repeats = [1 if level.is_once_per_step else num_microbatches for level in levels]
    reduced = [
        (level.ranks, level.num_bytes * repeat, num_buckets * repeat // num_microbatches)
        for level, repeat in zip(levels, repeats, strict=True)
    ]
    return DataParallelTraffic(
        reduce_s=sum(seconds(*level) for level in reduced), gather_s=seconds(gathers, parameter_bytes),
        reduce_bytes=sum(sent_bytes(ranks, num_bytes) for ranks, num_bytes, _ in reduced),
        gather_bytes=sent_bytes(gathers, parameter_bytes), num_buckets=num_buckets,
    )  # fmt: skip
