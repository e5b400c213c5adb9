"""Bytes and times of communication in the time model, compared with manual computations and known limits."""

from __future__ import annotations

import dataclasses

import pytest
from plans import FP8, PIPELINE, TENSOR, run_of

from megafp8.config import iterations
from megafp8.planning import communication, compute
from megafp8.planning.communication import COLLECTIVE_START_S, RankGroup, ring_collective_s
from megafp8.planning.step_time import (
    bytes_by_group,
    stage_time,
    step_time,
)
from megafp8.resources.memory import parameters_on_stage


def test_ring_collectives_move_all_but_one_shard():
    run = run_of()
    speed = 450e9 * run.calibration.nvlink_fraction
    expected = 1e9 * 7 / 8 / speed + COLLECTIVE_START_S + 7 * communication.NVLINK_STEP_S
    assert ring_collective_s(run, RankGroup(8, 1), 1e9) == pytest.approx(expected)
    assert ring_collective_s(run, RankGroup(1, 1), 1e9) == 0


def test_bandwidth_between_nodes_adds_one_adapter_per_rank():
    run = run_of(gpus=64)
    large = 1e12
    adapter = 50e9 * communication.NETWORK_FRACTION
    assert ring_collective_s(run, RankGroup(8, 8), large) == pytest.approx(large * 7 / 8 / adapter, rel=1e-3)
    assert ring_collective_s(run, RankGroup(16, 4), large) == pytest.approx(large * 15 / 16 / (2 * adapter), rel=1e-3)
    # All ranks of a node together are bound by NVLink.
    assert ring_collective_s(run, RankGroup(64, 1), large) == pytest.approx(
        large * 63 / 64 / (450e9 * run.calibration.nvlink_fraction), rel=1e-3
    )


def test_codes_are_gathered_and_sums_are_bf16():
    numbers = 8192 * 4096 * 3 / 4
    assert communication.tensor_parallel_traffic(run_of(TENSOR), "bf16").bytes == 10 * 2 * numbers
    assert communication.tensor_parallel_traffic(run_of(TENSOR), "tensorwise").bytes == (6 * 1 + 4 * 2) * numbers
    whole = run_of(TENSOR | {"parallel.sequence_parallel": False})
    assert communication.tensor_parallel_traffic(whole, "bf16").bytes == 4 * 2 * 2 * numbers


@pytest.mark.parametrize("network_share", [1.0, 0.01])
def test_overlapped_communication_is_exposed_where_it_takes_longer(network_share):
    """One layer, one stage without embedding and output layer; then with 1% of NVLink's bandwidth."""
    run = run_of(TENSOR | PIPELINE, gpus=16)
    slow = dataclasses.replace(run.calibration, nvlink_fraction=run.calibration.nvlink_fraction * network_share)
    run = dataclasses.replace(run, calibration=slow)
    traffic, backward = communication.tensor_parallel_traffic(run, "bf16"), compute.backward_time(run, "bf16")
    seen = traffic.forward_s + traffic.backward_s
    seen += max(0, traffic.during_dgrad_s - backward.dgrad) + max(0, traffic.during_wgrad_s - backward.wgrad)
    assert stage_time(run, 1).parts["tensor parallel"] == pytest.approx(8 * seen)
    assert (seen == traffic.forward_s + traffic.backward_s) == (network_share == 1.0)


def test_data_parallel_bytes_are_gradients_and_weights():
    run, fp8_weights = run_of(FP8), run_of(FP8 | {"precision.fp8_param_gather": True})
    parameters = 8_030_261_248
    sent = bytes_by_group(run)
    assert sent["data parallel, gradients"] == pytest.approx(4 * parameters * 7 / 8)
    assert sent["data parallel, parameters"] == pytest.approx(2 * parameters * 7 / 8)
    quantized = 32 * 4096 * (6144 + 4096 + 3 * 14336)
    expected = (2 * parameters - quantized) * 7 / 8
    assert bytes_by_group(fp8_weights)["data parallel, parameters"] == pytest.approx(expected)


def test_gradients_in_fp8():
    """Codes with a scale of one byte for 128; embeddings and norms in FP32 by default, and sums in BF16."""

    def sent(**changes):
        run = run_of({f"precision.{name}": value for name, value in changes.items()})
        weights = parameters_on_stage(run.sizes, 0)
        return [communication.reduced_bytes(run, 0, *weights, num_phases) for num_phases in (1, 2)]

    parameters, embedding, norms = 8_030_261_248, 128_256 * 4096, 65 * 4096
    everything = sent(grad_reduce_in_fp8=True, grad_reduce_fp8_exclude=("none",))
    assert everything == [parameters * (1 + 1 / 128), parameters * (3 + 1 / 128)]
    default, unquantized = sent(grad_reduce_in_fp8=True), embedding + norms
    assert default == [
        (parameters - unquantized) * (1 + 1 / 128) + 4 * unquantized,
        (parameters - unquantized) * (3 + 1 / 128) + 8 * unquantized,
    ]
    assert sent() == [4 * parameters, 8 * parameters]


def test_hybrid_sharding_stays_within_a_replica():
    """Two replicas of eight: an eighth of the gradients is added between them once in a step, which takes two phases.

    With codes the first phase has one byte and a scale, and the second is BF16.
    """
    replicas = {"parallel.use_torch_fsdp2": True, "parallel.num_distributed_optimizer_instances": 2}
    codes = {"precision.grad_reduce_in_fp8": True, "precision.grad_reduce_fp8_exclude": ("none",)}
    intra = "precision.grad_reduce_fp8_intra_node"
    for more, within, between in (
        ({}, 4, 8),
        (codes, 1 + 1 / 128, 3 + 1 / 128),
        (codes | {intra: "bf16"}, 2, 3 + 1 / 128),
        (codes | {intra: "fp32"}, 4, 3 + 1 / 128),
    ):
        run = run_of(replicas | more, gpus=16)
        found = communication.data_parallel_traffic(run, 0)
        parameters, microbatches = 8_030_261_248, iterations.num_microbatches(run.config, 16)
        assert microbatches > 1
        assert found.reduce_bytes == pytest.approx(parameters * (within * microbatches * 7 / 8 + between / 8 / 2))
        assert found.gather_bytes == pytest.approx(2 * 2 * parameters * microbatches * 7 / 8)


def test_gradients_in_fp8_between_nodes():
    """Two nodes of eight: all gradients in BF16 within a node, an eighth of the codes between the nodes."""

    def traffic(gpus, **changes):
        fp8 = {"grad_reduce_in_fp8": True, "grad_reduce_fp8_exclude": ("none",), **changes}
        run = run_of({f"precision.{name}": value for name, value in fp8.items()}, gpus=gpus)
        return communication.data_parallel_traffic(run, 0)

    direct, two_level = traffic(16), traffic(16, grad_reduce_fp8_intra_node="bf16")
    parameters = 8_030_261_248
    assert direct.reduce_bytes == pytest.approx(parameters * (1 + 1 / 128) * 15 / 16)
    assert two_level.reduce_bytes == pytest.approx(parameters * (2 * 7 / 8 + (1 + 1 / 128) / 8 / 2))
    assert two_level.gather_bytes == direct.gather_bytes
    assert traffic(8, grad_reduce_fp8_intra_node="bf16") == traffic(8)


@pytest.mark.parametrize(("kind", "forward", "backward"), [("p2p", 1, 2), ("allgather", 1, 2), ("a2a", 5, 5)])
def test_context_parallel_bytes(kind, forward, backward):
    """In units of the keys and values of a rank's tokens. a2a: (q + k + v + o) = 10 kv, of 2 kv; 1/2 is sent."""
    run = run_of({"parallel.context_parallel_size": 2, "parallel.cp_comm_type": kind})
    _, _, num_bytes = communication.context_parallel_traffic(run)
    keys_and_values = 4096 * 2 * 1024 * 2
    assert num_bytes == (forward + backward) * keys_and_values / (2 if kind == "a2a" else 1)


def test_documents_have_no_ring():
    context = {"parallel.context_parallel_size": 4, "parallel.cp_comm_type": "p2p"}
    documents = {"data.reset_attention_mask": True}
    for exchange, heads in (("a2a", {}), ("allgather", {"model.num_query_groups": 2})):  # four ranks divide 8 heads
        chosen = communication.context_parallel_traffic(run_of(context | heads | {"parallel.cp_comm_type": exchange}))
        assert communication.context_parallel_traffic(run_of(context | heads | documents)) == chosen
        assert communication.context_parallel_traffic(run_of(context | heads)) != chosen


def test_reductions_hide_behind_the_backward_pass():
    def exposed(**changes):
        run = run_of({name.replace("__", "."): value for name, value in changes.items()})
        return step_time(run).parts["data parallel"]

    hidden = exposed()
    seen = exposed(parallel__overlap_grad_reduce=False, parallel__overlap_param_gather=False)
    traffic = communication.data_parallel_traffic(run_of(), 0)
    assert seen == pytest.approx(traffic.reduce_s + traffic.gather_s)
    assert (traffic.reduce_s + traffic.gather_s) / traffic.num_buckets <= hidden < 0.3 * seen
