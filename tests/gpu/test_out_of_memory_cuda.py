"""The out-of-memory error of a GPU names what has its memory, and its snapshot is one that torch's tools read."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]
# Logits of 250 MiB for a sequence in FP32: 2048 sequences do not fit into any GPU.
RUN = (
    "--model-preset tiny --hidden-size 512 --num-attention-heads 8 --num-query-groups 8 --ffn-hidden-size 1024 "
    "--seq-length 1024 --max-position-embeddings 1024 --vocab-size 63000 --mock-data --tokenizer-type NullTokenizer "
    "--num-workers 0 --bf16 --micro-batch-size 2048 --global-batch-size 2048 --train-iters 3 --lr 1e-4 "
    "--lr-decay-style constant --eval-iters 0 --no-progress-bar --cuda-graph-impl none --record-memory-history"
)


def test_the_error_names_the_largest_part(tmp_path: Path) -> None:
    path = tmp_path / "memory.pickle"
    command = [sys.executable, str(ROOT / "pretrain_gpt.py"), *RUN.split(), "--memory-snapshot-path", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=540)
    assert done.returncode != 0 and "OutOfMemory: CUDA out of memory" in done.stderr, done.stderr[-3000:]
    error = done.stderr[done.stderr.index("OutOfMemory: ") :]
    parts = {name: float(size) for name, size in re.findall(r"^(\w[\w ,:]+?)  +([\d.]+) ", error, re.MULTILINE)}
    total = torch.cuda.get_device_properties(0).total_memory / 2**30
    assert 0.5 * total < parts["all of torch"] < total
    assert parts["weights"] < 1 and max(parts, key=parts.get) == "all of torch"
    # The CUDA context and kernels, where the driver tells; in a container with those of other processes.
    assert parts.get("outside of torch, this process", parts.get("outside of torch, all processes", 0)) > 0.1, error
    assert "  - --micro-batch-size 1024: " in error
    snapshot = pickle.loads((tmp_path / "memory_rank0.pickle").read_bytes())
    allocated = sum(segment["allocated_size"] for segment in snapshot["segments"]) / 2**30
    assert allocated == pytest.approx(parts["all of torch"], rel=0.1)
    assert any(entry["frames"] for trace in snapshot["device_traces"] for entry in trace)
