"""`--grad-reduce-fp8-intra-node`: sums of a node in BF16 or FP32, codes between nodes; two nodes of two CPU ranks."""

from __future__ import annotations

import os
from typing import Optional

import pytest
import torch
import torch.distributed as dist
from ranks import RankFailed, run_ranks
from small_run import build_run, small_config
from test_fp8_gradients import (
    COMMON,
    FP8,
    NORM_BOUND,
    NUM_ELEMENTS,
    OVERLAP,
    RANGES,
    SHARDED,
    local_gradients,
    steps,
)
from tolerances import FP8_GRADIENT_LOSS
from torch import Tensor

from megafp8.config.schema import RunConfig
from megafp8.errors import ConfigError
from megafp8.mcore.grad_reduction import Reduction
from megafp8.optimizer.fp8_gradients import BucketReduction, Fp8Reduction, GradientCodes
from megafp8.optimizer.gradient_slices import split_bucket
from megafp8.optimizer.node_reduction import NodeReduction, build_node_groups, ranks_by_node
from megafp8.recipes.formats import E4M3
from megafp8.training.extensions.replica_check import check_replicas

SIZE, PER_NODE = 4, 2
CODES = GradientCodes(E4M3, True, False)
SHARDS = split_bucket(RANGES, [False, False, False, True], NUM_ELEMENTS, SIZE)


def reduced(is_complete: bool, is_average: bool) -> tuple[Tensor, Tensor, int, int]:
    """The gradients after a reduction on two levels, and after one of the node sums between one rank of each node."""
    step, gradients = Fp8Reduction(torch.device("cpu")), local_gradients(dist.get_rank())
    groups = build_node_groups("fp32", PER_NODE)
    assert groups is not None
    nodes = groups.of(dist.group.WORLD)
    reduction = NodeReduction(gradients, SHARDS, len(RANGES), nodes, CODES, step)
    reduction.start(Reduction(gradients, is_complete, is_average)).wait()

    node = dist.get_rank() // PER_NODE
    sums = local_gradients(PER_NODE * node) + local_gradients(PER_NODE * node + 1)
    sums /= PER_NODE if is_average else 1
    own = [SHARDS[nodes.shard_index(each)] for each in range(SIZE // PER_NODE)]
    plain = BucketReduction(sums, own, len(RANGES), nodes.inter, CODES, Fp8Reduction(torch.device("cpu")))
    plain.start(Reduction(sums, is_complete, is_average)).wait()
    return gradients, sums, step.received_bytes, step.within_node.received_bytes


@pytest.mark.parametrize("is_average", [False, True])
def test_a_shard_is_the_sum_of_codes_of_node_sums(is_average: bool) -> None:
    """Bitwise. With a reduce-scatter on the rank that reduces the shard, with an all-reduce on every rank."""
    size = -(-NUM_ELEMENTS // SIZE)
    is_parameter = torch.zeros(NUM_ELEMENTS, dtype=torch.bool)
    for start, stop in RANGES:
        is_parameter[start:stop] = True
    for is_complete in (False, True):
        answers = run_ranks(SIZE, reduced, is_complete, is_average)
        for shard in range(SIZE):
            chosen = is_parameter & (torch.arange(NUM_ELEMENTS) // size == shard)
            expected = answers[shard][1][chosen]
            for gradients, *_ in answers if is_complete else [answers[shard]]:
                assert torch.equal(gradients[chosen], expected)
        exact = sum(local_gradients(rank) for rank in range(SIZE)) / (SIZE if is_average else 1)
        found = answers[0][0][256:460] if is_complete else answers[1][0][256:450]
        assert (found - exact[256 : 256 + len(found)]).norm() < 2.0**-4 * exact[256 : 256 + len(found)].norm()


def trained(config: RunConfig, ranks_per_node: int = PER_NODE) -> tuple[list[float], list[float], int, Optional[int]]:
    """Losses, norms and bytes of a step: all, and those within the node."""
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks_per_node)
    run = build_run(config)
    results, _ = steps(run, 4)
    check_replicas(run, 4)
    last = results[-1]
    norms = [result.grad_norm or 0.0 for result in results]
    total, within = last.metrics["grad_reduce_bytes"], last.metrics["grad_intra_node_bytes"]
    return [result.loss for result in results], norms, total, within


@pytest.mark.parametrize(
    ("layout", "intra_node"),
    [
        pytest.param(OVERLAP, "fp32", id="sharded-overlap"),
        pytest.param(f"{SHARDED} --grad-reduce-fp8-scaling tensor", "bf16", id="sharded-tensor-scales-bf16"),
        pytest.param("", "bf16", id="all-reduce"),
    ],
)
def test_training_follows_the_reduction_without_nodes(layout: str, intra_node: str) -> None:
    """All ranks agree, and half as many codes go between nodes."""
    shape = f"{COMMON} --hidden-size 128 {FP8} --grad-reduce-fp8-exclude none --micro-batch-size 1 {layout}"
    direct = run_ranks(SIZE, trained, small_config("llama", shape, SIZE))
    flags = f"{shape} --grad-reduce-fp8-intra-node {intra_node}"
    nodes = run_ranks(SIZE, trained, small_config("llama", flags, SIZE))
    assert all(answer[:2] == nodes[0][:2] for answer in nodes)
    assert nodes[0][0] != direct[0][0]
    assert max(abs(a - b) for a, b in zip(nodes[0][0], direct[0][0], strict=True)) < FP8_GRADIENT_LOSS
    assert nodes[0][1] == pytest.approx(direct[0][1], rel=NORM_BOUND)
    assert all(within is None for *_, within in direct)
    between = sum(total - (within or 0) for *_, total, within in nodes)
    # Without nodes a rank receives its shard from three ranks, two of which are on the other node. With them from one.
    assert between == pytest.approx(sum(total for *_, total, _ in direct) / 3, rel=0.02)


def test_layouts_without_two_levels_are_refused() -> None:
    assert ranks_by_node((0, 2, 4, 6), 4) == ((0, 2), (4, 6))
    for ranks, per_node, sizes in (((0, 1), 2, "2"), ((0, 4), 4, "1, 1"), ((0, 1, 2), 2, "2, 1")):
        with pytest.raises(ConfigError, match=f"here nodes have {sizes} of them"):
            ranks_by_node(ranks, per_node)
    config = small_config("llama", f"{COMMON} {FP8} --micro-batch-size 1 --grad-reduce-fp8-intra-node bf16", SIZE)
    with pytest.raises(RankFailed, match="must lie on several nodes"):
        run_ranks(SIZE, trained, config, SIZE)
