"""The scripts that start jobs: equal to their snapshots, valid shell, and with the right content.

`--write-snapshots` rewrites `snapshots/`.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from megafp8.device.node_check_ranks import NUM_CHECK_PORTS
from megafp8.errors import ConfigError
from megafp8.launch import slurm, torchrun
from megafp8.launch.job import Job, split_words

SNAPSHOTS = Path(__file__).with_name("snapshots")
ROOT = Path(__file__).resolve().parents[3]

ONE = Job(
    name="llama-1b", project="/shared/megafp8", time="1-00:00:00", partition="gpu", account="mine", venv=".venv",
    training=split_words(
        "--model-preset llama-1b --seq-length 2048 --bf16 --fp8-format hybrid --fp8-recipe tensorwise --lr 4e-4 "
        "--micro-batch-size 8 --global-batch-size 512 --train-iters 27000 --data-path data/fineweb_text_document "
        "--tokenizer-type HuggingFaceTokenizer --tokenizer-model data/tokenizer "
        "--save runs/llama-1b --load runs/llama-1b"
    ),
)  # fmt: skip
CPU = dataclasses.replace(ONE, gpus_per_node=0, ranks_per_node=4, cpus_per_node=4, exclusive=False, check_nodes=False)
JOBS = {
    "one_node.sbatch": ONE,
    "four_nodes.sbatch": dataclasses.replace(
        ONE, nodes=4, setup="module purge\nmodule load cuda/12.9",
        environment={"NCCL_IB_HCA": "mlx5", "TAG": "it's me"},
        sbatch={"qos": "high", "comment": "two words", "overcommit": ""},
    ),
    "pyxis.sbatch": dataclasses.replace(ONE, nodes=2, container="nvcr.io#nvidia/pytorch:26.01-py3", mounts=("/data",)),
    "apptainer.sbatch": dataclasses.replace(ONE, container="images/pytorch.sif", mounts=("/data",)),
    "array.sbatch": dataclasses.replace(
        CPU, logs="runs/study/logs", array_limit=2,
        runs=tuple(("--lr", rate, "--save", f"runs/study/lr {rate}", "--load", f"runs/study/lr {rate}")
                   for rate in ("1e-3", "2e-3", "4e-3")),
    ),
    "preprocess.sbatch": dataclasses.replace(
        CPU, training=(), logs="runs/text/logs", parts=4, array_limit=2, container="images/pytorch.sif",
        preprocess=split_words("--input 'text/*.jsonl' --output-prefix data/text --tokenizer-type ByteLevelTokenizer"),
    ),
    "one_machine.sh": ONE,
    "two_machines.sh": dataclasses.replace(ONE, nodes=2, endpoint="first:29500"),
}  # fmt: skip


def script(name: str) -> str:
    return (slurm if name.endswith(".sbatch") else torchrun).script(JOBS[name])


@pytest.mark.parametrize("name", JOBS)
def test_scripts_equal_their_snapshots(name: str, request: pytest.FixtureRequest) -> None:
    path = SNAPSHOTS / name
    if request.config.getoption("--write-snapshots"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(script(name))
    assert script(name) == path.read_text()


def test_every_snapshot_is_used() -> None:
    assert {path.name for path in SNAPSHOTS.iterdir()} == set(JOBS)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed (Debian: shellcheck)")
def test_shell_scripts_pass_shellcheck() -> None:
    """Every shell script of the project, and the generated ones."""
    listed = [path for folder in (ROOT, *(ROOT / name for name in ("examples", "launcher", "tests", "tools", ".ci")))
              for path in folder.rglob("*.sh") if ".venv" not in path.parts]  # fmt: skip
    files = sorted({*listed, ROOT / ".ci/run", *SNAPSHOTS.iterdir()})
    assert len(files) > 15
    # SC1091: a virtual environment is elsewhere. SC2016: quoted text is for the nodes to expand.
    found = subprocess.run(["shellcheck", "--exclude=SC1091,SC2016", *map(str, files)], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr


def directives(name: str) -> dict[str, str]:
    words = (line.removeprefix("#SBATCH --") for line in script(name).splitlines() if line.startswith("#SBATCH"))
    return dict(word.partition("=")[::2] for word in words)


def test_the_time_limit_warning_leaves_time_to_save() -> None:
    job = dataclasses.replace(ONE, time_to_save_s=900)
    text = slurm.script(job)
    assert "#SBATCH --signal=USR1@960" in text and "export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=900" in text
    assert "--least-time-s 1020" in text  # a minute more, as Slurm may send it early


def test_node_check_time_does_not_depend_on_the_save_time() -> None:
    for time_to_save_s in (10, 3600):
        text = slurm.script(dataclasses.replace(ONE, time_to_save_s=time_to_save_s))
        assert "SLURM_WAIT=600 " in text and f"export SLURM_WAIT={time_to_save_s + 60}\n" in text


def test_jobs_of_adjacent_numbers_have_different_ports() -> None:
    check, meeting = re.findall(r"\$\(\((\d.+?)\)\)", script("four_nodes.sbatch"))
    jobs = [{"SLURM_JOB_ID": number} for number in range(4_199_950, 4_200_050)]
    ports = [eval(meeting, job) for job in jobs]  # the shell's arithmetic equals Python's here
    ports += [eval(check, job) + port for job in jobs for port in range(NUM_CHECK_PORTS)]
    assert len({*ports}) == len(ports) and min(ports) >= 10_000 and max(ports) < 32_768


def test_words_survive_the_shell(tmp_path: Path) -> None:
    """Flags of an array's task that contain a space come out of bash unchanged."""
    text = script("array.sbatch")
    flags = text[text.index("training=(") : text.index("# Prefix of commands")]
    ended = subprocess.run(
        ["bash", "-euc", f'{flags}printf "%s\\n" "${{training[@]}}"'], env={"SLURM_ARRAY_TASK_ID": "1"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert tuple(ended.stdout.splitlines()) == JOBS["array.sbatch"].commands[1]
    assert directives("array.sbatch")["array"] == "0-2%2"


# Replaces srun and every Python: records the arguments, without Slurm.
STANDINS = {
    "srun": 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"',
    "scontrol": "echo n7",
    "python3": """case $1 in
  launcher/supervise.py) while [ "$1" != -- ]; do shift; done; shift; exec "$@" ;;
  -m) printf '%s\n' "$PET_LOG_DIR" "$TAG" "$PET_LOCAL_ADDR $PET_RDZV_CONF" "$@" ;;
  *) printf '%s\n' "$@" >> checked ;;
esac""",
}


@pytest.mark.parametrize("nodes", [1, 2])
def test_spaces_and_quotes_survive_the_scripts(nodes: int, tmp_path: Path) -> None:
    """Folders and values with spaces and quotes, through every command of the script."""
    folder = "runs/it's a run"
    training = ("--save", folder, "--load", folder, "--split", "99,1,0", "--data-path", "$HOME", "-1e-3")
    project = tmp_path / "a project"
    for name, text in STANDINS.items():
        path = project / "bin" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/usr/bin/env bash\n{text}\n")
        path.chmod(0o755)
    job = Job(name="a", training=training, nodes=nodes, project=str(project), environment={"TAG": "\"$x\" 'y'"})
    script = tmp_path / "job.sbatch"
    script.write_text(slurm.script(job))
    environment = {"PATH": f"{project}/bin:/usr/bin:/bin", "SLURMD_NODENAME": "n7", "SLURM_JOB_ID": "41",
                   "SLURM_JOB_NODELIST": "n7", "SLURM_NNODES": str(nodes), "NVTE_FUSED_ATTN": "0"}  # fmt: skip
    ended = subprocess.run(["bash", str(script)], env=environment, capture_output=True, text=True, timeout=20)
    assert ended.returncode == 0, ended.stderr
    log_folder, tag, _, *words = ended.stdout.splitlines()
    assert log_folder == f"{folder}/logs/ranks/n7" and tag == job.environment["TAG"]
    assert tuple(words[words.index("pretrain_gpt.py") + 1 :]) == training
    assert ("n7:10041" in words) == (nodes > 1)
    checked = (project / "checked").read_text().splitlines()
    assert checked.count(f"{folder}/logs/nodes/41-0") == 2 and checked.count("24100") == 2


# Approximately as Slurm prints them.
NODES = """case $2 in
  hostnames) printf '%s\n' n7 n9 ;;
  node) for name in 7 9; do echo "NodeName=n$name NodeAddr=10.0.0.$name NodeHostName=host$name Port=1 "; done ;;
esac"""


@pytest.mark.parametrize("number", [0, 1])
def test_node_0_hosts_the_rendezvous_at_its_address(number: int, tmp_path: Path) -> None:
    for name, text in (STANDINS | {"scontrol": NODES}).items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/usr/bin/env bash\n{text}\n")
        path.chmod(0o755)
    job = Job(name="a", training=("--save", "run", "--load", "run"), nodes=2, project=str(tmp_path))
    environment = {
        "PATH": f"{tmp_path}/bin:/usr/bin:/bin", "SLURMD_NODENAME": f"n{7 + 2 * number}", "SLURM_JOB_ID": "41",
        "SLURM_JOB_NODELIST": "n[7,9]", "SLURM_NNODES": "2", "SLURM_NODEID": str(number),
    }  # fmt: skip
    ended = subprocess.run(["bash", "-c", slurm.script(job)], env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    _, _, variables, *words = ended.stdout.splitlines()
    assert variables == f"10.0.0.{7 + 2 * number} is_host={1 - number}"
    assert "10.0.0.7:10041" in words
    checked = (tmp_path / "checked").read_text().splitlines()
    assert checked[checked.index("--nodes") :][:6] == ["--nodes", "n7", "n9", "--addresses", "10.0.0.7", "10.0.0.9"]


def test_a_job_that_slurm_put_back_too_often_ends(tmp_path: Path) -> None:
    text = slurm.script(dataclasses.replace(ONE, project=str(tmp_path), max_requeues=2))
    head = text[: text.index("cd ")] + "exit 0\n"
    for restarts, status in ((2, 0), (3, 70)):
        ended = subprocess.run(["bash", "-c", head], env={"SLURM_RESTART_COUNT": str(restarts)}, capture_output=True)
        assert ended.returncode == status


def test_a_jobs_own_variables_and_options_take_precedence() -> None:
    job = dataclasses.replace(ONE, environment={"NCCL_DEBUG": "INFO"}, sbatch={"mem": "100G"})
    text = slurm.script(job)
    assert "export NCCL_DEBUG=INFO" in text and "NCCL_DEBUG=WARN" not in text
    assert "#SBATCH --mem=100G" in text and "--mem=0" not in text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"runs": (("--save", "a", "--load", "a"),), "logs": "logs"}, "job arrays need Slurm"),
        ({"container": "image.sif"}, "start the script inside the container"),
        ({"nodes": 2}, "endpoint is missing"),
        ({"nodes": 2, "endpoint": "first:29500", "max_restarts": 2}, "max_restarts: 2: automatic restarts"),
    ],
)
def test_jobs_that_need_slurm_are_refused_with_torchrun(change: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        torchrun.script(dataclasses.replace(ONE, **change))


def test_without_sbatch_the_error_names_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    path = tmp_path / "job.sbatch"
    path.write_text(f"#SBATCH --output={tmp_path}/logs/%j.log\n")
    with pytest.raises(ConfigError, match="login node"):
        slurm.submit(path)
    assert (tmp_path / "logs").is_dir()
