"""Command lines of Megatron-LM's tests and examples, and what a dry run says about each.

- `lines.jsonl`: one command line a row, of its main branch in August 2026. Variables of its tests that stand for paths
  are replaced by folders below `runs/`, data by mock data.
- `flags.jsonl`: every flag of its parser: spellings, number of values and default.
- `verdicts.jsonl`: whether the dry run of each command line passes, and the first problem. `sweep.py` writes it.
- `cover.json`: the few passing lines that CI runs.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from forked_runs import prepare

HERE = Path(__file__).parent
MOST_IN_CI = 12


@dataclass(frozen=True)
class Line:
    """A command line.

    Attributes:
        number: its row in `lines.jsonl`, from 0.
        source: its file in Megatron-LM.
        family: dense, mixture (of experts) or hybrid (with state-space layers).
        world_size: GPUs of its record: 8, or the fewest that its layout without experts needs.
    """

    number: int
    source: str
    family: str
    world_size: int
    argv: tuple[str, ...]

    @property
    def flags(self) -> frozenset[str]:
        """The flags that it gives."""
        return frozenset(word.partition("=")[0] for word in self.argv if word.startswith("--"))

    @property
    def num_gpus(self) -> int:
        """The fewest GPUs, at least those of its record, that hold its layout, also that of its experts."""
        sizes = [1, 1, 1, 1, 0]  # no expert tensor-parallel size: that of the other layers
        for position, name in enumerate(("tensor-model", "pipeline-model", "context", "expert-model", "expert-tensor")):
            flag = f"--{name}-parallel-size"
            if flag in self.argv:
                sizes[position] = int(self.argv[self.argv.index(flag) + 1])
        tensor, pipeline, context, expert, expert_tensor = sizes
        needed = pipeline * math.lcm(tensor * context, expert * (expert_tensor or tensor))
        return math.ceil(self.world_size / needed) * needed if "--num-experts" in self.argv else self.world_size


@dataclass(frozen=True)
class ParserFlag:
    """A flag of Megatron-LM's parser.

    Attributes:
        flags: its spellings.
        nargs: argparse's `nargs` as text; None for one value, "0" for none.
        default: its default, as Python writes it.
    """

    flags: tuple[str, ...]
    nargs: str | None
    default: str


@dataclass(frozen=True)
class Verdict:
    """The answer to a command line: the exit status of its dry run and the first problem."""

    number: int
    status: int
    reason: str


def read_rows(name: str) -> list[dict]:
    """The rows of a file of this folder."""
    return [json.loads(row) for row in (HERE / name).read_text(encoding="utf-8").splitlines()]


def read_lines() -> list[Line]:
    """Every command line."""
    return [
        Line(number, row["source"], row["family"], row["world_size"], tuple(row["argv"]))
        for number, row in enumerate(read_rows("lines.jsonl"))
    ]


def read_parser_flags() -> list[ParserFlag]:
    """Every flag of Megatron-LM's parser."""
    return [ParserFlag(tuple(row["flags"]), row["nargs"], row["default"]) for row in read_rows("flags.jsonl")]


def read_verdicts() -> list[Verdict]:
    """The recorded answers, in the order of the lines."""
    return [Verdict(**row) for row in read_rows("verdicts.jsonl")]


def read_cover() -> list[int]:
    """The numbers of the lines that CI runs."""
    return json.loads((HERE / "cover.json").read_text())


def dry_run(line: Line) -> Verdict:
    """The answer to a command line, from a fork of this process in an empty folder."""
    prepare()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        with os.fdopen(writer, "w") as answer:
            json.dump(_dry_run_here(line), answer)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        text = answer.read()
    os.waitpid(pid, 0)
    status, errors = json.loads(text) if text else (-1, "the process died")
    return Verdict(line.number, status, first_problem(errors) if status else "")


def _dry_run_here(line: Line) -> tuple[int, str]:
    main = sys.modules["megafp8.cli.pretrain"].main
    words = [*line.argv, "--dry-run", "--world-size", str(line.num_gpus), "--target", "h100"]
    errors = io.StringIO()
    with (
        tempfile.TemporaryDirectory(prefix="line_") as folder,
        contextlib.chdir(folder),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(errors),
    ):
        try:
            status = main(words)
        except BaseException as error:  # of a forked child, which must answer
            return -1, repr(error)
    return status, errors.getvalue()


def first_problem(errors: str) -> str:
    """The first problem of an error message."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    listed = [line.removeprefix("- ") for line in lines if line.startswith("- ")]
    return (listed or lines or ["no message"])[0]


def choose_cover(lines: Sequence[Line], verdicts: Sequence[Verdict]) -> list[int]:
    """The numbers of a few passing lines with most of the flags that passing lines use, in the order of the choice.

    Each next line has the most flags that the chosen ones do not have; the first of equal ones is taken.
    """
    passing = [line for line in lines if verdicts[line.number].status == 0]
    chosen: list[int] = []
    covered: set[str] = set()
    while len(chosen) < MOST_IN_CI:
        best = max(passing, key=lambda line: len(line.flags - covered), default=None)
        if best is None or not best.flags - covered:
            break
        chosen.append(best.number)
        covered |= best.flags
    return chosen
