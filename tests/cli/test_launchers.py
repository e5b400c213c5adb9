"""The launchers as a user runs them: every example job as a script and as a plan, wrong jobs, and a run by torchrun.sh.
What Slurm does with the scripts is in tests/faults/test_slurm.py."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from benchmarks.ports import free_ports
from megafp8.cli import kubernetes, slurm, torchrun
from megafp8.cli.job_options import read_arguments
from megafp8.config import flags
from megafp8.launch.job import Job

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples/jobs").glob("*.yaml"))
RUN = "--model-preset tiny --seq-length 16 --micro-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data " \
    "--tokenizer-type NullTokenizer --vocab-size 63"  # fmt: skip


@pytest.fixture(scope="module")
def launcher():
    return slurm


def test_there_is_an_example_of_each_kind() -> None:
    assert {path.stem for path in EXAMPLES} >= {
        "llama_1b_one_node", "llama3_8b_multi_node", "learning_rates", "fineweb_edu_h200", "blackwell_mxfp8",
        "blackwell_nvfp4", "preprocess", "kubernetes_llama3_8b",
    }  # fmt: skip


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_a_valid_script_and_a_plan_that_fits(example: Path, launcher, tmp_path: Path, capsys) -> None:
    from megafp8.planning.dry_run import describe_run
    from megafp8.training.checks import check

    assert launcher.main([str(example), "--partition", "gpu", "--dry-run"]) == 0
    script = tmp_path / "job.sbatch"
    script.write_text(capsys.readouterr().out)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "--exclude=SC1091,SC2016", str(script)], check=True)
    _, job = read_arguments(launcher.build_parser(), [str(example)])
    for name in ("text.bin", "text.idx", "tokenizer"):
        (tmp_path / name).touch()
    target = "b200" if example.stem.startswith("blackwell") else "h200"
    data = ["--data-path", f"{tmp_path}/text", "--tokenizer-type", "NullTokenizer", "--vocab-size", "50303"]
    for words in job.commands if job.training else ():
        planned = [*words, *data, "--dry-run", "--world-size", str(job.world_size), "--target", target]
        text = describe_run(check(*flags.parse_with_problems(planned))).text
        assert f"layout: {job.world_size} x {target}, transformer_engine layers" in text
        assert len(text.splitlines()) < 60
        needed = [float(line.partition("GiB")[0].split()[-1]) for line in text.splitlines() if " stage: " in line]
        assert needed and max(needed) < 0.8 * (180 if target == "b200" else 141)


def test_one_job_file_is_a_script_and_a_manifest(launcher, tmp_path: Path, capsys) -> None:
    """Each launcher names the fields that it does not use."""
    example, path = str(ROOT / "examples/jobs/kubernetes_llama3_8b.yaml"), tmp_path / "job.yaml"
    assert kubernetes.main([example, "--partition", "gpu", "--output", str(path)]) == 0
    assert capsys.readouterr().err == "notice: not used by Kubernetes: partition\n"
    assert [each["kind"] for each in yaml.safe_load_all(path.read_text())] == ["TrainingRuntime", "TrainJob"]
    own = ["--kind", "jobset", "--rdma", "rdma/ib=4", "--node-selector", "zone=a"]
    assert kubernetes.main([example, *own]) == 0
    told = capsys.readouterr().out
    assert "kind: JobSet\n" in told and "rdma/ib: 4\n" in told and 'zone: "a"\n' in told
    assert kubernetes.main([example, "--rdma", "rdma/ib"]) == 64
    assert "--rdma rdma/ib: RESOURCE=N" in capsys.readouterr().err
    assert launcher.main([example, "--dry-run"]) == 0
    assert capsys.readouterr().err == "notice: not used by Slurm: image, claim, namespace, rdma, node_selector\n"


def test_every_job_field_is_an_option_and_documented(launcher) -> None:
    fields = {field.name for field in dataclasses.fields(Job)}
    options = {action.dest for action in launcher.build_parser()._actions}
    assert fields - options == {"training", "runs", "preprocess"}
    document = (ROOT / "docs/clusters.md").read_text()
    rows = document[document.index("| field | meaning |") :].split("\n\n")[0].splitlines()[2:]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])} == fields


def test_flags_are_checked_before_anything_is_submitted(launcher, capsys) -> None:
    words = f"{RUN} --tensor-model-parallel-size 3 --save a --load a --hidden-sise 4".split()
    assert launcher.main(["--name", "first", "--nodes", "2", "--", *words]) == 64
    told = capsys.readouterr().err
    assert "world size 16 is not a multiple" in told and "unknown flag --hidden-sise" in told


def test_a_script_is_written_and_submitted(launcher, tmp_path: Path, monkeypatch, capsys) -> None:
    sbatch = tmp_path / "sbatch"
    sbatch.write_text('#!/bin/sh\ncp "$2" submitted\necho "17;cluster"\n')
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    words = f"{RUN} --save run --load run".split()
    own = ["--name", "first", "--project", str(tmp_path), "--environment", "A=b=c", "--sbatch", "qos=high"]
    assert launcher.main([*own, "--", *words]) == 0
    path = tmp_path / "run/logs/first.sbatch"
    assert capsys.readouterr().out == f"{path}: job 17\n"
    text = (tmp_path / "submitted").read_text()
    assert text == path.read_text()
    assert "export A=b=c" in text and "#SBATCH --qos=high" in text


def test_preprocessing_is_submitted_as_an_array_and_a_merge(launcher, tmp_path: Path, monkeypatch, capsys) -> None:
    sbatch = tmp_path / "sbatch"
    sbatch.write_text('#!/bin/sh\necho "$@" >> calls\nwc -l < calls\n')
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    example = [str(ROOT / "examples/jobs/preprocess.yaml"), "--project", str(tmp_path)]
    assert launcher.main([*example, "--parts", "3", "--", "--workers", "4"]) == 0
    path = tmp_path / "runs/fineweb-edu-shards/logs/fineweb-edu-shards.sbatch"
    assert capsys.readouterr().out == f"{path}: job 1\nmerge of the parts: job 2, after job 1\n"
    array, merge = (tmp_path / "calls").read_text().splitlines()
    assert array == f"--parsable {path}"
    assert merge == f"--parsable --array=0 --dependency=afterok:1 --kill-on-invalid-dep=yes {path}"
    assert "#SBATCH --array=1-3" in path.read_text() and "--workers 4" in path.read_text()

    assert launcher.main([*example, "--", "--workers", "0"]) == 64
    assert "--workers 0 is less than 1" in capsys.readouterr().err
    assert torchrun.main(example) == 64
    assert "preprocess: 16 parts need Slurm; on one machine run megafp8 preprocess" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["nowhere.yaml"], ["--name", "a b"], []])
def test_wrong_jobs_are_reported_without_a_traceback(arguments: list[str], launcher, capsys) -> None:
    assert launcher.main(arguments) == 64
    assert capsys.readouterr().err.startswith("ConfigError: ")


def start_torchrun_sh(project: Path, *options: str) -> subprocess.Popen:
    """Two ranks of a stand-in for training, in its own checkout."""
    for name, target in (("launcher", "launcher"), ("pretrain_gpt.py", "tests/standin_training.py")):
        if not (project / name).exists():
            (project / name).symlink_to(ROOT / target)
    own = ["--name", "first", "--project", str(project), "--gpus-per-node", "0", "--ranks-per-node", "2", *options]
    setup = ["--setup", f"export PATH={Path(sys.executable).parent}:$PATH", "--environment", f"PYTHONPATH={ROOT}"]
    words = f"{RUN} --save run --load run".split()
    return subprocess.Popen(
        ["bash", "launcher/torchrun.sh", *own, *setup, "--", *words], cwd=ROOT, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env={name: value for name, value in os.environ.items() if name != "PYTHON"},
    )  # fmt: skip


def seen(project: Path) -> list[dict]:
    """What each rank recorded."""
    return [json.loads(path.read_text()) for path in sorted((project / "run").glob("seen*"))]


@pytest.mark.long
def test_torchrun_sh_on_two_machines(tmp_path: Path) -> None:
    """Both are this machine here. They meet at the endpoint."""
    options = ["--nodes", "2", "--endpoint", f"localhost:{free_ports(1)[0]}"]
    both = [start_torchrun_sh(tmp_path, *options) for _ in range(2)]
    told = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    assert sorted(words["words"][-1] for words in seen(tmp_path)) == ["run"] * 4


@pytest.mark.slow
def test_torchrun_sh_runs_each_rank_with_a_log_of_its_own(tmp_path: Path) -> None:
    process = start_torchrun_sh(tmp_path)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, output + errors
    assert "rank 0 of 2" in output and "finished" in errors
    assert len(seen(tmp_path)) == 2
    logs = sorted((tmp_path / "run/logs/ranks" / socket.gethostname()).rglob("stdout.log"))
    assert [path.read_text() for path in logs] == ["rank 0 of 2\n", "rank 1 of 2\n"]


def test_torchrun_on_one_machine_runs_without_a_folder(launcher, capsys) -> None:
    """Nothing restarts it. Slurm and several machines resume from the folder, and so do restarts."""
    own, training = ["--name", "a", "--gpus-per-node", "2", "--dry-run"], ["--", *RUN.split()]
    assert torchrun.main([*own, *training]) == 0
    script = capsys.readouterr().out
    assert 'exec "${torchrun[@]}"' in script and "supervise" not in script
    assert torchrun.main([*own, *training, "--save", "b", "--load", "b"]) == 0
    assert "supervise" in capsys.readouterr().out
    several = ["--nodes", "2", "--endpoint", "first:29500"]
    for wrong in (
        [*own, *training, "--save", "b"], [*own, *several, *training], [*own, "--max-restarts", "2", *training],
    ):  # fmt: skip
        assert torchrun.main(wrong) == 64
        text = capsys.readouterr().err
        assert "--save" in text and "None" not in text
    assert launcher.main([*own, *training]) == 64
    assert "no --save and no --load: must be the same folder" in capsys.readouterr().err


def test_torchrun_names_fields_of_slurm_only(launcher, capsys) -> None:
    own = ["--name", "a", "--gpus-per-node", "0", "--dry-run"]
    slurms = ["--time", "1:00:00", "--partition", "gpu", "--sbatch", "qos=high", "--shared-nodes"]
    training = ["--", *RUN.split(), "--save", "runs/a", "--load", "runs/a"]
    assert torchrun.main([*own, *slurms, *training]) == 0
    told = capsys.readouterr()
    assert told.err == "notice: not used without Slurm: exclusive, time, partition, sbatch\n"
    assert told.out.startswith("#!/usr/bin/env bash")
    assert launcher.main([*own, *slurms, *training]) == torchrun.main([*own, *training]) == 0
    assert not capsys.readouterr().err


@pytest.mark.parametrize(("visible", "words", "ranks"), [("0,1,2", [], 3), ("", [], 1), ("0,1,2", ["job.yaml"], 2)])
def test_torchrun_starts_a_rank_on_each_gpu_of_this_machine(
    visible: str, words: list[str], ranks: int, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text("name: mine\ngpus_per_node: 2\n")
    training = f"--global-batch-size 6 {RUN} --save runs/a --load runs/a".split()
    assert torchrun.main([*words, "--dry-run", "--", *training]) == 0
    assert f"torch.distributed.run --nproc-per-node {ranks} " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--environment", "FOO", "--"], "--environment FOO: NAME=VALUE"),
        (["--", "--dry-run"], "--dry-run among the flags of training"),
    ],
)
def test_misleading_jobs_are_refused(words: list[str], told: str, launcher, capsys) -> None:
    training = [*RUN.split(), "--global-batch-size", "8", "--save", "runs/a", "--load", "runs/a"]
    assert launcher.main(["--name", "a", "--dry-run", *words, *training]) == 64
    assert told in capsys.readouterr().err
