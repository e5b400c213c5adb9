"""Job and study files that try to inject code into the generated script: refused, or taken literally."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from megafp8.errors import ConfigError
from megafp8.launch import slurm, torchrun
from megafp8.launch.job import Job, build_job, check_job, read_job
from megafp8.launch.study import expand, read_study
from megafp8.launch.study_execution import build_jobs
from megafp8.utils.formatting import check_lines, control_problems

TOUCH = "touch FLAG"
CONTROL = [f"\n{TOUCH}", f"\n{TOUCH}\n", f"\r{TOUCH}", f"\r\n{TOUCH}\r\n", "\x00", "\x1b[2J", "\x7f", "\x85", "\u2028",
           "\t", "\udcff"]  # fmt: skip
SHELL = [f"$({TOUCH})", f"`{TOUCH}`", f"; {TOUCH}", f"' ; {TOUCH} #", f'" ; {TOUCH} #', f"a) ;; esac; {TOUCH} #",
         f"$'\\n{TOUCH}'", "END"]  # fmt: skip
RUN = ("--save", "runs/a", "--load", "runs/a")
# The places of a job's values, and a job with a value at each.
FieldMaker = Callable[[str], dict[str, Any]]
JOB: dict[str, FieldMaker] = {
    "name": lambda text: {"name": text},
    "time": lambda text: {"time": text},
    "partition": lambda text: {"partition": text},
    "account": lambda text: {"account": text},
    "sbatch's value": lambda text: {"sbatch": {"qos": text}},
    "sbatch's key": lambda text: {"sbatch": {text: "high"}},
    "sbatch's key without a value": lambda text: {"sbatch": {f"no-kill{text}": ""}},
    "project": lambda text: {"project": text},
    "venv": lambda text: {"venv": text},
    "container": lambda text: {"container": text},
    "sif": lambda text: {"container": f"{text}.sif"},
    "mounts": lambda text: {"container": "image", "mounts": [text]},
    "environment's value": lambda text: {"environment": {"TAG": text}},
    "environment's name": lambda text: {"environment": {f"TAG{text}": "x"}},
    "training": lambda text: {"training": [*RUN, "--lr", text]},
    "training's flag": lambda text: {"training": [*RUN, f"--lr{text}"]},
    "save": lambda text: {"training": ["--save", text, "--load", text]},
    "logs": lambda text: {"logs": text},
    "endpoint": lambda text: {"endpoint": f"first:1{text}"},
    "runs": lambda text: {"runs": [[text], [*TOUCH.split(), "--save", "runs/b", "--load", "runs/b"]], "logs": "logs"},
    "runs' folder": lambda text: {"runs": [["--save", text, "--load", text]], "logs": "logs"},
    "logs of an array": lambda text: {"runs": [["--lr", "1"]], "logs": text},
    **{
        number: lambda text, number=number: {number: f"1{text}"}
        for number in ("nodes", "gpus_per_node", "ranks_per_node", "cpus_per_node", "time_to_save_s", "max_restarts",
                       "max_requeues", "array_limit")
    },
    **{answer: lambda text, answer=answer: {answer: f"true{text}"} for answer in ("exclusive", "check_nodes")},
}  # fmt: skip
# Replaces every command of a script. The commands that finally run are arguments of srun and python3.
STANDINS = {
    "srun": 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"',
    "apptainer": 'shift; while [ "${1#--}" != "$1" ]; do shift; done; shift; exec "$@"',
    "scontrol": "echo n7",
    "python3": 'case $1 in launcher/supervise.py) while [ "$1" != -- ]; do shift; done; shift; exec "$@" ;; esac',
}


@pytest.fixture
def commands(tmp_path: Path) -> dict[str, str]:
    """The environment in which scripts run."""
    for name, text in STANDINS.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    return {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "SLURM_JOB_ID": "41", "SLURM_JOB_NODELIST": "n7",
            "SLURM_NNODES": "1", "SLURM_NODEID": "0", "SLURMD_NODENAME": "n7", "SLURM_ARRAY_TASK_ID": "0",
            "SLURM_ARRAY_JOB_ID": "41"}  # fmt: skip


def scripts(job: Job) -> Iterator[str]:
    """All possible scripts of a job."""
    for launcher in (slurm, torchrun):
        try:
            yield launcher.script(job)
        except ConfigError as error:
            assert launcher is torchrun, error


def ran(text: str, environment: dict[str, str], folder: Path) -> bool:
    """Whether a script ran the code hidden in it. Standard tools are available, so that it could."""
    folder.mkdir(exist_ok=True)
    subprocess.run(["bash", "-c", text], cwd=folder, env=environment, capture_output=True, stdin=subprocess.DEVNULL)
    return any((each / "FLAG").exists() for each in (folder, folder.parent))


@pytest.mark.parametrize("field", JOB)
def test_no_field_of_a_job_becomes_code(field: str, tmp_path: Path, commands: dict[str, str]) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    num_scripts = 0
    for payload in [*CONTROL, *SHELL]:
        plain = {"name": "first", "training": [*RUN], "project": str(folder)} | JOB[field](payload)
        try:
            job = build_job(plain)
            check_job(job)
        except ConfigError:
            continue
        assert payload in SHELL, f"{field}: {payload!r} was taken"
        for text in scripts(job):
            num_scripts += 1
            assert not ran(text, commands, folder), f"{field}: {payload!r}\n{text}"
    assert num_scripts or field in {"name", "time", "sbatch's key", "sbatch's key without a value", "endpoint",
                                    "environment's name", *list(JOB)[-10:]}  # fmt: skip


@pytest.mark.parametrize("payload", CONTROL)
def test_no_value_adds_a_line_to_a_script(payload: str) -> None:
    """Independent of the check of a job: fields that were not read from a file, one by one."""
    plain = Job(name="first", training=RUN, logs="logs", runs=(("--lr", "1"),))
    for change in (
        {"partition": payload}, {"account": payload}, {"sbatch": {"qos": payload}}, {"sbatch": {payload: ""}},
        {"project": payload}, {"venv": payload}, {"container": payload}, {"environment": {"A": payload}},
        {"environment": {payload: "A"}}, {"training": (payload,)}, {"runs": ((payload,),)}, {"logs": payload},
        {"name": payload}, {"time": payload},
    ):  # fmt: skip
        if payload == "\t":
            continue  # a space in a line of shell
        with pytest.raises(ConfigError, match="control characters"):
            slurm.script(Job(**vars(plain) | change))


def test_setup_may_have_lines_and_nothing_else() -> None:
    plain = {"name": "first", "training": [*RUN]}
    job = build_job(plain | {"setup": "if true; then\n\tmodule load cuda\nfi\n"})
    check_job(job)
    assert job.setup
    for char in "\r\x00\x1b":
        with pytest.raises(ConfigError, match="setup: .*control characters"):
            check_job(build_job(plain | {"setup": f"module load cuda{char}"}))


def test_trailing_newlines_of_a_yaml_block_are_reported() -> None:
    with pytest.raises(ConfigError, match=r"partition: 'gpu\\n': remove the control characters '\\n'"):
        check_job(read_job("name: a\ntraining: --save a --load a\npartition: |\n  gpu\n", {}))


STUDY: dict[str, FieldMaker] = {
    "name": lambda text: {"name": text},
    "folder": lambda text: {"folder": text},
    "flags": lambda text: {"flags": f"--data-path {quoted(text)}"},
    "axis": lambda text: {"grid": {f"lr{text}": ["1e-3"]}},
    "value": lambda text: {"grid": {"data-path": [text]}},
    "option": lambda text: {"grid": {"size": {text: "--lr 1e-3"}}},
    "option's flags": lambda text: {"grid": {"size": {"a": f"--data-path {quoted(text)}"}}},
    "slurm's partition": lambda text: {"slurm": {"partition": text}},
    "slurm's logs": lambda text: {"slurm": {"logs": text}},
    "slurm's key": lambda text: {"slurm": {"sbatch": {text: ""}}},
}
FLAGS = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16 --lr 1e-3 "
    "--micro-batch-size 2 --tokenizer-type NullTokenizer --vocab-size 63 --train-iters 3 "
)


def quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


@pytest.mark.parametrize("field", STUDY)
def test_no_part_of_a_study_becomes_code(field: str, tmp_path: Path, commands: dict[str, str]) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    for payload in [*CONTROL, *SHELL]:
        plain = {"flags": "--data-path a", "grid": {"seed": ["1", "2"]}, "folder": "runs", "slurm": {}}
        plain |= STUDY[field](payload)
        plain["flags"] = FLAGS + plain["flags"]
        plain["slurm"] |= {"gpus_per_node": "0", "cpus_per_node": "1", "project": str(folder)}
        path = tmp_path / "study.yaml"
        try:
            path.write_text(yaml.safe_dump(plain))
            study = read_study(path)
            jobs = build_jobs(study, expand(study))
        except (ConfigError, yaml.YAMLError, UnicodeEncodeError):
            continue
        assert payload in SHELL, f"{field}: {payload!r} was taken"
        for job in jobs:
            assert not ran(slurm.script(job), commands, folder), f"{field}: {payload!r}"


def test_problems_name_the_characters_of_texts_wherever_they_are() -> None:
    assert control_problems("a", {"b": ("c", [Path("d\ne")]), "f": 1}) == [
        "a: 'd\\ne': remove the control characters '\\n'"
    ]
    assert control_problems("a", "résumé 数据 \u00a0") == []
    with pytest.raises(ConfigError):
        check_lines(["a", "b\nc"])
    check_lines(["\ta"])


def test_stand_ins_would_run_injected_code(tmp_path: Path, commands: dict[str, str]) -> None:
    """Otherwise the tests above could not fail."""
    job = build_job({"name": "first", "training": [*RUN], "project": str(tmp_path), "partition": "gpu"})
    text = slurm.script(job)
    assert ran(text.replace("partition=gpu", f"partition=gpu\n{TOUCH}"), commands, tmp_path / "a")
    os.remove(tmp_path / "a/FLAG")
    assert ran(text.replace("--save runs/a", f"--save $({TOUCH})"), commands, tmp_path / "a")
