"""FP8 weights with --optimizer muon: owners cast complete weights, and broadcast codes in place of BF16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from small_run import Curve, SourceSamples, build_run, fingerprint, small_config, train, weights
from test_checkpoint import STEPS, load_newest, run_leg
from test_fp8_param_gather import BLOCKWISE, DELAYED, RAGGED, TENSORWISE, saved_tensors

from megafp8.checkpoint.progress import Progress
from megafp8.config.layer_backends import EMULATED
from megafp8.config.run_sizes import run_sizes
from megafp8.config.schema import RunConfig
from megafp8.optimizer.layer_wise import LayerWiseOptimizer
from megafp8.quantization.delayed_scaling import DelayedScale, DelayedState
from megafp8.quantization.fp8_parameter import WEIGHT, QuantizedParameter, quantized_parameters
from megafp8.quantization.quantize import quantize
from megafp8.resources.memory import estimate_memory
from megafp8.training.evaluation import build_batches
from megafp8.training.extensions.calibration import calibrate, needs_calibration
from megafp8.training.extensions.replica_check import check_replicas
from megafp8.training.extensions.step_records import params_norm
from megafp8.training.run import Run
from megafp8.training.step import train_step

GATHER, LAYER_WISE = "--fp8-param-gather", "--use-distributed-optimizer"
MUON = "--optimizer muon --muon-extra-scale-factor 0.2"
RECIPES = {
    name: f"{flags.replace(LAYER_WISE, '')} {MUON}"
    for name, flags in (("tensorwise", TENSORWISE), ("delayed", DELAYED), ("blockwise", BLOCKWISE))
}
TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 48 --moe-token-dispatcher-type alltoall"
# The gradient norm of experts on ranks of their own is rounded apart, but not where all ranks sum one norm.
EP2 = f"{EXPERTS} --expert-model-parallel-size 2 --clip-grad 0"


def config_of(recipe: str, flags: str, world_size: int) -> RunConfig:
    return small_config("llama", f"{RECIPES[recipe]} {flags}", world_size)


def train_calibrated(config: RunConfig, num_steps: int) -> tuple[Curve, str]:
    """Losses, and a fingerprint of the state of delayed scaling. With the flag, some weight must be quantized."""
    run = build_run(config)
    assert bool(quantized_parameters(run.training_state.chunks)) == config.precision.fp8_param_gather
    if needs_calibration(run):
        calibrate(run, Progress())
    curve = train(run, num_steps)
    check_replicas(run, num_steps)
    modules = run.training_state.chunks[0].named_modules()
    states = {name: module for name, module in modules if isinstance(module, DelayedState)}
    buffers = {f"{name}.{key}": value for name, state in states.items() for key, value in state.named_buffers()}
    return curve, fingerprint(buffers) if states else ""


@pytest.mark.parametrize(
    ("recipe", "flags", "world_size"),
    [
        pytest.param("tensorwise", "", 1, id="tensorwise-one"),
        pytest.param("tensorwise", "--overlap-grad-reduce --ddp-bucket-size 20000", 2, id="tensorwise-dp2-overlap"),
        pytest.param("delayed", "", 2, id="delayed-dp2"),
        pytest.param("blockwise", f"{TENSOR} --pipeline-model-parallel-size 2", 4, id="blockwise-tp2-pp2"),
        pytest.param("tensorwise", f"{TENSOR} --fp8-amax-reduction all", 4, id="tensorwise-tp2-dp2-shared-scales"),
        pytest.param("delayed", EP2, 2, id="delayed-ep2"),
    ],
)
def test_fp8_weights_train_as_bf16_weights_of_all_ranks(recipe: str, flags: str, world_size: int) -> None:
    """Bitwise, also the amax histories. Gradients of two ranks have one possible sum."""
    num_steps, micro = 4, "--micro-batch-size 2"
    plain = run_ranks(world_size, train_calibrated, config_of(recipe, f"{micro} {flags}", world_size), num_steps)
    gathers = config_of(recipe, f"{micro} {flags} {LAYER_WISE} {GATHER}", world_size)
    found = run_ranks(world_size, train_calibrated, gathers, num_steps)
    for ours, theirs in zip(found, plain, strict=True):
        assert ours[0].losses == theirs[0].losses and ours[1] == theirs[1]
    assert len(set(found[0][0].losses)) == num_steps


def check_codes(run: Run) -> list[int]:
    """Compare codes and scales with the quantizer's of the complete master weights; hashes of the codes."""
    optimizer = run.training_state.optimizer
    assert isinstance(optimizer, LayerWiseOptimizer)
    seen = []
    for ownership in optimizer.ownerships:
        for rank, owned in enumerate(ownership.owned):
            for weight in filter(is_quantized, owned):
                assert (weight.main_param is not None) == (rank == ownership.group.rank())
                master = torch.empty(weight.shape) if weight.main_param is None else weight.main_param.clone()
                dist.broadcast(master, dist.get_global_rank(ownership.group, rank), group=ownership.group)
                check_weight(weight, master)
                seen.append(hash(weight.codes.raw.numpy().tobytes()))
    return seen


def is_quantized(weight: Any) -> bool:
    return isinstance(weight, QuantizedParameter)


def check_weight(weight: QuantizedParameter, master: torch.Tensor) -> None:
    codes, delayed = weight.codes, None
    if codes.delayed is not None:
        delayed = DelayedScale(codes.delayed.quant_scale[WEIGHT], torch.zeros(()))
    expected, found = quantize(master.bfloat16(), codes.rule, delayed=delayed), codes.quantized()
    assert torch.equal(found.codes.view(torch.uint8), expected.codes.view(torch.uint8))
    assert torch.equal(found.dequant_scale, expected.dequant_scale)
    assert delayed is None or torch.equal(codes.amax, delayed.amax)


@pytest.mark.parametrize(
    ("recipe", "flags", "world_size"),
    [*((recipe, "", 2) for recipe in RECIPES), pytest.param("tensorwise", EP2, 4, id="tensorwise-ep2-dp2")],
)
def test_codes_are_the_recipes_of_the_master_weights(recipe: str, flags: str, world_size: int) -> None:
    """After each step, on all ranks, whoever owns a weight. Of four ranks each second one has the same experts."""
    flags = f"{RAGGED} {LAYER_WISE} {GATHER} --lr 1e-2 --micro-batch-size 1 {flags}"

    def steps() -> list[list[int]]:
        run = build_run(config_of(recipe, flags, world_size))
        return [check_codes(run) for step in range(1, 4) if train(run, 1, step)]

    ranks = run_ranks(world_size, steps)
    assert ranks[0] == ranks[-2] and ranks[1] == ranks[-1] and (ranks[0] != ranks[1]) == bool(flags.count("expert"))
    assert len(ranks[0][0]) == (2 * (2 + 2 * 2) if "expert" in flags else 2 * 4), "linears"
    assert all(len(set(codes)) > 1 for codes in zip(*ranks[0], strict=True)), "weights did not move"


def test_codes_are_broadcast_and_kept_once() -> None:
    """Of each element one byte, and of each weight an amax; memory plan and record of the step agree."""

    def count(flags: str) -> tuple[int, int, int, int]:
        config = config_of("tensorwise", f"{LAYER_WISE} {flags}", 2)
        run = build_run(config)
        result = train_step(run, build_batches(run, SourceSamples(32), 0, 8, num_workers=0), Progress())
        (ownership,) = run.training_state.optimizer.ownerships
        held = sum(buffer.nbytes for buffers in ownership.buffers for buffer in buffers)
        own = sum(buffer.nbytes for buffer in ownership.buffers[ownership.group.rank()])
        planned = estimate_memory(run_sizes(config, 2, run.vocab_size), implementation=EMULATED).weights_bytes
        num_scales = 4 * len(quantized_parameters(run.training_state.chunks))
        assert result.metrics["param_gather_bytes"] == held - own + num_scales
        addresses = {weight.data_ptr() for weight in weights(run).values() if not is_quantized(weight)}
        assert all(address % 16 == 0 for address in addresses)
        return held, planned, own, num_scales

    for (plain, planned_plain, *_), (codes, planned, *_) in zip(
        run_ranks(2, count, ""), run_ranks(2, count, GATHER), strict=True
    ):
        assert plain == pytest.approx(planned_plain, rel=0.02) and codes == pytest.approx(planned, rel=0.02)
        assert codes < 0.75 * plain


def test_norm_of_the_weights_is_that_of_bf16_weights() -> None:
    def norm(flags: str) -> float:
        run = build_run(config_of("tensorwise", f"{LAYER_WISE} {flags}", 2))
        train(run, 2)
        return params_norm(run)

    assert run_ranks(2, norm, GATHER)[0] == pytest.approx(run_ranks(2, norm, "")[0], rel=1e-6)


@pytest.mark.parametrize(
    ("recipe", "flags", "world_size"),
    [
        pytest.param("delayed", "", 2, id="delayed-dp2"),
        pytest.param("blockwise", TENSOR, 2, id="blockwise-tp2"),
        pytest.param("tensorwise", EP2, 2, id="tensorwise-ep2"),
    ],
)
def test_checkpoints_load_with_and_without_fp8_weights(
    recipe: str, flags: str, world_size: int, tmp_path: Path
) -> None:
    """The same tensors are saved, and runs with and without FP8 weights resume from them to the bit."""
    flags = f"--micro-batch-size 2 {flags}"
    without = config_of(recipe, flags, world_size)
    gathers = config_of(recipe, f"{flags} {LAYER_WISE} {GATHER}", world_size)
    unbroken = run_ranks(world_size, run_leg, without, 2 * STEPS, None, None)[0].curve
    for config, name in ((without, "plain"), (gathers, "gathers")):
        run_ranks(world_size, run_leg, config, STEPS, None, tmp_path / name)
    for config, name in ((without, "gathers"), (gathers, "gathers"), (gathers, "plain")):
        leg = run_ranks(world_size, run_leg, config, STEPS, tmp_path / name, None)[0]
        assert leg.curve.losses == unbroken.losses[STEPS:]
    expected, found = (run_ranks(1, saved_tensors, tmp_path / name)[0] for name in ("plain", "gathers"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_weights_alone_become_new_master_weights(tmp_path: Path) -> None:
    """`--finetune` does not start from decoded codes, in another layout than that of the save."""
    run_ranks(2, run_leg, config_of("blockwise", f"{LAYER_WISE} {GATHER}", 2), STEPS, None, tmp_path)

    def finetune(flags: str) -> list[float]:
        run = build_run(config_of("blockwise", flags, 1))
        load_newest(run, tmp_path, weights_only=True)
        return train(run, STEPS).losses

    assert run_ranks(1, finetune, f"{LAYER_WISE} {GATHER}") == run_ranks(1, finetune, "")
