"""Parts of the shell scripts that start runs, as a person would write them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from megafp8.launch.control_characters import check_lines
from megafp8.launch.job import Job

WIDTH = 116
COMMENTS = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "  # seconds from a signal until ranks are killed"}


def script_of(parts: Sequence[Sequence[str]]) -> str:
    """The text of a script, with an empty line between its parts.

    Raises:
        ConfigError: what was meant to be one line is several.
    """
    for part in parts:
        check_lines(part)
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def environment_lines(job: Job) -> list[str]:
    """Folder, modules, Python and the variables of all ranks."""
    lines = [f"cd {shlex.quote(job.project)}"]
    if job.setup:
        lines += job.setup.rstrip().split("\n")
    if job.venv:
        lines.append(f". {shlex.quote(job.venv)}/bin/activate")
    lines += [
        "# Said once, for all ranks. What the shell before had set for Transformer Engine does not count.",
        'unset "${!NVTE_@}"',
        *(f"export {name}={shlex.quote(value)}{COMMENTS.get(name, '')}" for name, value in environment(job).items()),
    ]
    return lines


def environment(job: Job) -> dict[str, str]:
    """Variables for all ranks: those of every job, then the job's own. Others, `pretrain_gpt.py` sets as it needs them.

    So many seconds after a signal torchrun kills its ranks; they read the same variable and give up saving before.
    """
    every = {"OMP_NUM_THREADS": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(job.time_to_save_s)}
    if job.gpus_per_node:
        every["NCCL_DEBUG"] = "WARN"
    return every | dict(job.environment)


def training_lines(job: Job) -> list[str]:
    """The flags as an array `training`; in a job array those of the task are added."""
    lines = array("training", filled(job.training))
    if job.runs:
        lines += ["# The runs of the array.", "case $SLURM_ARRAY_TASK_ID in"]
        lines += [f"  {task}) training+=({' '.join(map(quoted, run))}) ;;" for task, run in enumerate(job.runs)]
        lines.append("esac")
    return lines


def filled(words: Sequence[str]) -> list[str]:
    """Words of a command in lines; a flag and its first value are not parted."""
    pairs: list[str] = []
    for word in map(quoted, words):
        if pairs and not word.startswith("--") and pairs[-1].startswith("--") and " " not in pairs[-1]:
            pairs[-1] += f" {word}"
        else:
            pairs.append(word)
    lines: list[str] = []
    for pair in pairs:
        if lines and len(lines[-1]) + len(pair) < WIDTH:
            lines[-1] += f" {pair}"
        else:
            lines.append(pair)
    return lines


def quoted(word: str) -> str:
    """A word of an array; commas look like a mistake there unless they are quoted."""
    plain = shlex.quote(word)
    return f"'{word}'" if plain == word and "," in word else plain


def array(name: str, lines: Sequence[str]) -> list[str]:
    """An array of the words in these lines."""
    return [f"{name}=(", *(f"  {line}" for line in lines), ")"]
