"""A recipe from outside the package trains, resumes, plans, is described and is exported like a built-in one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from forked_runs import ROOT, prepare, run_forked
from forked_script import run_script
from safetensors import safe_open

from megafp8.config import settings
from megafp8.config.flag_parser import cached_parser
from megafp8.recipes import registry

CHANNELS = ROOT / "tests" / "unit" / "recipes" / "channels.py"
MODEL = (
    "--num-layers 2 --hidden-size 128 --ffn-hidden-size 256 --num-attention-heads 2 --seq-length 64 --vocab-size 127 "
    "--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --make-vocab-size-divisible-by 128 --bf16"
)
RECIPE = "--fp8-format e4m3 --fp8-recipe channels"
RUN = (
    f"{MODEL} {RECIPE} --tokenizer-type NullTokenizer --mock-data --num-workers 0 --micro-batch-size 2 "
    "--global-batch-size 4 --lr 1e-3 --lr-warmup-iters 1 --eval-iters 0 --use-distributed-optimizer --no-progress-bar "
    "--attention-dropout 0 --hidden-dropout 0"
)
LAYOUT = "--tensor-model-parallel-size 2 --sequence-parallel"


@pytest.fixture(autouse=True, scope="module")
def registered() -> Iterator[None]:
    """As with `MEGAFP8_RECIPES` in the environment of every process that a test forks."""
    prepare()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(registry.RECIPES_VARIABLE, str(CHANNELS))
        clear()
        yield
    clear()


def clear() -> None:
    registry.clear_cache()
    for cached in (settings.all_settings, settings.settings_by_name, cached_parser):
        cached.cache_clear()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, registered: None) -> Path:
    """Two steps, and a third one after a resume, on two tensor-parallel ranks with sequence parallelism."""
    folder = tmp_path_factory.mktemp("run")
    path_flags = (
        f"--data-cache-path {folder / 'cache'} --save {folder / 'run'} --load {folder / 'run'} --save-interval 2"
    )
    first = run_forked(2, f"{RUN} {LAYOUT} {path_flags} --train-iters 3 --exit-interval 2")
    assert first.statuses == (0, 0), first.report()
    second = run_forked(2, f"{RUN} {LAYOUT} {path_flags} --train-iters 3 --fp8-param-gather")
    assert second.statuses == (0, 0), second.report()
    return folder / "run"


def test_external_recipe_trains_and_resumes_with_tensor_and_sequence_parallelism(run: Path) -> None:
    records = [json.loads(line) for line in (run / "records.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if record.get("kind") == "step"]
    assert len(losses) == 3 and all(loss < 10 for loss in losses)


def test_export_uses_the_recipes_form(run: Path, tmp_path: Path) -> None:
    done = run_script("tools/convert_checkpoint.py", "to-hf", run, tmp_path / "theirs", "--fp8")
    assert done.returncode == 0, done.stderr
    with safe_open(tmp_path / "theirs" / "model.safetensors", "pt") as file:
        name = "model.layers.0.mlp.down_proj.weight"
        assert file.get_tensor(name).dtype == torch.float8_e4m3fn
        assert file.get_tensor(f"{name}_scale").shape == (128, 1)
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert config["quantization_config"]["config_groups"]["group_0"]["weights"]["strategy"] == "channel"
    back = run_script("tools/convert_checkpoint.py", "from-hf", tmp_path / "theirs", tmp_path / "ours")
    assert back.returncode == 0, back.stderr


def test_external_recipe_is_planned() -> None:
    done = run_script("tools/plan.py", *MODEL.split(), "--gpus", "8", "--gpu", "h200", "--fp8-recipe", "channels")
    assert done.returncode == 0, done.stderr
    assert "--fp8-recipe channels" in done.stdout


def test_dry_run_and_help_list_the_external_recipe() -> None:
    """From the environment alone, the dry run in a process of its own."""
    command = [sys.executable, "pretrain_gpt.py", "--dry-run", *RUN.split(), "--train-iters", "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "e4m3 per row" in done.stdout or "weight e4m3" in done.stdout
    done = run_script("pretrain_gpt.py", "--help", "fp8-recipe")
    assert "blockwise,channels,mxfp8" in done.stdout
