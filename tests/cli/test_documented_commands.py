"""Every command of README, CONTRIBUTING and docs/ runs in the order of its page, or is listed here with the reason.

A page runs as a user follows it: in one folder, from the first block to the last, each block in its own shell.
Commands are shortened by words that replace theirs or are appended, where the last one wins.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from pathlib import Path

import pytest
import torch
from documented_commands import PAGES, Command, commands_in, lay_out, python_of
from forked_python import forked_python
from forked_runs import ROOT
from hf_folders import LLAMA, random_weights, write_hf_folder
from small_run import TOKENS

from megafp8.data.preprocessing.tokenizer_training import train_tokenizer

TIMEOUT_S = 600

# ---- shortened commands ---------------------------------------------------------------------------------------------

BEFORE, END = "before", "end"
"""In a change: commands in front, which make what a reader has already, and words behind. The rest is replaced."""

SHAPE = "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4"
SHORT = "--micro-batch-size 2 --global-batch-size 4 --train-iters 4 --eval-iters 1 --num-workers 0 --num-threads 1"
FLAGS = (
    f"--model-preset tiny {SHAPE} --seq-length 32 {SHORT} --lr 1e-3 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 255"
)
RANKS = {"torchrun --nproc-per-node 8": "torchrun --standalone --nproc-per-node 2"}
ONE_LLAMA = LLAMA | {"vocab_size": 300, "num_hidden_layers": 1, "rope_theta": 500_000.0}
SMALL_PLAN = {"llama3-70b --gpus 512": "llama-1b --gpus 2", END: "--scaling 2 4"}
SUPERVISED = RANKS | {"FLAGS": f"{FLAGS} --save runs/supervised --load runs/supervised"}
TORCHRUN = {"torchrun": "torchrun --gpus-per-node 0 --ranks-per-node 2 --dry-run", "FLAGS": FLAGS}
SMALL_TOKENIZER = {END: "--vocab-size 600 --num-threads 1"}
TOKENIZER = "--tokenizer-type SentencePieceTokenizer --tokenizer-model data/tokenizer.model"

OWN_TEXT = {
    "megafp8 train-tokenizer": SMALL_TOKENIZER,
    "megafp8 preprocess": {END: "--workers 1"},
    "megafp8 pretrain --model-preset gpt2-124m": {
        END: f"{SHAPE} --vocab-size 600 --seq-length 32 {SHORT} --eval-interval 2 --save-interval 2"
    },
    "megafp8 generate": {"100": "4"},
}

TRAINED_ON_TEXT = (
    "megafp8 train-tokenizer --input data/text.jsonl --model-prefix data/tokenizer --vocab-size 600 --num-threads 1\n"
    f"megafp8 preprocess --input data/text.jsonl --output-prefix data/corpus --workers 1 {TOKENIZER}\n"
    f"megafp8 pretrain --model-preset tiny {SHAPE} --seq-length 256 {SHORT} --lr 1e-3 --vocab-size 600 {TOKENIZER} "
    "--data-path data/corpus_text_document --split 98,2,0 --save runs/first\n"
)

SHORTER: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "README.md": OWN_TEXT | {
        "megafp8 plan": SMALL_PLAN,
        "megafp8 torchrun": TORCHRUN,
    },
    "docs/getting_started.md": OWN_TEXT | {
        "megafp8 torchrun": TORCHRUN,
        "megafp8 run-comparison": {
            "bf16,tensorwise,mxfp8": "bf16,tensorwise", "--seeds 3": "--seeds 1",
            END: f"-- {FLAGS}",
        },
    },
    "docs/generate_evaluate.md": {
        "megafp8 generate": {BEFORE: TRAINED_ON_TEXT, "100": "4"},
        "megafp8 evaluate --load runs/first --data-path": {"100000": "500"},
        "megafp8 corpus": {END: "--num-questions 4"},
    },
    "docs/mixture_of_experts.md": {
        "megafp8 pretrain": {END: f"{SHORT} --seq-length 32"},
        "megafp8 plan": {END: "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1"},
    },
    "docs/fsdp.md": {"torchrun": {"8": "2", "FLAGS": FLAGS}},
    "docs/parallelism.md": {
        "megafp8 plan": SMALL_PLAN,
        "torchrun --standalone": {"8": "2", "FLAGS": FLAGS},
        "torchrun --nnodes 8": {
            "--nnodes 8 --node-rank 3": "--nnodes 1 --node-rank 0", "--nproc-per-node 8": "--nproc-per-node 1",
            "HOST": "127.0.0.1", "29500": "FREE_PORT", "FLAGS": f"{FLAGS} --dry-run",
        },
    },
    "docs/checkpoints.md": {
        "megafp8 pretrain --model-preset tiny": {
            END: f"{SHAPE} {SHORT} --seq-length 32 --train-iters 8 --save-interval 2"
        },
        "megafp8 checkpoint show": {"--ckpt-step 100": "--ckpt-step 6"},
        "megafp8 checkpoint merge": {"--ckpt-step 100 150 200": "--ckpt-step 6 8"},
        "megafp8 checkpoint seal": {
            BEFORE: "mkdir runs/old\ncp -r runs/first/iter_0000008 runs/old\nrm runs/old/*/manifest.json\n",
            "iter_0000200": "iter_0000008",
        },
        "megafp8 convert from-megatron": {BEFORE: "megafp8 convert to-megatron runs/first megatron/run\n"},
    },
    "docs/from_megatron_lm.md": {
        "megafp8 convert from-megatron": {
            BEFORE: f"megafp8 pretrain {FLAGS} --train-iters 2 --save runs/mine\n"
                    "megafp8 convert to-megatron runs/mine megatron/run\n",
        },
    },
    "docs/hugging_face.md": {
        "megafp8 pretrain --config": {
            BEFORE: "megafp8 preprocess --input data/mine.jsonl --output-prefix data/mine --workers 1 "
                    "--tokenizer-type HuggingFaceTokenizer --tokenizer-model models/llama3-8b/tokenizer\n",
            END: f"{SHORT} --seq-length 32",
        },
    },
    "docs/comparing.md": {
        "megafp8 run-comparison --recipes bf16,tensorwise,nvfp4": {END: "--dry-run"},
        "megafp8 run-comparison --forks": {END: "--dry-run"},
        "megafp8 run-comparison --recipes bf16,delayed": {
            "--seeds 3": "--seeds 1", "--train-iters 1000": SHORT
        },
        "megafp8 run-comparison --recipes bf16,bf16-control,delayed": {"--seeds 3": "--seeds 1", "FLAGS": FLAGS},
        "megafp8 compare runs/bf16": {"runs/bf16": "runs/mine/bf16/seed*", "runs/fp8": "runs/mine/delayed/seed*"},
    },
    "docs/data.md": {
        "megafp8 train-tokenizer": SMALL_TOKENIZER,
        "megafp8 preprocess": {END: "--workers 1"},
        "megafp8 merge-shards --input a_text_document": {
            BEFORE: "mkdir shards\nfor name in a b data/a data/b shards/c; do for end in bin idx manifest.json; do "
                    "cp data/corpus_text_document.$end ${name}_text_document.$end; done; done\n",
        },
        "megafp8 build-index": {END: "--seq-length 32 --train-iters 10 --global-batch-size 2"},
    },
    "docs/doctor.md": {
        "megafp8 doctor --gpus 8": {BEFORE: "mkdir runs\n", "--gpus 8 ": ""},
        "megafp8 verify-device": {END: "--recipes delayed"},
    },
    "docs/planning.md": {
        "megafp8 plan --model-preset": SMALL_PLAN,
        "megafp8 goodput --model-preset": {
            "llama3-405b --gpus 16384": "llama-1b --gpus 8",
            END: "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1",
        },
        "megafp8 pretrain": {END: f"{SHAPE} --dry-run"},
    },
    "docs/performance.md": {
        "megafp8 pretrain --model-preset llama-1b": {"llama-1b": "tiny", "50303": "255", END: f"{SHAPE} {SHORT}"},
    },
    "docs/precision.md": {
        "megafp8 pretrain": {END: f"--seq-length 32 {SHORT} --fp8-schedule bf16:1,fp8:3,bf16"},
    },
    "docs/muon.md": {"megafp8 pretrain --model-preset tiny": {END: f"{SHAPE} {SHORT} --seq-length 32"}},
    "docs/reliability.md": {
        "torchrun": RANKS | {"FLAGS": FLAGS},
        "megafp8 supervise": SUPERVISED,
    },
    "docs/numerics_guard.md": {
        "megafp8 pretrain --model-preset tiny": {END: f"{SHAPE} --seq-length 32 {SHORT} --save-interval 2"},
    },
    "docs/recipes.md": {"megafp8 pretrain --model-preset tiny": {END: SHORT}},
    "docs/tutorials/compare_recipes.md": {
        "megafp8 run-comparison --recipes bf16,tensorwise,nvfp4 --seeds 3": {
            "bf16,tensorwise,nvfp4 --seeds 3": "bf16,nvfp4 --seeds 2",
            END: "-- --train-iters 4 --eval-interval 2 --eval-iters 1",
        },
    },
    "docs/tutorials/hugging_face.md": {
        "megafp8 train-tokenizer": {END: "--num-threads 1"},
        "megafp8 preprocess": {END: "--workers 1"},
        "megafp8 pretrain": {END: f"{SHORT} --seq-length 32 --eval-interval 2"},
        "megafp8 evaluate": {"20000": "500"},
    },
    "docs/tutorials/megatron_to_slurm.md": {
        "megafp8 plan": {
            "llama3-8b --gpus 64": "llama-1b --gpus 2", "--global-batch-size 512": "--global-batch-size 8",
            END: "--scaling 2",
        },
    },
    "docs/scaling_studies.md": {
        "megafp8 corpus": {END: "--max-bytes 200000"},
        "megafp8 preprocess": {END: "--workers 1"},
        "megafp8 study examples/studies/stdlib_cpu.yaml --local": {
            "examples/studies/stdlib_cpu.yaml": "small.yaml", END: "--only '43k-seed1-*'"
        },
        "megafp8 study examples/studies/stdlib_cpu.yaml --status": {
            "examples/studies/stdlib_cpu.yaml": "small.yaml"
        },
    },
    "docs/observability.md": {
        "megafp8 corpus": {END: "--max-bytes 200000"},
        "megafp8 preprocess": {END: "--workers 1"},
        "megafp8 pretrain --num-layers 4": {
            END: f"{SHAPE} {SHORT} --seq-length 32 --fp8-log-interval 2 --split 50,50,0"
        },
    },
}  # fmt: skip

# ---- commands that do not run ----------------------------------------------------------------------------------------

RUN_BY = "run by "
TESTS = "the tests themselves"
NOT_RUN: Mapping[str, Mapping[str, str]] = {
    "README.md": {
        "bash examples/quickstart.sh": f"{RUN_BY}tests/cli/test_quickstart.py",
        ". tools/setup_venv.sh": "installs packages: tests/run.sh begins with it",
        ". .venv/bin/activate": "belongs to the command before",
    },
    "CONTRIBUTING.md": {
        "bash tests/run.sh": TESTS,
        ". .venv/bin/activate": "belongs to the command before",
        "pre-commit": "changes the checkout; its hooks are lines of tests/run.sh",
        "python -m pytest": TESTS,
        "python tests/mutants.py": "runs all tests; tests/test_mutants.py tests its parts",
        "mkdocs serve": "a server",
        "mkdocs build": "tests/policy/test_site.py builds the site",
        "mike deploy": "commits to a branch",
    },
    "docs/getting_started.md": {
        ". tools/setup_venv.sh": "installs packages: tests/run.sh begins with it",
        ". .venv/bin/activate": "belongs to the command before",
    },
    "docs/index.md": {
        ". tools/setup_venv.sh": "installs packages: tests/run.sh begins with it",
        ". .venv/bin/activate": "belongs to the command before",
    },
    "docs/generate_evaluate.md": {
        **dict.fromkeys(
            ("lm_eval", "python -m megafp8.training.lm_eval_model"),
            "needs that package: tests/cli/test_lm_eval.py runs it where it is installed",
        ),
    },
    "docs/comparing.md": {
        "bash examples/precision_table.sh": f"{RUN_BY}tests/cli/test_examples.py",
        "megafp8 precision-table": f"{RUN_BY}tests/cli/test_precision_table_command.py",
    },
    "docs/data.md": {
        **dict.fromkeys(("curl", "megafp8 preprocess --hf-dataset"), "needs a network"),
        "pip install": "installs packages",
        "python examples/clean_with_datatrove.py": f"{RUN_BY}tests/cli/test_datatrove.py",
    },
    "docs/object_storage.md": {
        "pip install": "installs packages",
        "megafp8 pretrain": f"{RUN_BY}tests/faults/test_object_storage_runs.py",
    },
    "docs/observability.md": {"pip install": "installs packages"}
    | dict.fromkeys(("wandb login", "wandb sync"), "needs an account"),
    "docs/install.md": dict.fromkeys(
        (". tools/setup_venv.sh", ". .venv/bin/activate", "pip install", "uv venv", "uv pip", "conda create", "export"),
        "installs packages",
    ),
    "docs/clusters.md": dict.fromkeys(("docker", "enroot", "apptainer"), "needs the program and a registry"),
    "docs/tutorials/hugging_face.md": {"hf download": "needs a network"},
    "docs/dev/reliability_internals.md": {
        "python -m pytest tests/faults": TESTS,
        "python -m pytest tests/faults --long": TESTS,
        "python benchmarks/chaos_soak.py": f"{RUN_BY}tests/faults/test_chaos_soak.py",
        "python benchmarks/planted_faults.py": f"{RUN_BY}tests/unit/benchmarks/test_stability_benchmarks.py",
    },
}

# ---- files of the reader
# ----------------------------------------------------------------------------------------------


def write_text(path: Path) -> None:
    """Two hundred documents of Python source."""
    text = bytes(TOKENS.tolist()).decode()
    path.parent.mkdir(parents=True, exist_ok=True)
    pieces = (text[start : start + 500] for start in range(0, 100_000, 500))
    path.write_text("".join(json.dumps({"text": piece}) + "\n" for piece in pieces), encoding="utf-8")


def give_texts(folder: Path) -> None:
    """The text that docs/data.md reads."""
    (folder / "input.txt").write_text("First:\nProceed.\n\nAll:\nSpeak, speak.\n", encoding="utf-8")
    write_text(folder / "data/text.jsonl")
    write_text(folder / "more/text.jsonl")
    subprocess.run(["gzip", str(folder / "more/text.jsonl")], check=True)


def give_model(folder: Path, name: str, config: Mapping[str, object]) -> None:
    """A folder of transformers under the name that a page converts, with random weights, and text."""
    write_text(folder / "data/mine.jsonl")
    theirs = write_hf_folder(folder / name, config, random_weights(config, torch.bfloat16))
    train_tokenizer([str(folder / "data/mine.jsonl")], str(folder / "bpe"), vocab_size=300, model_type="byte-bpe")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / "bpe" / name, theirs)


def give_script(folder: Path) -> None:
    """The launch script and the job file that docs/tutorials/megatron_to_slurm.md shows."""
    text = (ROOT / "docs/tutorials/megatron_to_slurm.md").read_text(encoding="utf-8")
    (folder / "train_llama3_8b.sbatch").write_text(text.split("```\n")[1], encoding="utf-8")
    (folder / "llama3_8b.yaml").write_text(text.split("```yaml\n")[1].split("```")[0], encoding="utf-8")


def give_study(folder: Path) -> None:
    """The study of docs/scaling_studies.md with fewer tokens."""
    text = (ROOT / "examples/studies/stdlib_cpu.yaml").read_text(encoding="utf-8")
    for old, new in (
        ("tokens_per_parameter: 10", "tokens_per_parameter: 0.1"), ("--eval-iters 200", "--eval-iters 1"),
        ("--split 95,5,0", "--split 50,50,0"),
    ):  # fmt: skip
        assert old in text
        text = text.replace(old, new)
    (folder / "small.yaml").write_text(text, encoding="utf-8")


GIVEN: Mapping[str, Callable[[Path], None]] = {
    "README.md": lambda folder: write_text(folder / "data/text.jsonl"),
    "docs/generate_evaluate.md": lambda folder: write_text(folder / "data/text.jsonl"),
    "docs/getting_started.md": lambda folder: write_text(folder / "data/text.jsonl"),
    "docs/hugging_face.md": lambda folder: give_model(folder, "Meta-Llama-3-8B", ONE_LLAMA),
    "docs/data.md": give_texts,
    "docs/scaling_studies.md": give_study,
    "docs/tutorials/hugging_face.md": lambda folder: write_text(folder / "data/mine.jsonl"),
    "docs/tutorials/megatron_to_slurm.md": give_script,
}

# ---------------------------------------------------------------------------------------------------------------------


def entry_of(command: Command, entries: Mapping[str, object]) -> str | None:
    """The longest key that is a prefix of the command, in complete words."""
    found = [key for key in entries if f"{command.text} ".startswith(f"{key} ")]
    return max(found, key=len, default=None)


def shortened(text: str, change: Mapping[str, str], free_port: int) -> str:
    """The command with its changes. Every change must have an effect."""
    for old, new in change.items():
        if old not in (BEFORE, END):
            assert old in text, f"{old!r} is not in: {text}"
            text = text.replace(old, new)
    text = f"{change.get(BEFORE, '')}{text} {change.get(END, '')}"
    return text.replace("FREE_PORT", str(free_port))


def script_of(page: str) -> str:
    """The commands of a page, block by block, shortened."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shorter, not_run, blocks = SHORTER.get(page, {}), NOT_RUN.get(page, {}), {}
    for number, commands in groupby(commands_in(ROOT / page), lambda command: command.block):
        lines = [
            shortened(command.text, shorter.get(entry_of(command, shorter) or "", {}), port)
            for command in commands
            if entry_of(command, not_run) is None
        ]
        blocks[number] = "(\n" + "\n".join(lines or [":"]) + "\n)\n"
    if page.startswith("docs/tutorials/"):  # their Python goes on with what the commands made
        for number, block in python_of(ROOT / page).items():
            blocks[number] = f"cat > block{number}.py <<'PYTHON'\n{block}PYTHON\npython block{number}.py\n"
    # The console command of an installation. tests/cli/test_wheel.py tests the real one.
    start = 'set -ex\nmegafp8() { python -m megafp8.cli.main "$@"; }\n'
    return start + "".join(blocks[number] for number in sorted(blocks))


@pytest.fixture(scope="module")
def environment() -> Iterator[dict[str, str]]:
    """An environment in which `python` forks."""
    with tempfile.TemporaryDirectory(prefix="docs_") as name, forked_python(Path(name)) as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if any(commands_in(ROOT / page))])
def test_the_commands_of_a_page_run(page: str, environment: dict[str, str], tmp_path: Path) -> None:
    lay_out(tmp_path)
    GIVEN.get(page, lambda folder: None)(tmp_path)
    done = subprocess.run(
        ["bash", "-c", script_of(page)], cwd=tmp_path, env=environment, capture_output=True, text=True,
        timeout=TIMEOUT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]


@pytest.mark.parametrize("table", [SHORTER, NOT_RUN], ids=["shorter", "not run"])
def test_the_tables_are_not_stale(table: Mapping[str, Mapping[str, object]]) -> None:
    for page, entries in table.items():
        used = {entry_of(command, entries) for command in commands_in(ROOT / page)}
        assert set(entries) <= used, page


def test_commands_left_to_another_test_are_in_it() -> None:
    for page, entries in NOT_RUN.items():
        for start, reason in entries.items():
            if reason.startswith(RUN_BY):
                words = start.removeprefix("megafp8 ").split()
                script = next((word for word in words if word.endswith((".py", ".sh"))), words[0])
                test = ROOT / reason.removeprefix(RUN_BY)
                assert Path(script).stem in test.read_text(encoding="utf-8"), (page, start)
