"""FP8 gradients in hybrid sharding: codes or another dtype within a replica, codes between the replicas.

Two replicas of two CPU ranks, each of which is a node.
"""

from __future__ import annotations

import functools
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from ranks import RankFailed, run_ranks
from small_run import build_run, save_or_load, small_config, step_results, train
from test_fp8_gradients import NORM_BOUND
from tolerances import FP8_GRADIENT_LOSS

from megafp8.checkpoint.progress import Progress
from megafp8.config.schema import RunConfig
from megafp8.errors import NumericsError
from megafp8.fsdp.gradients import check_replica_in_node
from megafp8.training.extensions.calibration import calibrate, needs_calibration
from megafp8.training.run import Run
from megafp8.training.step import StepResult
from megafp8.training.step_parts import Fp8Gradients

SIZE, PER_NODE, STEPS, BLOCK = 4, 2, 3, 128
FSDP = "--num-layers 2 --micro-batch-size 1 --use-torch-fsdp2 --no-gradient-accumulation-fusion"
REPLICAS = f"{FSDP} --num-distributed-optimizer-instances 2"
PLAIN = "--transformer-impl local"
REDUCE, FEEDBACK = "--grad-reduce-in-fp8", "--grad-reduce-fp8-error-feedback"
INTRA = "--grad-reduce-fp8-intra-node"
ALL_CODES = f"{REDUCE} --grad-reduce-fp8-exclude none"
NUM_MICROBATCHES = 2


def replica_config(flags: str) -> RunConfig:
    """A run of two replicas."""
    return small_config("llama", f"{REPLICAS} {flags}", SIZE)


def built(config: RunConfig) -> Run:
    """The run of this rank, on a node of two ranks."""
    os.environ["LOCAL_WORLD_SIZE"] = str(PER_NODE)
    return build_run(config)


class Trained(NamedTuple):
    """What a rank knows of a run."""

    losses: list[float]
    norms: list[float]
    num_skipped: int
    weights: list[torch.Tensor]
    last: StepResult


def trained(config: RunConfig) -> Trained:
    """Train some steps."""
    run = built(config)
    if needs_calibration(run):
        calibrate(run, Progress())
    results = step_results(run, STEPS)
    for part in run.parts:
        assert not isinstance(part, Fp8Gradients) or part.reduction.counts[0] > 0  # values were quantized
    weights = [parameter.to_local().detach() for parameter in run.training_state.chunks[0].parameters()]
    norms = [result.grad_norm for result in results if result.grad_norm is not None]
    return Trained([each.loss for each in results], norms, STEPS - len(norms), weights, results[-1])


@functools.cache
def without_codes(flags: str) -> list[Trained]:
    """A run without FP8 gradients, by rank."""
    return run_ranks(SIZE, trained, replica_config(flags))


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        pytest.param(f"--bf16 {PLAIN}", REDUCE, id="codes"),
        pytest.param(f"--bf16 {PLAIN}", f"{REDUCE} {INTRA} fp32", id="fp32-in-a-replica"),
        pytest.param(f"--bf16 {PLAIN}", f"{ALL_CODES} {INTRA} bf16", id="bf16-in-a-replica"),
        pytest.param(f"--bf16 {PLAIN}", f"{ALL_CODES} --grad-reduce-fp8-scaling tensor", id="tensor-scales"),
        pytest.param(f"--bf16 {PLAIN}", f"{REDUCE} {FEEDBACK}", id="feedback"),
        pytest.param(
            f"--bf16 --grad-reduce-in-bf16 {PLAIN}",
            f"{REDUCE} --grad-reduce-fp8-format e5m2 {INTRA} bf16",
            id="bf16-gradients-e5m2",
        ),
        pytest.param(f"--bf16 {PLAIN} --context-parallel-size 2 --micro-batch-size 2", REDUCE, id="context-parallel"),
        pytest.param(f"--fp16 --initial-loss-scale 8 {PLAIN}", REDUCE, id="fp16"),
        pytest.param("--bf16 --fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 4", REDUCE, id="delayed"),
    ],
)
def test_training_follows_the_reduction_without_codes(flags: str, options: str) -> None:
    """All ranks agree, and both replicas have the same weights to the bit."""
    plain, fp8 = without_codes(flags), run_ranks(SIZE, trained, replica_config(f"{flags} {options}"))
    assert all(answer[:3] == fp8[0][:3] for answer in fp8)
    for one, other in ((0, 2), (1, 3)):
        assert all(map(torch.equal, fp8[one].weights, fp8[other].weights))
    assert fp8[0].losses != plain[0].losses and fp8[0].num_skipped == plain[0].num_skipped < STEPS
    assert max(abs(a - b) for a, b in zip(fp8[0].losses, plain[0].losses, strict=True)) < FP8_GRADIENT_LOSS
    assert fp8[0].norms == pytest.approx(plain[0].norms, rel=NORM_BOUND)
    codes = fp8[0].last.metrics
    assert codes["grad_underflow_fraction"] < 0.1 and codes["grad_saturated_fraction"] == 0
    assert codes["grad_reduce_bytes"] > 0


def bytes_by_hand(chunk: Any, intra: str) -> tuple[int, int]:
    """Bytes of a step that this rank receives within its replica of two, and from its peer in the other replica."""

    def message(num_bytes: int) -> int:
        return -(-num_bytes // 16) * 16

    within = between = 0
    for sums in chunk.sums:
        num_rows = sum(-(-size // BLOCK) for size in sums.sizes)
        itemsize = {"fp8": 0, "bf16": 2, "fp32": 4}[intra]
        within += NUM_MICROBATCHES * (sum(sums.sizes) * itemsize or message(num_rows * (BLOCK + 1)))
        half, start, rows = -(-sum(sums.sizes) // 2), 0, [0, 0]
        for size in sums.sizes:
            for replica in range(2):
                low, high = max(start, replica * half), min(start + size, (replica + 1) * half)
                rows[replica] += -(-max(0, high - low) // BLOCK)
            start += size
        own = rows[dist.get_rank() // PER_NODE]
        between += message(own * (BLOCK + 1)) + message((sum(rows) - own) * BLOCK * 2)  # codes, then sums in BF16
    return within, between


@pytest.mark.parametrize("intra", ["fp8", "bf16", "fp32"])
def test_bytes_of_both_levels(intra: str) -> None:
    """In a replica for every microbatch, between replicas once in a step."""

    def received() -> tuple[tuple[int, int], tuple[int, int]]:
        run = built(replica_config(f"--bf16 {PLAIN} {ALL_CODES} {INTRA} {intra}"))
        assert run.num_microbatches_at(0) == NUM_MICROBATCHES
        (result,) = step_results(run, 1)
        total, within = result.metrics["grad_reduce_bytes"], result.metrics["grad_intra_node_bytes"] or 0
        return (within, total - within), bytes_by_hand(run.training_state.chunks[0], intra)

    for found, expected in run_ranks(SIZE, received):
        assert found == expected
        assert found[0] > 0 and found[1] > 0


def test_replicas_send_complete_sums_in_the_last_backward_pass() -> None:
    """The sums of both replicas are those of FP32, but for one rounding to E4M3 and one to BF16.

    The statistics count each of them.
    """

    def errors() -> list[float]:
        run = built(replica_config(f"--bf16 {PLAIN} {ALL_CODES} {INTRA} fp32"))
        chunk, found, sent = run.training_state.chunks[0], [], []
        send, scale, finish = chunk.replicas._send, chunk.scale_gradients, chunk.replicas.finish

        def keep(sums: Any) -> object:
            sent.append((sums, sums.rows.clone()))
            return send(sums)

        def check_all_sent(all_sums: Any) -> None:
            assert [sums for sums, _ in sent] == list(reversed(all_sums[1:])) + all_sums[:1]
            finish(all_sums)

        def compare(factor: object) -> None:
            for sums, rows in sent:
                exact = rows.clone()
                dist.all_reduce(exact, group=chunk.replicas.group)
                found.append(float((sums.rows - exact).norm() / exact.norm()))
            (counts,) = (part.reduction.counts for part in run.parts if isinstance(part, Fp8Gradients))
            assert counts[0] == sum(int(rows.count_nonzero()) for _, rows in sent)
            scale(factor)

        chunk.replicas._send, chunk.scale_gradients = keep, compare
        chunk.replicas.finish = check_all_sent
        train(run, 1)
        return found

    answers = run_ranks(SIZE, errors)
    assert answers[0] == answers[2] and answers[1] == answers[3], "replicas have the same sums"
    assert all(0 < error < 2.0**-4 for error in answers[0] + answers[1])


@pytest.mark.parametrize("intra", ["fp8", "bf16"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_gradient_stops_the_step_on_all_ranks(intra: str, bad: float) -> None:
    """Also on those of the other replica, and names the rank that brings it up."""

    def stopped() -> str:
        run = built(replica_config(f"--bf16 {PLAIN} {REDUCE} {INTRA} {intra}"))
        linear = run.training_state.chunks[0].module.module.decoder.layers[1].mlp.linear_fc2
        if dist.get_rank() == 1:
            linear.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * bad,))
        with pytest.raises(NumericsError) as caught:
            train(run, 1)
        return str(caught.value)

    texts = run_ranks(SIZE, stopped)
    assert len(set(texts)) == 1 and "gradient of decoder.layers.1.mlp.linear_fc1.weight" in texts[0], texts[0]
    assert "  rank 1: first bad tensor" in texts[0] and texts[0].count("  rank ") == 1


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(f"{REDUCE} {FEEDBACK}", id="feedback"),
        pytest.param(f"{REDUCE} --grad-reduce-fp8-scaling tensor {INTRA} bf16", id="tensor-scales-bf16"),
    ],
)
def test_a_run_resumes_bitwise_and_in_other_layouts(tmp_path: Path, options: str) -> None:
    replicas = replica_config(f"--bf16 {PLAIN} {options}")
    one_level = options.replace(f" {INTRA} bf16", "")
    single = small_config("llama", f"{FSDP} --bf16 {PLAIN} {one_level}", SIZE)

    def leg(config: RunConfig, is_first: bool) -> tuple[list[float], tuple[str, ...]]:
        run = built(config)
        notes = save_or_load(run, tmp_path, 2, is_first)
        return train(run, 2, 3).losses, notes

    unbroken, _ = run_ranks(SIZE, leg, replicas, True)[0]
    assert run_ranks(SIZE, leg, replicas, False) == [(unbroken, ())] * SIZE
    other, notes = run_ranks(SIZE, leg, single, False)[0]
    assert other == pytest.approx(unbroken, abs=FP8_GRADIENT_LOSS)
    assert [FEEDBACK in note for note in notes] == ([True] if FEEDBACK in options else [])


def test_replicas_on_several_nodes_have_no_node_sums() -> None:
    check_replica_in_node((4, 5, 6, 7), 4)

    def build_on_nodes_of_one() -> None:
        os.environ["LOCAL_WORLD_SIZE"] = "1"
        build_run(replica_config(f"--bf16 {PLAIN} {REDUCE} {INTRA} bf16"))

    with pytest.raises(RankFailed, match="has 2 ranks on 2 nodes"):
        run_ranks(SIZE, build_on_nodes_of_one)
