"""Bytes that the process groups exchange, and how long that takes.

A ring of n ranks moves (n - 1)/n of the whole in all-gather and reduce-scatter, twice that in all-reduce. Ranks are
placed as megatron-core places them: tensor-parallel ones next to each other, then context, data, pipeline. A group
within a node has NVLink's bandwidth; one that leaves it has a network adapter for each rank it has in a node. Latency
is NCCL's own model of its ring (`src/graph/tuning.cc`, protocol Simple): 8.4 us, and 3.4 us a step within a node or 14
us between nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

from megafp8.config import derived
from megafp8.planning.compute import BF16_BYTES, code_bytes
from megafp8.planning.memory import BYTES, parameters_on_stage, quantized_fraction
from megafp8.planning.planned_run import PlannedRun

START_S, NVLINK_STEP_S, NETWORK_STEP_S = 8.4e-6, 3.4e-6, 14e-6
NETWORK_FRACTION = 0.85
"""Of the network adapters' bandwidth: assumed, we have measured one node only."""
DEFAULT_BUCKET, DEFAULT_BUCKET_OF_A_RANK = 40_000_000, 1_000_000
"""Parameters in a gradient bucket: megatron-core takes the larger of the first and the second times data ranks."""


@dataclass(frozen=True)
class Group:
    """Ranks that communicate: how many, and how many places apart."""

    size: int
    stride: int


def tensor_group(run: PlannedRun) -> Group:
    """Tensor-parallel ranks."""
    return Group(run.tensor, 1)


def context_group(run: PlannedRun) -> Group:
    """Context-parallel ranks."""
    return Group(run.context, run.tensor)


def data_group(run: PlannedRun) -> Group:
    """Ranks that share gradients: data- and context-parallel ones."""
    return Group(run.data * run.context, run.tensor)


def pipeline_group(run: PlannedRun) -> Group:
    """Pipeline stages."""
    return Group(run.pipeline, run.tensor * run.context * run.data)


def ring_s(run: PlannedRun, group: Group, whole_bytes: float) -> float:
    """Seconds of an all-gather or reduce-scatter of `whole_bytes`; an all-reduce takes twice as long."""
    if group.size == 1:
        return 0.0
    in_node, num_nodes = _placement(run, group)
    seconds = whole_bytes * (group.size - 1) / group.size / _bandwidth(run, in_node, num_nodes)
    return seconds + START_S + (group.size - num_nodes) * NVLINK_STEP_S + (num_nodes - 1) * NETWORK_STEP_S


def send_s(run: PlannedRun, group: Group, num_bytes: float) -> float:
    """Seconds to send to the next rank of the group, where it leaves the node if any of them does."""
    if group.size == 1:
        return 0.0
    _, num_nodes = _placement(run, group)
    step_s = NVLINK_STEP_S if num_nodes == 1 else NETWORK_STEP_S
    return num_bytes / _bandwidth(run, 1, num_nodes) + START_S + step_s


def _placement(run: PlannedRun, group: Group) -> tuple[int, int]:
    """(ranks of the group in one node, nodes)."""
    in_node = min(group.size, max(1, run.gpu.gpus_per_node // group.stride))
    return in_node, -(-group.size // in_node)


def _bandwidth(run: PlannedRun, in_node: int, num_nodes: int) -> float:
    """Bytes/s of one rank in a ring."""
    nvlink = run.gpu.nvlink_bytes_per_s * run.calibration.nvlink_fraction
    if num_nodes == 1:
        return nvlink
    return min(nvlink, in_node * run.gpu.network_bytes_per_s * NETWORK_FRACTION)


# ---- what is exchanged --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorTraffic:
    """Seconds of one layer and microbatch in the tensor-parallel group, and its bytes.

    Forward: gather the inputs of linear_qkv and linear_fc1, reduce-scatter the outputs of linear_proj and linear_fc2.
    Backward: the same the other way round, and the inputs are gathered once more for the weight gradient. That gather
    runs beside dgrad, and the reduce-scatter of linear_qkv's and linear_fc1's dgrad beside wgrad. Gathers are of codes
    where the linears quantize, sums are BF16. Without sequence parallelism two all-reduces each way.
    """

    forward_s: float
    backward_s: float
    beside_dgrad_s: float
    beside_wgrad_s: float
    bytes: float


def tensor_traffic(run: PlannedRun, recipe: str) -> TensorTraffic:
    """Of one layer whose linears have the recipe."""
    group, numbers = tensor_group(run), run.tokens * run.hidden_size
    reduce_s = ring_s(run, group, BF16_BYTES * numbers)
    moved = numbers * (group.size - 1) / group.size
    if not run.config.parallel.sequence_parallel:
        return TensorTraffic(4 * reduce_s, 0.0, 0.0, 4 * reduce_s, 8 * BF16_BYTES * moved)
    gather_s = ring_s(run, group, code_bytes(recipe) * numbers)
    return TensorTraffic(
        forward_s=2 * gather_s + 2 * reduce_s,
        backward_s=2 * gather_s,
        beside_dgrad_s=2 * gather_s,
        beside_wgrad_s=2 * reduce_s,
        bytes=moved * (6 * code_bytes(recipe) + 4 * BF16_BYTES),
    )


def context_traffic(run: PlannedRun) -> tuple[float, float, float]:
    """(seconds forward, seconds backward, bytes) of one layer and microbatch in the context-parallel group.

    p2p: keys and values go round a ring, backward with their gradients; allgather: they are gathered, and the gradients
    reduce-scattered; a2a: queries, keys, values and output are exchanged each way.
    """
    model, group = run.config.model, context_group(run)
    if group.size == 1:
        return 0.0, 0.0, 0.0
    query, kv = derived.query_projection_size(model), derived.kv_projection_size(model)
    part_bytes = BF16_BYTES * run.tokens * 2 * kv // run.tensor
    if run.config.parallel.cp_comm_type == "p2p":
        forward_s = (group.size - 1) * send_s(run, group, part_bytes)
        return forward_s, 2 * forward_s, 3 * (group.size - 1) * part_bytes
    if run.config.parallel.cp_comm_type == "allgather":
        forward_s = ring_s(run, group, group.size * part_bytes)
        return forward_s, 2 * forward_s, 3 * (group.size - 1) * part_bytes
    exchanged = BF16_BYTES * run.tokens * 2 * (query + kv) // run.tensor
    forward_s = ring_s(run, group, exchanged)
    return forward_s, forward_s, 2 * exchanged * (group.size - 1) / group.size


def boundary_bytes(run: PlannedRun) -> int:
    """Bytes that a pipeline stage sends to the next one for each microbatch and chunk; as many come back."""
    return BF16_BYTES * run.sharded_tokens * run.hidden_size


@dataclass(frozen=True)
class DataTraffic:
    """Once a step in the data-parallel group: gradients are reduce-scattered, parameters gathered."""

    reduce_s: float
    gather_s: float
    reduce_bytes: float
    gather_bytes: float
    num_buckets: int


def data_traffic(run: PlannedRun, stage: int) -> DataTraffic:
    """Of a rank of a stage."""
    config, group = run.config, data_group(run)
    quantizable, other = parameters_on_stage(config, run.padded_vocab, stage)
    parameters = quantizable + other
    gradient_bytes = parameters * BYTES[derived.grad_dtype(config.precision)]
    as_codes = quantizable * quantized_fraction(config, stage) if config.precision.fp8_param_gather else 0.0
    parameter_bytes = BF16_BYTES * (parameters - as_codes) + code_bytes(run.recipe) * as_codes
    if not config.parallel.use_distributed_optimizer:
        gradient_bytes, parameter_bytes = 2 * gradient_bytes, 0.0
    bucket = config.parallel.ddp_bucket_size or max(DEFAULT_BUCKET, DEFAULT_BUCKET_OF_A_RANK * group.size)
    num_buckets = -(-parameters // bucket)
    moved = (group.size - 1) / group.size

    def seconds(num_bytes: float) -> float:
        return num_buckets * ring_s(run, group, num_bytes / num_buckets) if num_bytes else 0.0

    return DataTraffic(
        seconds(gradient_bytes), seconds(parameter_bytes), gradient_bytes * moved, parameter_bytes * moved, num_buckets
    )
