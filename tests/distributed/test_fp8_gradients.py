"""`--grad-reduce-in-fp8`: sums against a plain reference, bytes, agreement of ranks, bad numbers, resuming."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional

import pytest
import test_nonfinite_values
import torch
import torch.distributed as dist
from ranks import RankFailed, run_ranks
from small_run import PLAIN, SourceSamples, build_run, fingerprint, small_config, weights
from tolerances import FP8_GRADIENT_LOSS
from torch import Tensor

from megafp8.checkpoint.directory import find_checkpoint
from megafp8.checkpoint.load import load_checkpoint
from megafp8.checkpoint.progress import Progress
from megafp8.checkpoint.save import save_checkpoint
from megafp8.config.schema import RunConfig
from megafp8.mcore.grad_reduction import Reduction
from megafp8.optimizer import fp8_gradients
from megafp8.optimizer.fp8_gradients import (
    FACTOR_GROWTH,
    ROWS_PER_PART,
    CodeCounts,
    Fp8Reduction,
    GradientCodes,
    PipelinedReduction,
    next_factor,
)
from megafp8.optimizer.fp8_reduction import bucket_reduction
from megafp8.optimizer.gradient_communication import add_grad_sync_hook
from megafp8.recipes.formats import E4M3, E5M2, Format
from megafp8.training.evaluation import build_batches
from megafp8.training.extensions.replica_check import check_replicas
from megafp8.training.run import Run
from megafp8.training.step import StepResult, train_step

FP8 = "--grad-reduce-in-fp8"
TENSOR_SCALES = f"{FP8} --grad-reduce-fp8-scaling tensor"
COMMON = f"{PLAIN} --bf16 --num-layers 2"
SHARDED = "--use-distributed-optimizer"
OVERLAP = f"{SHARDED} --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 20000"
OVERLAP_WHOLE = "--overlap-grad-reduce --ddp-bucket-size 20000"
TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel"
NUM_STEPS = 4
# Relative. A code is off by at most half of its last mantissa bit, 2^-4 for E4M3, and errors of ranks do not add up in
# the norm more than the gradients themselves do; the ranks' gradients of one batch have at most twice the norm of the
# mean.
NORM_BOUND = 2 * 2.0**-4


# --- codes and sums ---------------------------------------------------------------------------------------------------

RANGES = [(0, 200), (256, 700), (704, 705), (768, 900)]
NUM_ELEMENTS = 900  # with an all-reduce a bucket need not be divisible by the number of ranks
EXACT = 3


def local_gradients(rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Gradients of a rank over many orders of magnitude, also within a block, with a block of zeros."""
    generator = torch.Generator().manual_seed(rank)
    gradients = torch.randn(NUM_ELEMENTS, generator=generator) * torch.logspace(-8, 2, NUM_ELEMENTS)
    gradients[::7] *= 1e-9
    gradients[300:460] = 0
    return gradients.to(dtype)


@dataclass(frozen=True, eq=False)
class Parameter:
    """What the reduction reads of a parameter."""

    main_grad: Tensor


def build_reduction(gradients: Tensor, settings: GradientCodes, step: Fp8Reduction) -> PipelinedReduction:
    parameters = [Parameter(gradients[start:stop]) for start, stop in RANGES]
    bucket = SimpleNamespace(grad_data=gradients, params_list=parameters)
    return bucket_reduction(bucket, {parameters[EXACT]}, dist.group.WORLD, settings, step)


def reduce(settings: GradientCodes, is_complete: bool, is_average: bool) -> tuple[Tensor, list[float]]:
    gradients, step = local_gradients(dist.get_rank()), Fp8Reduction(torch.device("cpu"))
    reduction = build_reduction(gradients, settings, step)
    reduction.start(Reduction(gradients, is_complete, is_average)).wait()
    return gradients, step.counts.tolist()


def quantized(value: float, quant_scale: float, fmt: Format) -> float:
    """One value, rounded to nearest even by its exponent, in Python's FP64."""
    scaled = abs(value) * quant_scale
    if scaled == 0:
        return 0.0
    exponent = max(math.floor(math.log2(scaled)), round(math.log2(fmt.min_normal)))
    spacing = 2.0 ** (exponent - fmt.mantissa_bits)
    return math.copysign(min(round(scaled / spacing) * spacing, fmt.max), value) / quant_scale


def expected_sums(num_ranks: int, settings: GradientCodes) -> Tensor:
    """The sums of the quantized parameters, element by element."""
    shard = -(-NUM_ELEMENTS // num_ranks)
    local, sums = [local_gradients(rank) for rank in range(num_ranks)], torch.zeros(NUM_ELEMENTS)
    for index, (start, stop) in enumerate(RANGES):
        everywhere = max(float(gradients[start:stop].abs().max()) for gradients in local)
        for gradients in local:
            if index == EXACT:
                sums[start:stop] += gradients[start:stop]
                continue
            borders = [start, *(edge for edge in range(0, NUM_ELEMENTS, shard) if start < edge < stop), stop]
            for low, high in zip(borders, borders[1:], strict=False):
                for first in range(low, high, 128):
                    block = gradients[first : min(first + 128, high)]
                    amax = float(block.abs().max()) if settings.is_blockwise else everywhere
                    quant_scale = 2.0 ** math.floor(math.log2(settings.format.max / amax)) if amax else 1.0
                    codes = [quantized(value, quant_scale, settings.format) for value in block.tolist()]
                    sums[first : first + len(codes)] += torch.tensor(codes)
    return sums


@pytest.mark.parametrize("is_complete", [False, True], ids=["reduce-scatter", "all-reduce"])
@pytest.mark.parametrize(
    ("fmt", "is_blockwise", "is_average", "rows_per_part"),
    [(E4M3, True, False, ROWS_PER_PART), (E4M3, True, False, 1), (E5M2, True, True, 1), (E4M3, False, False, 1)],
)
def test_sums_equal_those_of_a_plain_reference(
    fmt: Format,
    is_blockwise: bool,
    is_average: bool,
    rows_per_part: int,
    is_complete: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bitwise, also in parts.

    All ranks have the same sums after an all-reduce; a reduce-scatter leaves other shards as they were.
    """
    settings, num_ranks = GradientCodes(fmt, is_blockwise, False), 3
    monkeypatch.setattr(fp8_gradients, "ROWS_PER_PART", rows_per_part)
    answers = run_ranks(num_ranks, reduce, settings, is_complete, is_average)
    expected = expected_sums(num_ranks, settings)
    if is_average:
        expected /= num_ranks
    if is_complete:
        expected[: RANGES[EXACT][0]] = expected[: RANGES[EXACT][0]].bfloat16().float()
    shard = -(-NUM_ELEMENTS // num_ranks)
    is_parameter = torch.zeros(NUM_ELEMENTS, dtype=torch.bool)
    for start, stop in RANGES:
        is_parameter[start:stop] = True
    for rank, (found, counts) in enumerate(answers):
        is_own = (torch.arange(NUM_ELEMENTS) // shard == rank) | torch.tensor(is_complete)
        assert torch.equal(found[is_parameter & is_own], expected[is_parameter & is_own])
        assert torch.equal(found[~is_own], local_gradients(rank)[~is_own])
        assert counts[0] == local_gradients(rank)[: RANGES[EXACT][0]][is_parameter[: RANGES[EXACT][0]]].count_nonzero()
        assert counts[1] > 0 and counts[2] == 0, "small values become 0, none saturates"


def test_the_factor_saturates_values_and_is_adapted() -> None:
    """The counts tell both, and the factor follows the rule of FP8-LM."""

    def count() -> list[float]:
        gradients, step = local_gradients(dist.get_rank()), Fp8Reduction(torch.device("cpu"))
        step.begin_step(8.0)
        build_reduction(gradients, GradientCodes(E4M3, False, False), step).start(
            Reduction(gradients, False, False)
        ).wait()
        return step.counts.tolist()

    num_values, num_underflows, num_saturated = run_ranks(2, count)[0]
    assert 0 < num_saturated < num_values and 0 < num_underflows < num_values
    assert next_factor(4.0, CodeCounts(num_values, num_underflows, num_saturated)) == 2.0
    assert next_factor(4.0, CodeCounts(1e6, 0.0, 10.0)) == 4.0 * FACTOR_GROWTH, "0.001% is allowed"
    assert next_factor(4.0, CodeCounts(0.0, 0.0, 0.0)) == 4.0


def test_error_feedback_makes_the_mean_of_many_steps_exact() -> None:
    """The same gradients in each step: without feedback the error stays, with it the mean converges as 1 / steps."""

    def error(has_feedback: bool, num_steps: int = 32) -> float:
        local, step = local_gradients(dist.get_rank()), Fp8Reduction(torch.device("cpu"))
        gradients, total = local.clone(), torch.zeros_like(local)
        reduction = build_reduction(gradients, GradientCodes(E4M3, True, has_feedback), step)
        for _ in range(num_steps):
            gradients.copy_(local)
            reduction.start(Reduction(gradients, True, False)).wait()
            total += gradients / num_steps
        exact = local_gradients(0) + local_gradients(1)
        return float((total - exact)[256:700].norm() / exact[256:700].norm())

    plain, fed_back = (run_ranks(2, error, flag)[0] for flag in (False, True))
    assert fed_back < plain / 8
    assert plain < 2.0**-4


def test_an_infinity_does_not_stay_in_the_residual() -> None:
    def residuals_are_finite() -> bool:
        gradients, step = local_gradients(dist.get_rank()), Fp8Reduction(torch.device("cpu"))
        gradients[5] = math.inf
        reduction = build_reduction(gradients, GradientCodes(E4M3, True, True), step)
        reduction.start(Reduction(gradients, True, False)).wait()
        assert not gradients[5].isfinite()
        return all(bool(residual.isfinite().all()) for residual in step.residuals)

    assert run_ranks(2, residuals_are_finite) == [True, True]


# --- runs -------------------------------------------------------------------------------------------------------------


def steps(run: Run, num_steps: int, first: Optional[Progress] = None) -> tuple[list[StepResult], Progress]:
    """Train as the loop does, which passes the automatic factor from step to step."""
    progress, results = first or Progress(), []
    batch = run.global_batch_size
    end = progress.consumed_samples + num_steps * batch
    batches = build_batches(run, SourceSamples(run.config.data.seq_length), progress.consumed_samples, end, 0)
    for _ in range(num_steps):
        results.append(train_step(run, batches, progress))
        factor = results[-1].changed_progress.get("grad_factor", progress.grad_factor)
        progress = Progress(progress.step + 1, progress.consumed_samples + batch, grad_factor=factor)
    return results, progress


def trained(config: RunConfig) -> tuple[list[float], list[float], int]:
    """Losses, gradient norms and bytes of a step; replicas are compared bit by bit."""
    run = build_run(config)
    results, _ = steps(run, NUM_STEPS)
    check_replicas(run, NUM_STEPS)
    return (
        [result.loss for result in results],
        [result.grad_norm or 0.0 for result in results],
        results[-1].metrics["grad_reduce_bytes"],
    )


@pytest.mark.parametrize(
    ("world_size", "flags", "options"),
    [
        pytest.param(2, OVERLAP, FP8, id="dp2-sharded-overlap"),
        pytest.param(
            2, f"{OVERLAP_WHOLE} --grad-reduce-in-bf16", f"{FP8} --grad-reduce-fp8-format e5m2", id="dp2-bf16"
        ),
        pytest.param(4, f"{SHARDED} --micro-batch-size 1", f"{FP8} --grad-reduce-fp8-exclude none", id="dp4-sharded"),
        pytest.param(4, f"{SHARDED} {TENSOR} --micro-batch-size 2", TENSOR_SCALES, id="tp2-dp2-tensor-scales"),
        pytest.param(4, "--tensor-model-parallel-size 2", f"{FP8} --grad-reduce-fp8-exclude none", id="tp2-dp2-none"),
    ],
)
def test_training_follows_the_fp32_reduction(world_size: int, flags: str, options: str) -> None:
    """Losses and norms are close, all ranks report the same, and the reduction sends fewer bytes."""
    plain, fp8 = (
        run_ranks(world_size, trained, small_config("llama", f"{COMMON} {flags} {option}", world_size))
        for option in ("", options)
    )
    assert all(answer[:2] == fp8[0][:2] for answer in fp8)
    assert fp8[0][0] != plain[0][0]
    assert max(abs(a - b) for a, b in zip(fp8[0][0], plain[0][0], strict=True)) < FP8_GRADIENT_LOSS
    assert fp8[0][1] == pytest.approx(plain[0][1], rel=NORM_BOUND)
    total, plain_total = (sum(answer[2] for answer in answers) for answers in (fp8, plain))
    assert total < 0.85 * plain_total, "FP32 or BF16, with embeddings in the same dtype"


def bytes_of_a_step(config: RunConfig) -> tuple[int, int]:
    """Bytes that this rank receives in the second step: as counted, and from what is passed to the collectives."""
    run, seen = build_run(config), []
    steps(run, 1)
    plain = dist.all_to_all_single

    def exchange(output: Tensor, input: Tensor, outputs: list[int], inputs: list[int], **options: Any) -> Any:
        assert output.dtype == torch.uint8
        seen.append(sum(outputs) - outputs[dist.get_rank()])
        return plain(output, input, outputs, inputs, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", exchange)
        (result,), _ = steps(run, 1, Progress(1, run.global_batch_size))
    return result.metrics["grad_reduce_bytes"], sum(seen)


def test_bytes_are_a_quarter_of_fp32_and_half_of_bf16() -> None:
    """Of the reduce-scatter, with all scales and paddings; microbatches change nothing, since they add up before it.

    An all-reduce sends its sums in BF16: 1 / 2 of a reduce-scatter in FP32 besides the codes.
    """
    shape = f"{COMMON} --hidden-size 128 {SHARDED}"

    def count(flags: str) -> tuple[int, int]:
        found = run_ranks(2, bytes_of_a_step, small_config("llama", flags, 2))
        return sum(counted for counted, _ in found), sum(seen for _, seen in found)

    fp8, seen = count(f"{shape} {FP8} --grad-reduce-fp8-exclude none")
    assert fp8 == seen
    assert count(f"{shape} {FP8} --grad-reduce-fp8-exclude none --micro-batch-size 1") == (fp8, fp8)
    fp32, none = count(shape)
    assert none == 0
    assert fp8 <= 0.26 * fp32
    assert fp8 <= 0.52 * count(f"{shape} --grad-reduce-in-bf16")[0]
    norms_and_embeddings = count(f"{shape} {FP8}")[0]
    assert fp8 < norms_and_embeddings < 0.5 * fp32
    whole = shape.replace(SHARDED, "")
    both, seen = count(f"{whole} {FP8} --grad-reduce-fp8-exclude none")
    assert both == seen
    assert both == pytest.approx((0.26 + 0.5) / 2 * count(whole)[0], rel=0.02)


def spoil_quantized_gradient(run: Run, value: float) -> Run:
    """Set one element of the gradient of a linear layer, before its bucket is reduced, from now on."""
    weight = next(
        p for name, p in run.training_state.chunks[0].named_parameters() if "layers.1.mlp.linear_fc2.weight" in name
    )

    def spoil() -> None:
        weight.main_grad.view(-1)[-1] = value

    for group in run.training_state.chunks[0].bucket_groups:
        if weight in group.params:
            add_grad_sync_hook(group, spoil)
    return run


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("flags", "check"),
    [
        pytest.param(f"{OVERLAP} {FP8}", None, id="sharded-overlap"),
        pytest.param(TENSOR_SCALES, None, id="all-reduce-tensor-scales"),
        pytest.param(
            f"{SHARDED} {FP8}", test_nonfinite_values.checked_by_norm, id="checked-by-the-norm-of-reduced-gradients"
        ),
    ],
)
def test_a_bad_gradient_is_found_and_named(flags: str, check: Optional[Callable[..., Run]], value: float) -> None:
    """On the rank that has it, although codes saturate, and no weight changes."""

    def spoil(run: Run) -> Run:
        return spoil_quantized_gradient(run, value)

    bad, others = spoil, lambda run: run
    if check is not None:
        bad, others = (lambda run, spoil=spoil: check(run, spoil)), (lambda run: check(run, lambda each: each))
    texts, are_untouched = zip(
        *run_ranks(2, test_nonfinite_values.stop, small_config("llama", f"{COMMON} {flags}", 2), bad, 1, others),
        strict=True,
    )
    assert all(are_untouched) and len(set(texts)) == 1
    assert "  rank 1: first bad tensor: gradient of decoder.layers.1.mlp.linear_fc2.weight" in texts[0]
    assert "rank 0: " not in texts[0]


def test_resuming_is_exact_with_the_automatic_factor(tmp_path: Path) -> None:
    config = small_config("llama", f"{COMMON} {OVERLAP} {TENSOR_SCALES}", 2)

    def leg(load: Optional[Path], num_steps: int) -> tuple[list[float], float, str]:
        run = build_run(config)
        first = Progress()
        if load is not None:
            _, path = find_checkpoint(load) or (0, load)
            first = load_checkpoint(path, config, run.training_state).progress
        results, progress = steps(run, num_steps, first)
        if load is None and num_steps == 2:
            save_checkpoint(tmp_path, config, run.training_state, progress)
        return [result.loss for result in results], progress.grad_factor, fingerprint(weights(run))

    unbroken, before = run_ranks(2, leg, None, 4), run_ranks(2, leg, None, 2)
    after = run_ranks(2, leg, tmp_path, 2)
    for whole, first, second in zip(unbroken, before, after, strict=True):
        assert first[0] + second[0] == whole[0]
        assert second[1:] == whole[1:]
        assert first[1] != 1.0


def test_a_pattern_without_a_parameter_is_refused() -> None:
    config = small_config("llama", f"{COMMON} {FP8} --grad-reduce-fp8-exclude *norm* *linear_fc9*", 2)
    with pytest.raises(RankFailed, match=r"--grad-reduce-fp8-exclude \*linear_fc9\* matches the name of no parameter"):
        run_ranks(2, build_run, config)
