"""`--micro-batch-size auto` on a GPU: CUDA's own allocator decides what fits, and a failed trial leaves nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu]
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from megafp8.analysis.runs import load_run
from megafp8.resources.micro_batch import best_size
from megafp8.training.micro_batch_search.search import CHOICE_FILE, SizeChoice, read_choice

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30
# Some 30M parameters, and logits of 250 MiB per sequence in FP32: 29 GiB hold some sequences but not all.
RUN = (
    "--model-preset tiny --hidden-size 512 --num-attention-heads 8 --num-query-groups 8 --ffn-hidden-size 1024 "
    "--seq-length 1024 --max-position-embeddings 1024 --vocab-size 63000 --mock-data --tokenizer-type NullTokenizer "
    "--num-workers 0 --bf16 --use-distributed-optimizer --global-batch-size 128 --train-iters 3 --lr 1e-4 "
    "--lr-decay-style constant --eval-iters 0 --deterministic-mode --no-progress-bar "
    "--attention-dropout 0 --hidden-dropout 0"
)
# In every layout below, one size is predicted to fit, and twice that size to take 1.4 times the limit. It is tried.
LIMIT_GIB = 29


def train(flags: str, num_ranks: int = 1) -> str:
    """The output of a run whose ranks are started as a user starts them."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    command = [*(launcher if num_ranks > 1 else ()), str(ROOT / "pretrain_gpt.py"), *RUN.split(), *flags.split()]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=ROOT, timeout=540)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    return done.stdout


def check_choice(choice: SizeChoice) -> None:
    """Some sizes fit below the limit, the next one ran out of CUDA's memory, and the fastest was chosen."""
    fits = {each.size: each for each in choice.trials if each.ms_per_sample is not None}
    out = [each for each in choice.trials if each.note.startswith("does not fit: ")]
    assert fits and out, choice.describe()
    assert all("out of memory" in each.note or each.note.endswith("called off") for each in out), choice.describe()
    assert min(each.size for each in out) > max(fits)
    assert all(0 < each.peak_bytes <= LIMIT_GIB * GIB for each in fits.values())
    assert choice.micro_batch_size == best_size({each.size: each.ms_per_sample for each in choice.trials})


def losses(folder: Path) -> list[tuple[float, float | None]]:
    return [(step.loss, step.grad_norm) for step in load_run(folder).steps]


@pytest.mark.parametrize("recipe", ["", "--fp8-format hybrid --fp8-recipe delayed"])
def test_automatic_size_is_bit_equal_to_that_size_given(recipe: str, tmp_path: Path) -> None:
    auto, given = tmp_path / "auto", tmp_path / "given"
    flags = f"{recipe} --micro-batch-size auto --micro-batch-size-memory-limit {LIMIT_GIB} --save {auto} --load {auto}"
    print(train(flags))
    choice = read_choice(auto / CHOICE_FILE)
    check_choice(choice)
    train(f"{recipe} --micro-batch-size {choice.micro_batch_size} --save {given}")
    assert losses(auto) == losses(given)
    for path in sorted((given / "iter_0000003").glob("*.distcp")):
        assert (auto / "iter_0000003" / path.name).read_bytes() == path.read_bytes(), path.name
    content = json.loads((auto / CHOICE_FILE).read_text())
    (auto / CHOICE_FILE).write_text(json.dumps(content | {"memory_bytes": 80 * GIB, "device": "another"}))
    assert "found on another with 80.00 GiB" in train(flags), "a resumed start keeps the size"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("layout", ["--overlap-grad-reduce", "--tensor-model-parallel-size 2 --sequence-parallel"])
def test_ranks_waiting_for_an_out_of_memory_rank_are_ended(layout: str, tmp_path: Path) -> None:
    """NCCL's collectives of a trial that ran out of memory never end by themselves."""
    limit = f"--micro-batch-size auto --micro-batch-size-memory-limit {LIMIT_GIB}"
    print(train(f"{layout} {limit} --save {tmp_path}", num_ranks=2))
    choice = read_choice(tmp_path / CHOICE_FILE)
    check_choice(choice)
    assert choice.world_size == 2
    assert len(losses(tmp_path)) == 3
