"""Mistakes of a first hour: each answer names the fix, in at most two lines for each problem."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from shard_writer import ShardWriter

from megafp8.cli.main import main

MAX_CHARS = 300  # of a problem: two lines of a wide terminal
SHAPE = "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --position-embedding-type rope --seq-length 32"
STEPS = "--micro-batch-size 2 --train-iters 4 --lr 1e-3"
NULL = "--tokenizer-type NullTokenizer --vocab-size 63"
RUN = f"pretrain {SHAPE} {STEPS} --mock-data {NULL}"
DATA = f"pretrain {SHAPE} {STEPS} --data-path"
PLAN = (
    f"pretrain --model-preset gpt2-124m --seq-length 1024 {STEPS} --mock-data --tokenizer-type NullTokenizer --dry-run"
)
LLAMA = PLAN.replace("gpt2-124m", "llama3-8B") + " --bf16 --target H100"

FLAGS = {
    "": (64, "which subcommand? See megafp8 --help"),
    "pretran": (64, "did you mean pretrain"),
    "pretrain": (64, "--lr is missing: the peak learning rate, for example 3e-4"),
    f"{RUN} --fp8-recipee delayed": (64, "did you mean --fp8-recipe?"),
    f"{RUN} --fp8-format hybrid --fp8-recipe tensor": (64, "did you mean tensorwise?"),
    f"{RUN} --recipe tensor": (64, "--recipe: tensor; did you mean tensorwise? (known recipes: "),
    f"{RUN} --use_fp8": (64, "use --recipe tensorwise, or another recipe"),
    f"{RUN} --bf16 --fp16": (64, "--bf16 and --fp16 are both given: keep one"),
    f"{RUN} --global-batch-size 3": (64, "--global-batch-size 4"),
    f"{RUN} --bf16 --fp8-format hybrid --ffn-hidden-size 200": (64, "--ffn-hidden-size 208"),
    f"{RUN} --lr-warmup-iters 10": (64, "lower --lr-warmup-iters"),
    f"{RUN} --learning_rate 1e-3": (64, "unknown flag --learning_rate: use --lr"),
    f"{RUN} --max_steps 3": (64, "unknown flag --max_steps: use --train-iters"),
    f"{RUN} --per_device_train_batch_size 3": (64, "use --micro-batch-size"),
    f"{RUN} --gradient_accumulation_steps 3": (64, "accumulation steps x --micro-batch-size x data-parallel ranks"),
    f"{RUN} --gradient_checkpointing": (64, "use --recompute-granularity selective"),
    f"{RUN} --output_dir x": (64, "use --save"),
    f"{RUN} --training.steps 3": (64, "use --train-iters"),
    "pretrain --frobnicate 3": (64, "1 problem with the settings:\n  - unknown flag --frobnicate; see --help"),
    "pretrain gone.yaml": (64, "1 problem with the settings:\n  - --config gone.yaml: cannot be read: No such file"),
    "pretrain files --bf16": (64, "1 problem with the settings:\n  - 'files' does not belong to any flag"),
    "pretrain folder.yaml --bf16": (64, "1 problem with the settings:\n  - --config folder.yaml: cannot be read"),
    "pretrain --config files/notes.txt": (64, "1 problem with the settings:\n  - --config files/notes.txt: not JSON"),
    "pretrain map.yaml": (64, "1 problem with the settings:\n  - map.yaml:1: not YAML"),
    "pretrain key.yaml --seq-length 8 --bf16": (
        64, "1 problem with the settings:\n  - key.yaml:1: unknown key `learning_rate`; use lr"
    ),
    "pretrain --planted-fault x": (64, "1 problem with the settings:\n  - --planted-fault: a run plants no faults"),
    "pretrain --learning_rate 3 --max_steps 3 --bf16": (64, "2 problems with the settings:\n  - unknown flag"),
    f"pretrain --model-preset llama3-8c {STEPS} {NULL} --mock-data --seq-length 8": (
        64, "1 problem with the settings:\n  - --model-preset llama3-8c: unknown preset; did you mean llama3-8b?"
    ),
    f"{PLAN} --world-size 8 --tensor-model-parallel-size 8": (64, "use --tensor-model-parallel-size 4, or another"),
    f"{PLAN} --world-size 8 --pipeline-model-parallel-size 8": (64, "use --pipeline-model-parallel-size 4"),
    f"{LLAMA} --world-size 16 --tensor-model-parallel-size 16": (64, "use --tensor-model-parallel-size 8"),
    f"{PLAN.replace('gpt2-124m', 'mixtral-8x7b')} --world-size 16 --expert-model-parallel-size 16": (
        64, "use --expert-model-parallel-size 8"
    ),
    f"{PLAN} --target rtx4080": (64, "rtx4080; did you mean rtx4090 or rtx5090? (known machines: cpu, a100,"),
    f"{PLAN} --gpu-memory-gib 48": (64, "add --target with the most similar GPU, or remove them"),
    "plan --gpus 8 --gpu mi300x": (
        64, "gb10); others: --gpu-memory-gib, --gpu-peak-tflops"
    ),
    "plan --gpus 8 --gpu H10": (64, "did you mean h100? (known GPUs: a100,"),
    "plan --gpus 8 --gpu l40s --gpu-memory-gib 0": (64, "--gpu-memory-gib 0: must be above 0"),
    "run-comparison --recipes bf16,tensorwize": (64, "recipe tensorwize: unknown; did you mean tensorwise?"),
    "stability --output-dir out --recipes tensorwize": (64, "--recipes tensorwize: unknown; did you mean tensorwise?"),
    f"{RUN} --strict": (64, "--strict has no effect without --dry-run"),
    f"{DATA} corpus.jsonl {NULL}": (64, "that is text: run megafp8 preprocess --input corpus.jsonl"),
    f"{DATA} c {NULL}": (64, "did you mean c_text_document?"),
    f"{DATA} gone {NULL}": (64, "no such file: gone.bin, gone.idx"),
    f"{DATA} c_text_document": (64, "c_text_document.manifest.json names --tokenizer-type HuggingFaceTokenizer"),
    f"{DATA} c_text_document --tokenizer-type HuggingFaceTokenizer --tokenizer-model meta-llama/Llama-3.1-8B": (
        64, "hf download meta-llama/Llama-3.1-8B tokenizer.json tokenizer_config.json --local-dir Llama-3.1-8B"
    ),
    f"pretrain {SHAPE} {STEPS} --mock-data --tokenizer-type HuggingFaceTokenizer --tokenizer-model /gone --dry-run "
    "--world-size 1 --target h100": (66, "nor a folder with one. A dry run for another machine does without it with"),
    "preprocess --input corpus.jsonl --output-prefix out --tokenizer-type HuggingFaceTokenizer "
    "--tokenizer-model meta-llama/Llama-3.1-8B": (66, "tokenizer_config.json --local-dir Llama-3.1-8B\n"),
    "preprocess --input HuggingFaceFW/fineweb-edu --output-prefix out --tokenizer-type ByteLevelTokenizer": (
        66, "a dataset of the Hugging Face hub is --hf-dataset HuggingFaceFW/fineweb-edu."
    ),
    f"{RUN} --load meta-llama/Llama-3.1-8B": (64, "then megafp8 convert from-hf Llama-3.1-8B models/Llama-3.1-8B"),
    f"{RUN} --load qwen": (74, "qwen is a Hugging Face model. Convert it: megafp8 convert from-hf qwen models/qwen"),
    f"{RUN} --pretrained-checkpoint qwen": (74, "Convert it: megafp8 convert from-hf qwen models/qwen"),
    f"{RUN} --load files --dry-run": (74, "--load files has no checkpoint of megafp8, but notes.txt"),
    "generate --load qwen": (74, "megafp8 convert from-hf qwen models/qwen"),
    "evaluate --load files": (74, "has no checkpoint of megafp8"),
    "convert to-hf qwen out": (74, "megafp8 convert from-hf qwen models/qwen"),
    "convert from-hf meta-llama/Llama-3.1-8B out": (74, "hf download meta-llama/Llama-3.1-8B --local-dir Llama-3.1-8B"),
    "slurm indent.yaml --dry-run": (64, "indent.yaml:2: not YAML: 'nodes: 2': mapping values are not allowed here"),
    "slurm keys.yaml --dry-run": (64, "keys.yaml:2: unknown key 'node'; did you mean nodes?"),
    "study study.yaml --dry-run": (64, "study.yaml:2: unknown key 'seeds'"),
    f"{RUN} --precision-map map.yaml": (64, "--precision-map map.yaml:1: not YAML: '*.linear_fc2: bf16'"),
    f"{RUN} --config c.json": (64, "did you mean"),
    f"{RUN} --fp8-format hybrid --transformer-impl transformer_engine": (64, "or use --transformer-impl emulated"),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mistakes")
    (folder / "corpus.jsonl").write_text('{"text": "a"}\n')
    with ShardWriter(str(folder / "c_text_document"), np.dtype(np.uint16)) as writer:
        writer.add_documents(np.arange(3, dtype=np.uint16).tobytes(), np.array([3]))
        writer.finish()
    hashes = {"bin_bytes": 6, "bin_sha256": "", "idx_bytes": 1, "idx_sha256": "", "format": "megafp8-shard-1"}
    counts = {"num_documents": 1, "num_sequences": 1, "num_tokens": 3, "sources": [], "dtype": "uint16"}
    settings = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "/gone/tokenizer"}
    origin = {"tokenizer": None, "json_key": "text", "append_eod": True, "tokenizer_settings": settings}
    (folder / "c_text_document.manifest.json").write_text(json.dumps(hashes | counts | origin))
    files = {
        "qwen/config.json": '{"model_type": "qwen2"}', "qwen/model.safetensors": "", "files/notes.txt": "",
        "indent.yaml": "name: a\n nodes: 2\n", "keys.yaml": "name: a\nnode: 2\n", "study.yaml": "name: a\nseeds: [1]\n",
        "map.yaml": "*.linear_fc2: bf16\n", "c.json": '{"model": {"num_layer": 2}}',
        "key.yaml": "learning_rate: 1e-3\n", "folder.yaml/notes.txt": "",
    }  # fmt: skip
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


def answer(words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Status and output of `megafp8 WORDS`."""
    before = sys.argv
    try:
        status = main(words.split())
    except SystemExit as ended:
        status = int(ended.code or 0)
    finally:
        sys.argv = before
    output = capsys.readouterr()
    return status, output.out + output.err


@pytest.mark.parametrize("words", FLAGS)
def test_a_mistake_is_answered_with_its_fix(
    words: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    status, told = FLAGS[words]
    found, text = answer(words, capsys)
    assert (found, told in text) == (status, True), text
    assert "Traceback" not in text and all(len(line) <= MAX_CHARS for line in text.splitlines()), text
    assert len(text.splitlines()) <= (9 if words == "pretrain" else 4), text


def test_another_spelling_of_a_flag_value_and_machine_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    plain = f"{LLAMA} --world-size 8"
    spelled = plain.replace("--model-preset", "--model_preset").replace("--micro-batch", "--micro_batch")
    assert answer(f"{spelled} --normalization rmsnorm", capsys)[0] == 0
    assert answer(f"{spelled} --target H100", capsys) == answer(plain, capsys)


def test_the_verdict_of_a_dry_run_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    big = LLAMA.replace("llama3-8B", "llama3-70b")
    status, text = answer(f"{big} --world-size 8", capsys)
    lines = text.splitlines()
    assert status == 0 and lines[1].startswith("does not fit: needs ") and " GiB a GPU, h100 has 79.65" in lines[1]
    assert lines[1].endswith("megafp8 plan --model-preset llama3-70b --gpus 8 --gpu h100")
    assert "  stage 0: ranks 0-7: embedding + layers 0-79 + output" in lines
    assert "speed: not predicted (the run does not fit)" in lines
    assert "  --use-distributed-optimizer on (one-pass update, sharded state)" in lines
    assert answer(f"{big} --world-size 8 --strict", capsys)[0] == 1
    assert answer(f"{LLAMA} --world-size 64 --strict", capsys)[0] == 0
