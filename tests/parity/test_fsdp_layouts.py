"""`--use-torch-fsdp2` trains the model of one rank, and its checkpoints are those of other layouts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import test_resharding
import torch
from ranks import run_ranks
from small_run import FP8, PLAIN, Curve, assert_follows, build_run, curve_of, small_config, train
from test_layouts import CONTEXT, SEQUENCE, TENSOR
from tolerances import FP8_LAYOUT_LOSS, LAYOUT_GRAD_NORM, LAYOUT_LOSS

from megafp8.checkpoint.directory import checkpoint_path
from megafp8.checkpoint.fingerprint import fingerprint
from megafp8.config.schema import RunConfig
from megafp8.training.extensions.step_records import params_norm

FSDP = "--use-torch-fsdp2 --no-gradient-accumulation-fusion"
REPLICAS = "--num-distributed-optimizer-instances 2"
NUM_STEPS = 4
STEPS = test_resharding.STEPS
# As in test_resharding, with the optimizer of FSDP2.
SMALL = test_resharding.SMALL.replace(" --use-distributed-optimizer", "")
LAYOUTS = {
    "one": (1, ""),
    "fsdp2": (2, FSDP),
    "tp2-fsdp2": (4, f"{TENSOR} {SEQUENCE} {FSDP}"),
    "fsdp2-replicas": (4, f"{FSDP} {REPLICAS} --micro-batch-size 1"),
}


@pytest.fixture(scope="module")
def one_rank() -> Callable[[str, str], Curve]:
    curves: dict[tuple[str, str], Curve] = {}

    def curve(style: str, flags: str) -> Curve:
        if (style, flags) not in curves:
            curves[style, flags] = run_ranks(1, curve_of, small_config(style, flags), NUM_STEPS)[0]
        return curves[style, flags]

    return curve


@pytest.mark.parametrize(
    ("style", "world_size", "flags"),
    [
        pytest.param("llama", 2, "--micro-batch-size 1", id="llama-four-microbatches"),
        pytest.param("llama", 2, CONTEXT, id="llama-cp2"),
        pytest.param("llama", 2, "--torch-fsdp2-no-reshard-after-forward", id="llama-no-reshard"),
        pytest.param("llama", 4, f"{REPLICAS} --micro-batch-size 1", id="llama-two-replicas"),
        pytest.param("llama", 4, f"{TENSOR} {SEQUENCE} --micro-batch-size 2", id="llama-tp2"),
        pytest.param("gpt2", 2, "", id="gpt2-tied-embeddings"),
        pytest.param(
            "gpt2",
            2,
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            id="gpt2-recompute",
        ),
    ],
)
def test_follows_one_rank(style: str, world_size: int, flags: str, one_rank: Callable[[str, str], Curve]) -> None:
    """Losses and gradient norms, which are clipped to 1."""
    curves = run_ranks(world_size, curve_of, small_config(style, f"{PLAIN} {FSDP} {flags}", world_size), NUM_STEPS)
    assert all(curve == curves[0] for curve in curves), "ranks report different numbers"
    reference = one_rank(style, PLAIN)
    assert max(reference.grad_norms) > 1, "nothing would be clipped"
    assert_follows(curves[0], reference, LAYOUT_GRAD_NORM[style])


def test_fp8_follows_one_rank(one_rank: Callable[[str, str], Curve]) -> None:
    flags = f"{FP8} --micro-batch-size 2"
    curve = run_ranks(2, curve_of, small_config("llama", f"{flags} {FSDP}", 2), NUM_STEPS)[0]
    reference = one_rank("llama", flags)
    errors = [abs(a - b) for a, b in zip(curve.losses, reference.losses, strict=True)]
    assert max(errors) <= FP8_LAYOUT_LOSS["tensorwise"], errors


def train_and_measure(config: RunConfig) -> tuple[int, int, set[torch.dtype], float, Curve]:
    """Elements of parameters and gradients on this rank, dtypes of the gradients, norm of the parameters, curve."""
    run = build_run(config)
    norm = params_norm(run)
    curve = train(run, 2)
    parameters = list(run.training_state.chunks[0].parameters())
    gradients = [parameter.main_grad for parameter in parameters]
    local = [getattr(each, "_local_tensor", each) for each in (*parameters, *gradients)]
    counts = [sum(each.numel() for each in part) for part in (local[: len(parameters)], local[len(parameters) :])]
    return counts[0], counts[1], {each.dtype for each in gradients}, norm, curve


def test_bf16_ranks_keep_their_rows_and_fp32_gradients() -> None:
    flags = "--transformer-impl local --bf16 --no-gradient-accumulation-fusion --micro-batch-size 2"
    weights, gradients, _, norm, curve = run_ranks(2, train_and_measure, small_config("llama", flags, 2))[0]
    sharded = run_ranks(2, train_and_measure, small_config("llama", f"{flags} {FSDP}", 2))
    for rank in sharded:
        assert rank[:2] == (weights // 2, gradients // 2)
        assert rank[2] == {torch.float32}
        assert rank[3] == norm
        assert abs(rank[4].losses[0] - curve.losses[0]) <= LAYOUT_LOSS
        # Each microbatch's gradient is rounded to BF16 once more, after its reduction.
        assert abs(rank[4].grad_norms[0] / curve.grad_norms[0] - 1) <= 2**-9


def config_of(layout: str) -> RunConfig:
    world_size, flags = LAYOUTS[layout]
    return small_config("llama", f"{SMALL} {flags}", world_size)


def test_layouts_load_each_others_checkpoints(tmp_path: Path) -> None:
    """Bitwise the same content, and the same next steps: bitwise in the layout that saved."""
    unbroken = {
        layout: run_ranks(ranks, test_resharding.run_first, config_of(layout), tmp_path / layout)[0]
        for layout, (ranks, _) in LAYOUTS.items()
    }
    folders = {layout: tmp_path / layout for layout in LAYOUTS}
    for layout, (ranks, _) in LAYOUTS.items():
        again = tmp_path / f"again-{layout}"
        found = run_ranks(ranks, test_resharding.load_all_checkpoints, config_of(layout), folders, again)[0]
        for source, passage in found.items():
            saved = fingerprint(checkpoint_path(folders[source], STEPS))
            for part in test_resharding.PARTS:
                assert passage.parts[part] == saved[part], (part, source, layout)
            errors = [abs(a - b) for a, b in zip(passage.losses, unbroken[source], strict=True)]
            assert max(errors) <= (0 if layout == source else LAYOUT_LOSS), (source, layout, errors)
