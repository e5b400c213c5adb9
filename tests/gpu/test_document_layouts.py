"""Attention within documents by Transformer Engine's kernels, on two context-parallel ranks and on one.

A file of its own: the other ones set deterministic algorithms, whose attention of documents has no kernel for so many.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gpu_sizes import SIZES
from requirements import require_transformer_engine
from side_by_side import End, Launch, run_all, run_folder

from megafp8.analysis.runs import load_run

pytestmark = pytest.mark.gpu
require_transformer_engine(num_gpus=2)

STEPS = 6
DOCUMENTS = "--reset-attention-mask --eod-mask-loss"
LATENT = (
    "--multi-latent-attention --q-lora-rank 64 --kv-lora-rank 64 --qk-head-dim 64 --qk-pos-emb-head-dim 32 "
    "--v-head-dim 64"
)
CONTEXT = (
    f"{SIZES} --bf16 --seq-length 4096 --micro-batch-size 2 --train-iters {STEPS} --lr 3e-4 --eval-iters 0 "
    "--no-save-optim --no-save-rng --log-interval 1 --cuda-graph-impl none --step-timeout-s 20"
)
RUNS = {
    "whole": (1, ""),
    "one rank": (1, DOCUMENTS),
    "gathered": (2, f"{DOCUMENTS} --context-parallel-size 2 --cp-comm-type allgather"),
    "exchanged": (2, f"{DOCUMENTS} --context-parallel-size 2"),
    "latent one rank": (1, f"{DOCUMENTS} {LATENT}"),
    "latent gathered": (2, f"{DOCUMENTS} {LATENT} --context-parallel-size 2 --cp-comm-type allgather"),
    "latent exchanged": (2, f"{DOCUMENTS} {LATENT} --context-parallel-size 2"),
}


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """Of the runs of `RUNS`, by name."""
    folder = tmp_path_factory.mktemp("documents")
    launches = [
        Launch(name=name, num_ranks=num_ranks, flags=f"{CONTEXT} {flags}", alone=num_ranks > 1)
        for name, (num_ranks, flags) in RUNS.items()
    ]
    ends: dict[str, End] = run_all(folder, launches, torch.cuda.device_count())
    for name, end in ends.items():
        assert set(end.statuses) == {0}, f"{name}: {end.output[-4000:]}"
    return {name: [step.loss for step in load_run(run_folder(Path(folder), name)).steps] for name in ends}


@pytest.mark.parametrize("name", [name for name, (num_ranks, _) in RUNS.items() if num_ranks == 2])
def test_context_parallel_ranks_follow_one_rank(losses: dict[str, list[float]], name: str) -> None:
    one = losses["latent one rank" if "latent" in name else "one rank"]
    print(f"\n{name}: {losses[name]}, one rank: {one}, without borders: {losses['whole']}")
    assert len(one) == STEPS and losses[name] == pytest.approx(one, rel=1e-3)
    assert losses["one rank"] != pytest.approx(losses["whole"], rel=1e-3)
