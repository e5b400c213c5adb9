"""The lines of shell that all launch scripts share."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from megafp8.launch.job import Job
from megafp8.utils.formatting import check_lines

MAX_LINE_WIDTH = 116
VARIABLE_COMMENTS = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "  # seconds between a signal and the kill of the ranks"}


def join_script(parts: Sequence[Sequence[str]]) -> str:
    """The text of a script, with an empty line between its parts.

    Raises:
        ConfigError: a line contains a line break.
    """
    for part in parts:
        check_lines(part)
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def environment_lines(job: Job) -> list[str]:
    """Lines that set the working directory, the virtual environment and the variables of all ranks."""
    lines = [f"cd {shlex.quote(job.project)}"]
    if job.setup:
        lines += job.setup.rstrip().split("\n")
    if job.venv:
        lines.append(f". {shlex.quote(job.venv)}/bin/activate")
    lines += [
        "# Environment of all ranks. Transformer Engine's variables of the submitting shell are removed.",
        'unset "${!NVTE_@}"',
        *(
            f"export {name}={shlex.quote(value)}{VARIABLE_COMMENTS.get(name, '')}"
            for name, value in rank_environment(job).items()
        ),
    ]
    return lines


def rank_environment(job: Job) -> dict[str, str]:
    """Variables for all ranks: defaults, then the job's own. `pretrain_gpt.py` sets others as it needs them.

    TORCH_ELASTIC_SHUTDOWN_TIMEOUT is the time from a signal until torchrun kills its ranks. They read the same variable
    and stop saving before that.
    """
    variables = {"OMP_NUM_THREADS": "1"}
    if not job.preprocess:
        variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(job.time_to_save_s)
    if job.gpus_per_node:
        variables["NCCL_DEBUG"] = "WARN"
    return variables | dict(job.environment)


def torchrun_array(job: Job, options: Sequence[str]) -> list[str]:
    """The bash array `torchrun` with the command that starts the ranks of a node."""
    start = f"python3 -m torch.distributed.run --nproc-per-node {job.ranks} --redirects 3 --tee 0:3"
    return bash_array("torchrun", [start, *options])


def training_lines(job: Job, task: str = "SLURM_ARRAY_TASK_ID") -> list[str]:
    """The bash array `training` with the flags; in a job array, those of the task are appended.

    Args:
        task: variable with the index of the run.
    """
    lines = bash_array("training", fill_lines(job.training))
    if job.runs:
        lines += ["# The runs of the array.", f"case ${task} in"]
        lines += [f"  {task}) training+=({' '.join(map(quote_word, run))}) ;;" for task, run in enumerate(job.runs)]
        lines.append("esac")
    return lines


def preprocess_words(job: Job) -> list[str]:
    """The flags of `megafp8 preprocess` that all parts share."""
    words = list(job.preprocess)
    if job.cpus_per_node and "--workers" not in words:
        words += ["--workers", str(job.cpus_per_node)]
    return words


def preprocess_lines(job: Job) -> list[str]:
    """The bash array `preprocess` with the flags of the array's task: a part, or the merge of all."""
    return [
        *bash_array("preprocess", fill_lines(preprocess_words(job))),
        "# Task I of the array makes part I. Task 0 merges the parts, after the array:",
        "#   sbatch --array=0 --dependency=afterok:ARRAY_JOB --kill-on-invalid-dep=yes THIS_SCRIPT",
        "case $SLURM_ARRAY_TASK_ID in",
        "  0) preprocess+=(--merge-parts) ;;",
        f'  *) preprocess+=(--part "$SLURM_ARRAY_TASK_ID/{job.parts}") ;;',
        "esac",
    ]


def fill_lines(words: Sequence[str]) -> list[str]:
    """Break the words of a command into lines, keeping a flag and its first value together."""
    pairs: list[str] = []
    for word in map(quote_word, words):
        if pairs and not word.startswith("--") and pairs[-1].startswith("--") and " " not in pairs[-1]:
            pairs[-1] += f" {word}"
        else:
            pairs.append(word)
    lines: list[str] = []
    for pair in pairs:
        if lines and len(lines[-1]) + len(pair) < MAX_LINE_WIDTH:
            lines[-1] += f" {pair}"
        else:
            lines.append(pair)
    return lines


def quote_word(word: str) -> str:
    """Quote a word of a bash array, also if it has commas, which look like a mistake there."""
    plain = shlex.quote(word)
    return f"'{word}'" if plain == word and "," in word else plain


def bash_array(name: str, lines: Sequence[str]) -> list[str]:
    """A bash array with the words in these lines."""
    return [f"{name}=(", *(f"  {line}" for line in lines), ")"]
