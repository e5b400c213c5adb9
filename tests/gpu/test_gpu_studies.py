"""A study on the GPUs of one machine: each run has its own GPU, and no GPU is idle."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megafp8.launch.study_execution import visible_gpus
from megafp8.resilience.run_state import current_state

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[2]
STUDY = """
flags: >
  --num-layers 2 --hidden-size 128 --num-attention-heads 2 --seq-length 128 --max-position-embeddings 128 --bf16
  --micro-batch-size 4 --mock-data --tokenizer-type NullTokenizer --vocab-size 1023 --eval-iters 1 --num-workers 0
  --no-save-optim --lr 1e-3 --train-iters 5
grid:
  recipe: {bf16: "", fp8: --fp8-format hybrid --fp8-recipe tensorwise}
"""


def test_every_gpu_gets_runs(tmp_path: Path) -> None:
    gpus = visible_gpus()
    assert len(gpus) == torch.cuda.device_count()
    path = tmp_path / "small.yaml"
    path.write_text(f"{STUDY}  seed: {list(range(len(gpus)))}\n", encoding="utf-8")
    paths = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    result = subprocess.run(
        [sys.executable, "launcher/scaling_study.py", str(path), "--folder", str(tmp_path / "runs"), "--local"],
        cwd=ROOT, capture_output=True, text=True, timeout=500, env=os.environ | {"PYTHONPATH": paths},
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    assert set(re.findall(r"on GPU (\S+)", result.stdout)) == set(gpus)
    runs = json.loads((tmp_path / "runs/study.json").read_text())["runs"]
    assert len(runs) == 2 * len(gpus)
    for run in runs:
        folder = tmp_path / "runs" / run["folder"]
        assert current_state(folder).state == "done"
        opened = json.loads((folder / "records.jsonl").read_text().splitlines()[0])
        assert (opened["device_name"], opened["world_size"]) == (torch.cuda.get_device_name(), 1)
