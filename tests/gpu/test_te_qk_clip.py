"""QK-clip and muP with Transformer Engine's layers."""

from __future__ import annotations

from pathlib import Path

import pytest
from requirements import require_transformer_engine

pytestmark = pytest.mark.gpu
require_transformer_engine()

from gpu_runs import RECIPES, check_graph_equals_launched_kernels, gap_to_emulated, gpu_run, unbroken_and_resumed
from small_run import step_results

CLIP = "--qk-clip --qk-clip-threshold {} --qk-clip-alpha 0.3"
FROZEN = "--num-layers 1 --lr 1e-20 --min-lr 0 --weight-decay 0"
GATHERED = f"{RECIPES['tensorwise']} --fp8-param-gather"
MUONS = f"{GATHERED} --optimizer muon"
LATENT = (
    "--multi-latent-attention --q-lora-rank 64 --kv-lora-rank 64 --qk-head-dim 64 --qk-pos-emb-head-dim 32 "
    "--v-head-dim 64 --rope-type rope"
)


def logits(flags: str, num_steps: int) -> list[tuple[float, int]]:
    """The largest logit and the number of clipped heads of each step; all of the same samples."""
    with gpu_run(f"{FROZEN} {flags}") as run:
        results = [result for _ in range(num_steps) for result in step_results(run, 1)]
    return [(result.metrics["max_attention_logit"], result.metrics["num_clipped_heads"]) for result in results]


@pytest.mark.parametrize("flags", [RECIPES["bf16"], GATHERED, MUONS, RECIPES["delayed"], LATENT])
def test_the_same_tokens_have_the_threshold_afterwards(flags: str) -> None:
    ((largest, none),) = logits(f"{flags} {CLIP.format(1000)}", 1)
    (first, number), (second, _) = logits(f"{flags} {CLIP.format(largest / 2)}", 2)
    assert none == 0 and number > 0 and first == largest
    # Weights are rounded to BF16 or FP8 again, and scales follow them.
    assert second == pytest.approx(largest / 2, rel=2e-2 if flags in (RECIPES["bf16"], LATENT) else 0.1)


def clips_heads(flags: str) -> bool:
    """Whether the threshold of the next tests is below the logits of each step."""
    with gpu_run(f"{flags} {CLIP.format(0.05)}") as run:
        return all(result.metrics["num_clipped_heads"] > 0 for result in step_results(run, 3))


@pytest.mark.parametrize("flags", ["", GATHERED, "--optimizer muon", MUONS])
def test_resume_is_bit_equal(flags: str, tmp_path: Path) -> None:
    unbroken, resumed = unbroken_and_resumed(f"{flags} {CLIP.format(0.05)}", 3, tmp_path)
    assert unbroken == resumed
    assert clips_heads(flags)


@pytest.mark.parametrize("flags", ["", GATHERED])
def test_a_graph_equals_launched_kernels(flags: str) -> None:
    check_graph_equals_launched_kernels(f"{flags} {CLIP.format(0.05)}")
    assert clips_heads(flags)


@pytest.mark.parametrize("recipe", RECIPES)
def test_mup_follows_its_emulation(recipe: str) -> None:
    assert gap_to_emulated(f"{RECIPES[recipe]} --use-mup --mup-base-hidden-size 64", 8) < 5e-3
