"""Weights of experts kept and gathered as FP8 codes: the same codes and the same run as with a gather in BF16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from small_run import build_run, small_config, train
from test_checkpoint import STEPS, load_newest, run_leg
from test_fp8_param_gather import RAGGED, check_codes, curve_of, gathered_in_a_step, saved_tensors

from megafp8.config.layer_backends import EMULATED
from megafp8.config.run_sizes import run_sizes
from megafp8.config.schema import RunConfig
from megafp8.models.experts import PaddedExperts
from megafp8.quantization.fp8_parameter import QuantizedParameter, quantized_parameters
from megafp8.resources.memory import estimate_memory

GATHER = "--fp8-param-gather"
EXPERTS = (
    "--num-layers 2 --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 48 --micro-batch-size 2 "
    "--global-batch-size 4 "
    "--moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 0.01 --moe-shared-expert-intermediate-size 32 "
    "--bf16 --use-distributed-optimizer --fp8-format hybrid"
)
RECIPES = {
    "tensorwise": "--fp8-recipe tensorwise",
    "delayed": "--fp8-recipe delayed --fp8-amax-history-len 4 --fp8-amax-compute-algo max",
    "blockwise": "--fp8-format e4m3 --fp8-recipe blockwise",
}
OVERLAP = "--overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 20000"
EP2 = "--expert-model-parallel-size 2"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
ETP1 = "--expert-tensor-parallel-size 1"


def config_of(recipe: str, layout: str, gather: str = GATHER, world_size: int = 2) -> RunConfig:
    return small_config("llama", f"{EXPERTS} {RECIPES[recipe]} {layout} {gather}", world_size)


@pytest.mark.parametrize(
    ("recipe", "layout", "world_size"),
    [
        pytest.param("tensorwise", OVERLAP, 2, id="tensorwise-dp2-overlap"),
        pytest.param("tensorwise", f"{EP2} {OVERLAP}", 2, id="tensorwise-ep2-overlap"),
        pytest.param("delayed", f"{TP2} {ETP1}", 2, id="delayed-tp2-etp1"),
        pytest.param("delayed", f"{EP2} {TP2} {ETP1}", 2, id="delayed-ep2-tp2-etp1"),
        pytest.param("blockwise", f"{EP2} --pipeline-model-parallel-size 2", 4, id="blockwise-ep2-pp2"),
    ],
)
def test_fp8_gather_equals_bf16_gather(recipe: str, layout: str, world_size: int) -> None:
    """Bitwise, in layouts whose gradients are sums of two ranks."""
    plain, gathered = (
        run_ranks(world_size, curve_of, config_of(recipe, layout, gather, world_size), 4)[0] for gather in ("", GATHER)
    )
    assert gathered == plain
    assert len(set(plain.losses)) == 4


def train_and_check_codes(config: RunConfig) -> list[int]:
    """Train, and compare the codes with those of the complete weights after each step.

    Returns:
        A hash of the codes of all routed experts after each step, and how many weights they have.
    """
    run, seen = build_run(config), []
    experts = [
        each for chunk in run.training_state.chunks for each in chunk.modules() if isinstance(each, PaddedExperts)
    ]
    weights = quantized_parameters(experts)
    for step in range(1, 4):
        train(run, 1, step)
        check_codes(run)
        seen.append(hash(tuple(weight.codes.raw.numpy().tobytes() for weight in weights)))
    return [*seen, len(weights)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_codes_of_experts_equal_those_of_their_full_weights(recipe: str) -> None:
    """Two ranks have each expert, with a shard of its master weights each."""
    config = config_of(recipe, f"{EP2} {RAGGED} --lr 1e-2 --micro-batch-size 1", world_size=4)
    ranks = run_ranks(4, train_and_check_codes, config)
    assert ranks[0] == ranks[2] != ranks[1] == ranks[3], "expert-parallel ranks have other experts"
    assert len(set(ranks[0][:-1])) == 3, "weights did not move"
    assert ranks[0][-1] == 2 * 2 * 2, "layers, experts of a rank and linears"


@pytest.mark.parametrize("overlap", ["", OVERLAP], ids=["plain", "overlap"])
def test_all_weights_are_gathered_once_and_counted(overlap: str) -> None:
    """Two ranks have each expert and four all other weights; codes are one byte in place of two."""

    def count(gather: str) -> tuple[int, int, float]:
        layout = f"{EP2} {overlap} --micro-batch-size 1"
        counted, seen, run = gathered_in_a_step(config_of("tensorwise", layout, gather, 4))
        chunk = run.training_state.chunks[0]
        expected = sum(buffer.param_data.nbytes for buffer in chunk.buffers) * 3 / 4
        expected += sum(buffer.param_data.nbytes for buffer in chunk.expert_parallel_buffers) / 2
        return counted, seen, expected

    plain, plain_seen, plain_expected = run_ranks(4, count, "")[0]
    gathered, gathered_seen, expected = run_ranks(4, count, GATHER)[0]
    assert (plain, plain_seen, gathered_seen) == (plain_expected, plain_expected, expected)
    assert 0 < gathered - gathered_seen < 200, "amaxes"
    assert gathered < 0.75 * plain


@pytest.mark.parametrize(
    ("recipe", "layout", "world_size"),
    [
        pytest.param("delayed", f"{EP2} {OVERLAP}", 2, id="delayed-ep2-overlap"),
        pytest.param("blockwise", f"{EP2} {TP2} {ETP1}", 2, id="blockwise-ep2-tp2-etp1"),
    ],
)
def test_checkpoints_load_with_and_without_fp8_weights(
    recipe: str, layout: str, world_size: int, tmp_path: Path
) -> None:
    """The same tensors are saved, and both kinds of run resume from them to the bit."""
    without, gathers = (config_of(recipe, layout, gather, world_size) for gather in ("", GATHER))
    unbroken = run_ranks(world_size, run_leg, without, 2 * STEPS, None, None)[0].curve
    for config, name in ((without, "plain"), (gathers, "gathers")):
        run_ranks(world_size, run_leg, config, STEPS, None, tmp_path / name)
    for config, name in ((without, "gathers"), (gathers, "gathers"), (gathers, "plain")):
        leg = run_ranks(world_size, run_leg, config, STEPS, tmp_path / name, None)[0]
        assert leg.curve.losses == unbroken.losses[STEPS:]
        assert leg.curve.grad_norms == unbroken.grad_norms[STEPS:]
    expected, found = (run_ranks(1, saved_tensors, tmp_path / name)[0] for name in ("plain", "gathers"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_fp8_experts_load_in_another_layout(tmp_path: Path) -> None:
    """Saved by expert-parallel ranks, loaded by one rank: the codes are those of the same master weights."""
    run_ranks(2, run_leg, config_of("tensorwise", EP2), STEPS, None, tmp_path)

    def load(config: RunConfig) -> dict[str, torch.Tensor]:
        run = build_run(config)
        load_newest(run, tmp_path)
        check_codes(run)
        named = run.training_state.chunks[0].named_parameters()
        return {
            name: weight.dequantize() if isinstance(weight, QuantizedParameter) else weight.detach().clone()
            for name, weight in named
        }

    one = run_ranks(1, load, config_of("tensorwise", "", world_size=1))[0]
    plain = run_ranks(1, load, config_of("tensorwise", "", "", world_size=1))[0]
    assert one.keys() == plain.keys()
    changed = [name for name in one if not torch.equal(one[name], plain[name])]
    assert any(".experts.local_experts.3." in name for name in changed), "loaded weights of an expert are codes"


def test_the_memory_plan_counts_fp8_experts() -> None:
    def hold(gather: str) -> tuple[int, int]:
        run = build_run(config_of("tensorwise", EP2, gather))
        chunk = run.training_state.chunks[0]
        held = sum(buffer.param_data.nbytes for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers])
        return held, estimate_memory(run_sizes(run.config, 2, run.vocab_size), implementation=EMULATED).weights_bytes

    (plain, planned_plain), (codes, planned) = (run_ranks(2, hold, gather)[0] for gather in ("", GATHER))
    assert plain == pytest.approx(planned_plain, rel=0.02)
    assert codes == pytest.approx(planned, rel=0.02)
    assert codes < 0.75 * plain
