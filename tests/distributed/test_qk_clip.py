"""QK-clip: the logits that it leaves, in every layout and kind of optimizer, and resumed."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import run_ranks
from small_run import FP8, PLAIN, build_run, fingerprint, small_config, step_results, weights

from megafp8.checkpoint.directory import checkpoint_path
from megafp8.checkpoint.load import load_checkpoint
from megafp8.checkpoint.progress import Progress
from megafp8.checkpoint.save import save_checkpoint
from megafp8.mcore import patches
from megafp8.optimizer.qk_clip import OWN_EVIDENCE

LLAMA = "llama without norms of queries"
CLIP = "--qk-clip --qk-clip-threshold {} --qk-clip-alpha 0.3"
SHARDED = "--use-distributed-optimizer"
OVERLAP = f"{SHARDED} --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 20000"
FROZEN = "--num-layers 1 --lr 1e-20 --min-lr 0 --weight-decay 0"
LATENT = "--multi-latent-attention --kv-lora-rank 16"


def test_megatron_core_expects_complete_master_weights() -> None:
    """Once it does not, its own can be called."""
    for file, text in OWN_EVIDENCE:
        assert text in (patches.core_folder() / file).read_text(encoding="utf-8")


def found(flags: str, num_steps: int, world_size: int = 1, style: str = LLAMA) -> list[tuple[float, int, float]]:
    """The largest logit, the number of clipped heads and the loss of each step; all of the same samples."""
    config = small_config(style, flags, world_size)

    def body() -> list[tuple[float, int, float]]:
        run = build_run(config)
        results = [result for _ in range(num_steps) for result in step_results(run, 1)]
        fields = ("max_attention_logit", "num_clipped_heads")
        return [(*(result.metrics.get(field) for field in fields), result.loss) for result in results]

    return run_ranks(world_size, body)[-1]


@pytest.mark.parametrize(
    ("style", "flags"),
    [(LLAMA, ""), ("gpt2", ""), ("latent", LATENT), ("latent", f"{LATENT} --q-lora-rank 24")],
)
def test_the_same_tokens_have_the_threshold_afterwards(style: str, flags: str) -> None:
    ((largest, _, loss),) = found(f"{PLAIN} {FROZEN} {flags} --log-max-attention-logit", 1, style=style)
    first, second = found(f"{PLAIN} {FROZEN} {flags} {CLIP.format(largest / 2)}", 2, style=style)
    assert first[0] == largest and first[2] == loss and first[1] > 0
    assert second[0] == pytest.approx(largest / 2, rel=1e-5) and second[2] != loss
    # Above the largest logit nothing changes.
    assert found(f"{PLAIN} {FROZEN} {flags} {CLIP.format(largest * 1.001)}", 2, style=style)[1][:2] == (largest, 0)


@pytest.mark.parametrize(
    ("size", "layout"),
    [
        (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
        (2, "--pipeline-model-parallel-size 2"),
        (2, "--context-parallel-size 2"),
        (2, ""),
        (2, SHARDED),
        (2, OVERLAP),
    ],
)
@pytest.mark.parametrize("optimizer", ["", "--optimizer muon"])
def test_every_layout_clips_alike(size: int, layout: str, optimizer: str) -> None:
    if "overlap-param-gather" in layout and optimizer:
        layout = SHARDED
    flags = f"{PLAIN} --lr 1e-3 {optimizer} {CLIP.format(0.01)}"
    one, split = found(flags, 4), found(f"{flags} {layout}", 4, size)
    assert all(number > 0 for _, number, _ in one)
    assert [number for _, number, _ in split] == [number for _, number, _ in one]
    # Muon rounds its products to BF16.
    for index, tolerance in ((0, 1e-2 if optimizer else 1e-5), (2, 1e-5)):
        assert [each[index] for each in split] == pytest.approx([each[index] for each in one], rel=tolerance)


@pytest.mark.parametrize(
    "flags",
    [
        f"--bf16 {PLAIN} {SHARDED}",
        f"--bf16 {PLAIN} {OVERLAP}",
        f"--bf16 {PLAIN} {SHARDED} --optimizer muon",
        f"--bf16 {FP8} {SHARDED} --fp8-param-gather",
        f"--bf16 {FP8} {SHARDED} --fp8-param-gather --optimizer muon",
    ],
)
def test_resume_is_bit_equal(flags: str, tmp_path: Path) -> None:
    """The weights of the model are those of the master weights, which a checkpoint has."""
    config = small_config(LLAMA, f"{flags} {CLIP.format(0.01)}", 2)

    def unbroken() -> list:
        run = build_run(config)
        before = step_results(run, 2)
        save_checkpoint(tmp_path, config, run.training_state, Progress(2, 16))
        return [before[-1].metrics["num_clipped_heads"], *rest(run)]

    def resumed() -> list:
        run = build_run(config)
        load_checkpoint(checkpoint_path(tmp_path, 2), config, run.training_state)
        return rest(run)

    def rest(run) -> list:
        results = step_results(run, 2, 3)
        return [[result.loss for result in results], fingerprint(weights(run))]

    for whole, part in zip(run_ranks(2, unbroken), run_ranks(2, resumed), strict=True):
        assert whole[0] > 0 and whole[1:] == part
