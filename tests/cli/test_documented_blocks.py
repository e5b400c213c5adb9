"""Blocks of documents that are no commands: YAML is a file that a command takes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from documented_commands import PAGES
from forked_runs import ROOT
from forked_script import run_script

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = "FILE"

TRAINING = (
    "--model-preset llama3-8b --world-size 1 --target h200 --seq-length 128 --micro-batch-size 1 --train-iters 10 "
    "--lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 1000 --bf16 --fp8-format hybrid"
)
# The command that takes the file of each page's blocks; a page's next block adds to the blocks before it.
TAKEN_BY = {
    "docs/configs.md": [
        f"pretrain_gpt.py {FILE} --world-size 2 --target h200 --seq-length 128 --micro-batch-size 1 --train-iters 10 "
        "--tokenizer-type NullTokenizer --vocab-size 1000 --tensor-model-parallel-size 2 --dry-run"
    ],
    "docs/data.md": ["pretrain_gpt.py " + TRAINING.replace("--mock-data", f"--data-phases {FILE}") + " --dry-run"],
    "docs/clusters.md": [f"launcher/slurm.py {FILE} --dry-run"],
    "docs/precision.md": [f"pretrain_gpt.py {TRAINING} --precision-map {FILE} --dry-run"],
    "docs/tutorials/megatron_to_slurm.md": [f"launcher/slurm.py {FILE} --dry-run"],
    "docs/scaling_studies.md": [
        f"launcher/scaling_study.py {FILE} --dry-run",
        f"launcher/scaling_study.py {FILE} --dry-run --slurm",
    ],
}


def blocks_of(page: str, language: str) -> list[str]:
    """The blocks of a page in a language."""
    return [text for found, text in BLOCK.findall((ROOT / page).read_text(encoding="utf-8")) if found == language]


@pytest.mark.parametrize("page", [page for page in PAGES if blocks_of(page, "yaml")])
def test_a_command_takes_each_yaml_block(page: str, tmp_path: Path) -> None:
    blocks = blocks_of(page, "yaml")
    for number, command in enumerate(TAKEN_BY[page], 1):
        (tmp_path / "file.yaml").write_text("".join(blocks[:number]), encoding="utf-8")
        done = run_script(*command.replace(FILE, str(tmp_path / "file.yaml")).split())
        assert done.returncode == 0, done.stderr
    assert len(blocks) == len(TAKEN_BY[page])


@pytest.mark.parametrize("block", blocks_of("docs/api.md", "python"))
def test_python_blocks_run(block: str, tmp_path: Path) -> None:
    (tmp_path / "block.py").write_text(block, encoding="utf-8")
    done = run_script(str(tmp_path / "block.py"))
    assert done.returncode == 0 and done.stdout, done.stderr


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_of_a_kind_that_a_test_reads(page: str) -> None:
    """Commands, YAML, Python, or output, which has no language. `tests/reproducers.py` runs that of upstream.md.

    Python of tutorials runs with their commands."""
    found = BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))
    has_python = page in ("docs/api.md", "docs/dev/upstream.md") or page.startswith("docs/tutorials/")
    python = {"python"} if has_python else set()
    assert {language for language, _ in found} <= {"bash", "yaml", ""} | python
    outputs = [text for language, text in found if not language]
    # "megafp8 0.1.0 | run folder" is output, "megafp8 plan" a command.
    assert not any(re.match(r"(megafp8 [a-z]|(python|bash|torchrun|pip) )", text) for text in outputs)
