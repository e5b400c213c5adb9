"""What FSDP2's ranks send: weights and gradients as FP8 codes, and the bytes in the step records."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from small_run import Curve, SourceSamples, build_run, save_or_load, small_config, train
from test_fp8_gradients import NORM_BOUND
from tolerances import FP8_GRADIENT_LOSS, LAYOUT_LOSS

from megafp8.checkpoint.progress import Progress
from megafp8.config.schema import RunConfig
from megafp8.errors import NumericsError
from megafp8.fsdp.gradients import rank_shards
from megafp8.optimizer.gradient_slices import GradientSlice
from megafp8.quantization.fp8_parameter import QuantizedParameter
from megafp8.training.evaluation import build_batches
from megafp8.training.extensions.calibration import calibrate, needs_calibration
from megafp8.training.step import train_step

FSDP = "--use-torch-fsdp2 --no-gradient-accumulation-fusion"
COMMON = f"--num-layers 2 --bf16 --micro-batch-size 2 {FSDP}"
TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel"
FP8 = "--fp8-format hybrid --fp8-recipe"
GATHER, REDUCE = "--fp8-param-gather", "--grad-reduce-in-fp8"
REPLICAS = "--num-distributed-optimizer-instances 2 --micro-batch-size 1"
FEEDBACK = "--grad-reduce-fp8-error-feedback"
PLAIN = f"{COMMON} --transformer-impl local"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
STEPS = 3


def trained(config: RunConfig) -> tuple[Curve, int, int]:
    """Losses and norms, and the bytes of weights and gradients in the last step."""
    run = build_run(config)
    if needs_calibration(run):
        calibrate(run, Progress())
    curve = train(run, STEPS - 1)
    batch = run.global_batch_size
    samples = SourceSamples(config.data.seq_length)
    batches = build_batches(run, samples, (STEPS - 1) * batch, STEPS * batch, num_workers=0)
    last = train_step(run, batches, Progress(STEPS - 1, (STEPS - 1) * batch))
    losses, norms = [*curve.losses, last.loss], [*curve.grad_norms, last.grad_norm]
    return Curve(losses, norms), last.metrics["param_gather_bytes"], last.metrics["grad_reduce_bytes"]


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        pytest.param(2, f"{FP8} tensorwise", id="tensorwise"),
        pytest.param(2, f"{FP8} blockwise --hidden-size 144 --num-attention-heads 4 {RECOMPUTE}", id="blockwise-cut"),
        pytest.param(2, f"{FP8} delayed --fp8-amax-history-len 4", id="delayed"),
        pytest.param(2, f"{FP8} tensorwise --torch-fsdp2-no-reshard-after-forward", id="no-reshard"),
        pytest.param(4, f"{FP8} tensorwise {REPLICAS}", id="two-replicas"),
        pytest.param(4, f"{FP8} tensorwise {TENSOR} --fp8-amax-reduction all", id="tp2"),
    ],
)
def test_weights_gathered_as_codes_train_as_those_in_bf16(world_size: int, flags: str) -> None:
    """Bitwise, with half the bytes of the linear layers."""
    plain, codes = (
        run_ranks(world_size, trained, small_config("llama", f"{COMMON} {flags} {gather}", world_size))
        for gather in ("", GATHER)
    )
    for (curve, in_bf16, reduced), (curve_of_codes, in_fp8, reduced_too) in zip(plain, codes, strict=True):
        assert curve_of_codes == curve and reduced == reduced_too
        assert 0.5 * in_bf16 < in_fp8 < 0.75 * in_bf16  # embedding, output layer and norms stay in BF16
    assert len(set(plain[0][0].losses)) == STEPS


def test_replicas_gather_within_themselves_and_add_their_sums() -> None:
    """Of n bytes, four ranks receive 3/4 n in a gather or a reduction. In two replicas of two they gather 1/2 n, and
    reduce 1/2 n in a replica, in each of two microbatches, and 2 * 1/2 * 1/2 n between the replicas in a step."""
    flags = f"{PLAIN} --micro-batch-size 1"
    full, hybrid = (run_ranks(4, trained, small_config("llama", f"{flags} {extra}", 4)) for extra in ("", REPLICAS))
    assert all(answer == hybrid[0] for answer in hybrid)
    assert hybrid[0][0].losses == pytest.approx(full[0][0].losses, abs=LAYOUT_LOSS)
    assert 3 * hybrid[0][1] == 2 * full[0][1]
    assert 2 * 3 * hybrid[0][2] == (2 * 2 + 2) * full[0][2]


def fraction_with_low_bits(config: RunConfig) -> float:
    """Of the gradients of a step that are not zero, before they are divided by a number of tokens: those that BF16
    cannot express."""
    run, values = build_run(config), []
    chunk, batch = run.training_state.chunks[0], run.global_batch_size

    def keep(factor: object) -> None:
        values.extend(each.main_grad.to_local().flatten().clone() for each in chunk.parameters())

    chunk.scale_gradients = keep
    batches = build_batches(run, SourceSamples(config.data.seq_length), 0, batch, num_workers=0)
    train_step(run, batches, Progress())
    rows = torch.cat(values)
    rows = rows[rows != 0]
    return float((rows != rows.bfloat16()).float().mean())


def test_sums_of_a_microbatch_are_not_rounded() -> None:
    """Of two ranks' gradients in BF16, in FP32."""
    config = small_config("llama", f"{PLAIN} --micro-batch-size 4", 2)
    assert config.training.global_batch_size == 2 * 4, "more than one microbatch"
    assert all(fraction > 0.2 for fraction in run_ranks(2, fraction_with_low_bits, config))


def gathered_dtypes(config: RunConfig) -> tuple[int, int, int]:
    """Of one forward and backward pass: bytes as counted, bytes that the collectives receive, and linear weights that
    are codes during the forward pass."""
    run, received, found = build_run(config), [], []
    train(run, 1)
    for part in run.parts:
        part.after_load()  # takes what was counted
    plain, reduce = dist.all_gather_single, dist.all_reduce

    def gather(output: torch.Tensor, input: torch.Tensor, **options: object) -> object:
        received.append(output.nbytes - input.nbytes)
        return plain(output, input, **options)

    def hook(module: torch.nn.Module, *unused: object) -> None:
        found.append(isinstance(module.weight, QuantizedParameter))

    for module in run.training_state.chunks[0].modules():
        if type(module).__name__ in ("EmulatedColumnParallelLinear", "EmulatedRowParallelLinear"):
            module.register_forward_hook(hook)
    batch = run.global_batch_size
    batches = build_batches(run, SourceSamples(config.data.seq_length), batch, 2 * batch, num_workers=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_gather_single", gather)
        result = train_step(run, batches, Progress(1, batch))
    assert reduce is dist.all_reduce
    return result.metrics["param_gather_bytes"], sum(received), sum(found)


def test_records_have_the_bytes_that_the_gathers_receive() -> None:
    """What the collectives are given, and the amaxes; the linears do compute with codes."""
    flags = f"{COMMON} {FP8} tensorwise {GATHER}"
    for counted, received, num_codes in run_ranks(2, gathered_dtypes, small_config("llama", flags, 2)):
        num_microbatches, num_linears = 2, 2 * 4
        assert num_codes == num_microbatches * num_linears
        assert counted - received == num_linears * 4, "one FP32 amax for each weight, once in a step"


@pytest.mark.parametrize(
    ("world_size", "flags", "options"),
    [
        pytest.param(2, PLAIN, REDUCE, id="block"),
        pytest.param(
            2, PLAIN, f"{REDUCE} --grad-reduce-fp8-scaling tensor --grad-reduce-fp8-exclude none", id="tensor"
        ),
        pytest.param(2, f"{PLAIN} --grad-reduce-in-bf16", f"{REDUCE} --grad-reduce-fp8-format e5m2", id="bf16-e5m2"),
        pytest.param(4, f"{PLAIN} {TENSOR}", REDUCE, id="tp2"),
        pytest.param(4, PLAIN, f"{REDUCE} --grad-reduce-fp8-error-feedback", id="dp4-feedback"),
    ],
)
def test_gradients_sent_as_codes_follow_the_other_reductions(world_size: int, flags: str, options: str) -> None:
    plain, fp8 = (
        run_ranks(world_size, trained, small_config("llama", f"{flags} {option}", world_size))
        for option in ("", options)
    )
    assert all(answer[0] == fp8[0][0] for answer in fp8)
    assert fp8[0][0].losses != plain[0][0].losses
    assert max(abs(a - b) for a, b in zip(fp8[0][0].losses, plain[0][0].losses, strict=True)) < FP8_GRADIENT_LOSS
    assert fp8[0][0].grad_norms == pytest.approx(plain[0][0].grad_norms, rel=NORM_BOUND)
    assert sum(answer[2] for answer in fp8) < 0.85 * sum(answer[2] for answer in plain)


def test_bytes_of_a_reduction_in_codes() -> None:
    """A quarter of FP32's and half of BF16's, for every microbatch."""

    def count(flags: str) -> int:
        config = small_config("llama", f"{PLAIN} --hidden-size 128 {flags}", 2)
        return sum(answer[2] for answer in run_ranks(2, trained, config))

    fp8 = count(f"{REDUCE} --grad-reduce-fp8-exclude none")
    assert 0 < fp8 <= 0.26 * count("")
    assert fp8 <= 0.52 * count("--grad-reduce-in-bf16")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_gradient_stops_the_step_on_all_ranks(bad: float) -> None:
    """Although codes saturate: its sum is not finite either."""

    def stopped() -> str:
        run = build_run(small_config("llama", f"{PLAIN} {REDUCE}", 2))
        linear = run.training_state.chunks[0].module.module.decoder.layers[1].mlp.linear_fc2
        if dist.get_rank() == 1:
            linear.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * bad,))
        with pytest.raises(NumericsError) as caught:
            train(run, 1)
        return str(caught.value)

    texts = run_ranks(2, stopped)
    assert len(set(texts)) == 1 and "gradient of decoder.layers.1.mlp.linear_fc1.weight" in texts[0], texts[0]


def test_slices_of_each_rank_follow_each_other() -> None:
    first, second = rank_shards([6, 2], [False, True], 2)
    assert first.quantized == (GradientSlice(0, 6, 0),) and first.unquantized == (GradientSlice(6, 8, 1),)
    assert second.quantized == (GradientSlice(8, 14, 0),) and second.unquantized == (GradientSlice(14, 16, 1),)


def test_a_run_with_codes_resumes_bitwise_and_without_fsdp(tmp_path: Path) -> None:
    """The checkpoint has BF16 weights and FP32 state, so that ranks with complete weights load it too.

    It also has the errors that the codes of gradients had, which another layout drops.
    """
    flags = f"{FP8} blockwise {GATHER} {REDUCE} {FEEDBACK}"
    sharded = small_config("llama", f"{COMMON} {flags}", 2)
    whole = small_config("llama", f"--num-layers 2 --bf16 --micro-batch-size 2 {FP8} blockwise {REDUCE} {FEEDBACK}", 2)

    def leg(config: RunConfig, is_first: bool) -> tuple[list[float], tuple[str, ...]]:
        run = build_run(config)
        notes = save_or_load(run, tmp_path, 2, is_first)
        return train(run, 2, 3).losses, notes

    unbroken, _ = run_ranks(2, leg, sharded, True)[0]
    assert run_ranks(2, leg, sharded, False)[0] == (unbroken, ())
    other, notes = run_ranks(2, leg, whole, False)[0]
    assert notes == (f"buckets or excluded parameters differ: the errors of FP8 gradients ({FEEDBACK}) start at zero",)
    assert other[0] == pytest.approx(unbroken[0], abs=LAYOUT_LOSS)
    assert other[1] == pytest.approx(unbroken[1], abs=FP8_GRADIENT_LOSS)
