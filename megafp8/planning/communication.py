"""Communication model: bytes per process group and the time they take.

A ring of n ranks moves (n - 1)/n of the data in an all-gather or reduce-scatter, and twice that in an all-reduce. Ranks
are ordered as in megatron-core: tensor, context, data, pipeline. A group within one node has NVLink's bandwidth. A
group that spans nodes has the bandwidth of as many network adapters as it has ranks in a node. Latency follows NCCL's
model of its ring (`src/graph/tuning.cc`, protocol Simple): 8.4 us per collective, plus 3.4 us per step within a node or
14 us per step between nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

from megafp8.config import derived
from megafp8.planning.compute import BF16_BYTES, bytes_per_element
from megafp8.planning.memory import BYTES, parameters_on_stage, quantized_fraction
from megafp8.planning.planned_run import PlannedRun

COLLECTIVE_START_S, NVLINK_STEP_S, NETWORK_STEP_S = 8.4e-6, 3.4e-6, 14e-6
NETWORK_FRACTION = 0.85
"""Fraction of the network adapters' bandwidth that is reached. Assumed: only one node was measured."""
MIN_BUCKET_SIZE, BUCKET_SIZE_PER_RANK = 40_000_000, 1_000_000
"""Parameters in a gradient bucket: megatron-core takes the larger of the first and the second times the group size."""


@dataclass(frozen=True)
class RankGroup:
    """A process group: `size` ranks whose global ranks are `stride` apart."""

    size: int
    stride: int


def tensor_group(run: PlannedRun) -> RankGroup:
    """The tensor-parallel group."""
    return RankGroup(run.tensor, 1)


def data_group(run: PlannedRun) -> RankGroup:
    """The group that reduces gradients: data- and context-parallel ranks."""
    return RankGroup(run.data * run.context, run.tensor)


def pipeline_group(run: PlannedRun) -> RankGroup:
    """The pipeline-parallel group."""
    return RankGroup(run.pipeline, run.tensor * run.context * run.data)


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


def _placement(run: PlannedRun, group: RankGroup) -> tuple[int, int]:
    """Number of the group's ranks in one node, and number of nodes."""
    in_node = min(group.size, max(1, run.gpu.gpus_per_node // group.stride))
    return in_node, -(-group.size // in_node)


def _bandwidth(run: PlannedRun, in_node: int, num_nodes: int) -> float:
    """Bytes per second of one rank in a ring."""
    nvlink = run.gpu.nvlink_bytes_per_s * run.calibration.nvlink_fraction
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


def tensor_parallel_traffic(run: PlannedRun, recipe: str) -> TensorParallelTraffic:
    """The traffic of one layer whose linears have this recipe."""
    group, num_elements = tensor_group(run), run.tokens * run.hidden_size
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
    exchanged in each direction.
    """
    model, group = run.config.model, RankGroup(run.context, run.tensor)
    if group.size == 1:
        return 0.0, 0.0, 0.0
    query, kv = derived.query_projection_size(model), derived.kv_projection_size(model)
    comm_type = run.config.parallel.cp_comm_type
    if comm_type in ("p2p", "allgather"):
        kv_bytes = BF16_BYTES * run.tokens * 2 * kv // run.tensor
        ring_s = (group.size - 1) * send_s(run, group, kv_bytes)
        forward_s = ring_s if comm_type == "p2p" else ring_collective_s(run, group, group.size * kv_bytes)
        return forward_s, 2 * forward_s, 3 * (group.size - 1) * kv_bytes
    exchanged_bytes = BF16_BYTES * run.tokens * 2 * (query + kv) // run.tensor
    forward_s = ring_collective_s(run, group, exchanged_bytes)
    return forward_s, forward_s, 2 * exchanged_bytes * (group.size - 1) / group.size


def pipeline_send_bytes(run: PlannedRun) -> int:
    """Bytes that a pipeline stage sends to the next one per microbatch and model chunk; backward returns as many."""
    return BF16_BYTES * run.sharded_tokens * run.hidden_size


@dataclass(frozen=True)
class DataParallelTraffic:
    """Data-parallel communication of one step: gradients are reduced, parameters are gathered."""

    reduce_s: float
    gather_s: float
    reduce_bytes: float
    gather_bytes: float
    num_buckets: int


def data_parallel_traffic(run: PlannedRun, stage: int) -> DataParallelTraffic:
    """The traffic of one rank of a pipeline stage."""
    config, group = run.config, data_group(run)
    quantizable, other = parameters_on_stage(config, run.padded_vocab, stage)
    parameters = quantizable + other
    grad_bytes = parameters * BYTES[derived.grad_dtype(config.precision)]
    num_codes = quantizable * quantized_fraction(config, stage) if config.precision.fp8_param_gather else 0.0
    parameter_bytes = BF16_BYTES * (parameters - num_codes) + bytes_per_element(run.recipe) * num_codes
    if not config.parallel.use_distributed_optimizer:
        grad_bytes, parameter_bytes = 2 * grad_bytes, 0.0
    bucket_size = config.parallel.ddp_bucket_size or max(MIN_BUCKET_SIZE, BUCKET_SIZE_PER_RANK * group.size)
    num_buckets = -(-parameters // bucket_size)
    sent_fraction = (group.size - 1) / group.size

    def seconds(num_bytes: float) -> float:
        return num_buckets * ring_collective_s(run, group, num_bytes / num_buckets) if num_bytes else 0.0

    return DataParallelTraffic(
        reduce_s=seconds(grad_bytes), gather_s=seconds(parameter_bytes),
        reduce_bytes=grad_bytes * sent_fraction, gather_bytes=parameter_bytes * sent_fraction, num_buckets=num_buckets,
    )  # fmt: skip
