"""Job files: their valid content, and a report of all errors together."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from megafp8.errors import ConfigError
from megafp8.launch.job import Job, build_job, check_job, read_job, time_limit_s

RUN = ("--save", "runs/a", "--load", "runs/a")
FILE = """
name: first
nodes: 4
time: 24:00:00
exclusive: false
environment: {NCCL_IB_HCA: mlx5, SWITCH: on}
sbatch: {qos: high, no-kill: }
setup: |
  module purge
  module load cuda
training: |
  --model-preset tiny   # a comment
  --save 'runs/a b' --load 'runs/a b'
"""


def test_job_values_are_read_literally() -> None:
    """YAML would read 86400 for 24:00:00 and true for on."""
    job = read_job(FILE, {})
    assert (job.name, job.nodes, job.time, job.exclusive) == ("first", 4, "24:00:00", False)
    assert job.environment == {"NCCL_IB_HCA": "mlx5", "SWITCH": "on"}
    assert job.sbatch == {"qos": "high", "no-kill": ""}
    assert job.setup == "module purge\nmodule load cuda\n"
    assert job.training == ("--model-preset", "tiny", "--save", "runs/a b", "--load", "runs/a b")
    assert (job.run_folder, job.log_folder) == ("runs/a b", "runs/a b/logs")
    check_job(job)


def test_command_line_options_override_the_file() -> None:
    job = read_job(FILE, {"nodes": "8", "environment": {"SWITCH": "off"}}, ["--save", "b", "--load=b", "--load", "b"])
    assert job.nodes == 8
    assert job.environment == {"NCCL_IB_HCA": "mlx5", "SWITCH": "off"}
    assert job.run_folder == "b" and job.training[:2] == ("--model-preset", "tiny")


def test_ranks() -> None:
    of = {"name": "a", "training": RUN, "nodes": 3}
    assert Job(**of).world_size == 24
    assert Job(**of, gpus_per_node=0).world_size == 3
    assert Job(**of, gpus_per_node=0, ranks_per_node=2).world_size == 6


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("90", 5400), ("1:30", 90), ("24:00:00", 86400), ("2-12", 216000), ("1-00:30", 88200), ("1-00:00:30", 86430)],
)
def test_time_limits_have_slurms_format(time: str, seconds: int) -> None:
    assert time_limit_s(time) == seconds


def test_a_sufficient_time_limit_is_accepted() -> None:
    for change in ({"time": "00:17:01"}, {"time": "00:07:01", "check_nodes": "false"}):
        job = build_job({"name": "first", "training": list(RUN), **change})
        check_job(job)
        assert job.time == change["time"]


def test_runs_of_an_array_are_lines() -> None:
    plain = {"name": "a", "training": "--lr 1", "logs": "l", "runs": "--save a --load a\n--save b --load b"}
    assert build_job(plain).commands == [
        ("--lr", "1", "--save", "a", "--load", "a"), ("--lr", "1", "--save", "b", "--load", "b"),
    ]  # fmt: skip
    assert build_job(plain | {"runs": plain["runs"].splitlines()}) == build_job(plain)
    check_job(build_job(plain))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": "two words"}, "letters, digits"),
        ({"name": None}, "name: missing"),
        ({"nodes": "0"}, "nodes: 0: at least 1"),
        ({"nodes": "many"}, "nodes: 'many': must be an integer"),
        ({"node": "2"}, "unknown key 'node'; did you mean nodes?"),
        ({"exclusive": "yes"}, "true or false"),
        ({"environment": ["A"]}, "must be a mapping"),
        ({"environment": {"A B": "1"}}, "not a valid variable name"),
        ({"time": "tomorrow"}, "D-HH:MM:SS"),
        ({"partition": {"a": "b"}}, "must be a string"),
        ({"training": "--save 'a"}, "No closing quotation"),
        ({"training": "--save a"}, "--save a and no --load: must be the same folder"),
        ({"training": "--lr 1"}, "no --save and no --load: must be the same folder"),
        ({"training": [["a"]]}, "must be a list of words"),
        ({"gpus_per_node": "8", "ranks_per_node": "4"}, "gpus_per_node: 8: must be equal"),
        ({"time": "00:07:00"}, "no time is left for training"),
        ({"time": "00:17:00"}, "the node check may take 600 s before training starts"),
        ({"time": "00:17:00"}, "or set check_nodes to false (--no-check-nodes)"),
        ({"max_requeues": "1\n"}, "an integer"),
        ({"endpoint": "first"}, "HOST:PORT"),
        ({"array_limit": "2"}, "without `runs`"),
        ({"parts": "2"}, "parts: 2: has no effect without `preprocess`"),
        ({"mounts": "data"}, "without a container"),
        ({"runs": "--lr 1\n--lr 2", "logs": "l"}, "--save runs/a: used by 2 runs"),
        ({"sbatch": {"nodes": "2"}}, "sbatch: nodes: set by the launcher"),
        ({"runs": "--lr 1"}, "a job array needs a folder"),
    ],
)
def test_job_errors_are_reported(change: dict, words: str) -> None:
    plain = {"name": "first", "training": list(RUN)} | change
    with pytest.raises(ConfigError) as refused:
        check_job(build_job({name: value for name, value in plain.items() if value is not None}))
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"parts": "0"}, "parts: 0: at least 1"),
        ({"parts": None}, "parts: missing"),
        ({"logs": None}, "a job array needs a folder"),
        ({"gpus_per_node": None}, "gpus_per_node: 8: preprocessing runs on CPUs; set 0"),
        ({"nodes": "2"}, "nodes: 2: each part runs on one node; set `parts`"),
        ({"training": "--lr 1"}, "training: --lr 1: a job either trains or preprocesses"),
        ({"runs": "--lr 1"}, "runs: "),
        ({"preprocess": "--input a --part 1/2"}, "preprocess: --part: set by the launcher"),
    ],
)
def test_errors_of_preprocessing_jobs_are_reported(change: dict, words: str) -> None:
    plain = {"name": "a", "preprocess": "--input a", "parts": "2", "logs": "l", "gpus_per_node": "0", "time": "1"}
    job = build_job(plain, ["--append-eod"])
    check_job(job)
    assert job.preprocess == ("--input", "a", "--append-eod") and not job.training
    with pytest.raises(ConfigError) as refused:
        check_job(build_job({name: value for name, value in (plain | change).items() if value is not None}))
    assert words in str(refused.value)


@pytest.mark.parametrize(("training", "is_refused"), [("--lr 1", False), ("--save a", True), ("--load a", False)])
def test_a_run_that_may_be_lost_needs_no_folder(training: str, is_refused: bool) -> None:
    job = build_job({"name": "first", "training": training})
    with pytest.raises(ConfigError, match="must be the same folder") if is_refused else nullcontext():
        check_job(job, needs_save=False)
    with pytest.raises(ConfigError, match="must be the same folder"):
        check_job(job)


def test_all_job_errors_are_reported_together() -> None:
    with pytest.raises(ConfigError) as refused:
        check_job(build_job({"name": "a b", "training": "--lr 1", "nodes": "0", "time": "x"}))
    assert len(refused.value.problems) == 4


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("- a list", "j.yaml: must be a mapping"),
        ("name: a\n b: 1", "j.yaml:2: not YAML: 'b: 1': mapping values are not allowed here"),
        ("just words", "j.yaml: must be a mapping"),
        ("name: a\nnode: 2\nzone: x", "j.yaml:2: unknown key 'node'; did you mean nodes?"),
        ("name: a\nzone: x\nplace: y", "j.yaml:3: unknown key 'place'\n"),
    ],
)
def test_invalid_job_files_are_refused(text: str, told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_job(text, {}, path="j.yaml")
    assert told in f"{refused.value}\n" and str(refused.value).count("the keys are") <= 1
