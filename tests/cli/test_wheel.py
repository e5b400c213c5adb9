"""The wheel in a separate virtual environment, used from another folder whose name has a space."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODEL = (
    "--num-layers 1 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 2 --seq-length 32 "
    "--max-position-embeddings 32 --position-embedding-type rope --normalization RMSNorm --swiglu "
    "--disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0"
)
TRAINING = (
    "--bf16 --fp8-format hybrid --fp8-recipe tensorwise --micro-batch-size 2 --global-batch-size 2 --lr 1e-3 "
    "--lr-decay-style constant --train-iters 4 --eval-iters 0 --num-threads 1 --log-interval 1 --save run --load run"
)
TOKENIZER = "--tokenizer-type SentencePieceTokenizer --tokenizer-model tokenizer.model"

Run = Callable[[str], str]


@pytest.fixture(scope="module")
def megafp8(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs the installed `megafp8` command with these words, in a folder with text."""
    folder = tmp_path_factory.mktemp("a folder")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "--wheel-dir", str(folder), str(ROOT)], check=True, capture_output=True, timeout=300)
    (wheel,) = folder.glob("megafp8-*.whl")
    home = folder / "new venv"
    venv.create(home, with_pip=False)
    site_packages = next(home.glob("lib/python*/site-packages"))
    # Dependencies are those of this environment. An editable megafp8 in it is not seen: its .pth file is not read.
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    install = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(home / "bin/python"),
        "install",
        "--quiet",
        "--no-deps",
        "-I",
    ]
    subprocess.run([*install, str(wheel)], check=True, capture_output=True, timeout=300)
    texts = [f"def function_{i}(x):\n    return x * {i}\n" * 8 for i in range(200)]
    lines = (json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "text.jsonl").write_text("".join(lines), encoding="utf-8")

    def run(words: str) -> str:
        environment = {"PATH": f"{home / 'bin'}:/usr/bin:/bin", "HOME": str(folder), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            ["megafp8", *words.split()], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.mark.slow
def test_from_text_to_a_converted_model(megafp8: Run) -> None:
    assert megafp8("--version").startswith("megafp8 ")
    megafp8("train-tokenizer --input text.jsonl --vocab-size 320 --model-prefix tokenizer --num-threads 1")
    megafp8(f"preprocess --input text.jsonl --output-prefix corpus --append-eod --workers 1 {TOKENIZER}")
    pretrain = f"pretrain {MODEL} {TRAINING} {TOKENIZER} --data-path corpus_text_document --split 100,0,0"
    assert "step 3/4" in megafp8(f"{pretrain} --exit-interval 3")
    resumed = megafp8(pretrain)
    assert "step 4/4" in resumed and "step 3/4 | loss" not in resumed
    assert "iter_0000004" in megafp8("checkpoint list run")
    megafp8("convert to-hf run model")
    assert megafp8("generate --load run --prompt def --max-new-tokens 2 --seed 1")
