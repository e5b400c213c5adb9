"""The configurations of configs/: each is checked for its GPUs and fits into them, and the smallest one trains here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from forked_runs import run_forked

from megafp8.cli import pretrain
from megafp8.config import dimensions, flags
from megafp8.device.gpus import GPUS
from megafp8.planning.dry_run import vocabulary_size
from megafp8.planning.fit import needed_bytes
from megafp8.planning.planned_run import PlannedRun
from megafp8.resources.memory import cuda_graph_memory_bytes, estimate_stages
from megafp8.resources.mixture_memory import FREE_MEMORY_FRACTION
from megafp8.training import checks

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
GIB = 2**30
# GPUs, and memory of each where it is not that of an H100.
GPUS_OF = {
    "gpt2_124m_h100": (1, None),
    "gpt2_124m_fineweb_edu_h200": (1, 141 * 10**9),
    "llama_350m_24gb": (1, 24 * GIB),
    "llama3.2_1b_h100": (1, None),
    "llama3_8b_h100x8": (8, None),
    "llama3_8b_h100x64": (64, None),
    "qwen3_30b_a3b_h100x16": (16, None),
}


def test_every_configuration_is_checked() -> None:
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == {*GPUS_OF, "laptop"}


@pytest.mark.parametrize("name", GPUS_OF)
def test_it_is_accepted_without_warnings_and_fits(name: str, capsys: pytest.CaptureFixture) -> None:
    world_size, memory_bytes = GPUS_OF[name]
    argv = [str(CONFIGS / f"{name}.yaml"), "--dry-run", "--world-size", str(world_size), "--target", "h100"]
    assert pretrain.main(argv) == 0
    printed = capsys.readouterr().out
    assert "warning:" not in printed and f"--recipe {recipe_of(name)} stands for" in printed
    validated = checks.check(*flags.parse_with_problems(argv))
    config, h100 = validated.invocation.config, GPUS["h100"]
    vocab_size = dimensions.padded_vocab_size(config, vocabulary_size(config))
    run = PlannedRun(config=config, gpu=h100, world_size=world_size, padded_vocab=vocab_size)
    estimates = estimate_stages(run.sizes, implementation=validated.implementation)
    graph_bytes = max(
        cuda_graph_memory_bytes(run.sizes, each, implementation=validated.implementation) for each in estimates
    )
    limit_bytes = (1 - FREE_MEMORY_FRACTION) * (memory_bytes or h100.memory_bytes)
    assert needed_bytes(run, config) + graph_bytes < limit_bytes


def recipe_of(name: str) -> str:
    lines = (CONFIGS / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    return next(line.removeprefix("recipe: ") for line in lines if line.startswith("recipe: "))


def test_the_laptop_configuration_trains(tmp_path: Path) -> None:
    text = (CONFIGS / "laptop.yaml").read_text(encoding="utf-8").replace("data_path:", "# data_path:")
    (tmp_path / "laptop.yaml").write_text(text.replace("runs/", f"{tmp_path}/runs/"), encoding="utf-8")
    words = "--mock-data --train-iters 2 --micro-batch-size 1 --global-batch-size 1 --eval-iters 0 --num-workers 0"
    ended = run_forked(1, f"{tmp_path}/laptop.yaml {words} --log-interval 1", timeout_s=240)
    assert set(ended.statuses) == {0}, ended.report()
    records = [json.loads(row) for row in (tmp_path / "runs/laptop/records.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if record["kind"] == "step"]
    assert len(losses) == 2 and losses[0] == pytest.approx(6.24, rel=0.1)  # log of 512 rows
