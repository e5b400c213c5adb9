"""Every example plans a run on any machine, and starts what its comments document."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from forked_script import run_script

from megafp8.cli import precision_table, run_comparison
from megafp8.config import flags, rules
from megafp8.config.model_shapes import PRESETS
from megafp8.config.schema import RunConfig
from megafp8.recipes import registry

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ("pretrain_llama_1b", "pretrain_gpt2_124m", "pretrain_llama3_8b_multinode")
# Files that the examples take from the environment. One file serves for all.
FILES = ("TOKENIZER_MODEL", "VOCAB_FILE", "MERGE_FILE")
CLUSTER = ("NNODES", "NODE_RANK", "MASTER_ADDR", "SLURM_NNODES", "SLURM_NODEID", "SLURM_JOB_NODELIST")


def run_example(name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """Run an example in an environment with only the given variables."""
    removed = {"DATA_PATH", "TOKENIZER_TYPE", "SAVE", "GPUS_PER_NODE", "MASTER_PORT", "PYTHON", *FILES, *CLUSTER}
    removed |= {"HF_MODEL", "CONVERTED"}
    inherited = {key: value for key, value in os.environ.items() if key not in removed}
    return subprocess.run(
        ["bash", str(ROOT / "examples" / f"{name}.sh"), *arguments],
        capture_output=True, text=True, cwd="/", timeout=120, env=inherited | environment,
    )  # fmt: skip


@pytest.fixture(scope="module")
def stub_python(tmp_path_factory) -> str:
    """A program in place of Python that prints its arguments, one shell word each."""
    path = tmp_path_factory.mktemp("bin") / "python"
    path.write_text("#!/usr/bin/env bash\nprintf '%q ' \"$@\"\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, str]:
    """The environment of a run on shards. Rules only check that the files exist."""
    folder = tmp_path_factory.mktemp("data")
    for name in ("text.bin", "text.idx", "tokenizer"):
        (folder / name).touch()
    return {"DATA_PATH": f"{folder}/text", "SAVE": f"{folder}/run"} | dict.fromkeys(FILES, f"{folder}/tokenizer")


def words_of(result: subprocess.CompletedProcess) -> tuple[list[str], list[str]]:
    """The launcher's words and the flags of pretrain_gpt.py."""
    assert result.returncode == 0, result.stderr
    words = shlex.split(result.stdout)
    index = words.index("pretrain_gpt.py")
    return words[:index], words[index + 1 :]


def test_every_example_is_tested() -> None:
    names = {path.stem for path in (ROOT / "examples").glob("*.sh")}
    assert names == {
        *EXAMPLES,
        "finetune_llama3_8b",
        "quickstart",
        "compare_recipes",
        "compare_recipes_h200",
        "loss_report_h200",
        "precision_table",
        "stability",
    }


def test_a_model_of_transformers_is_converted_once_and_trained(data, stub_python, tmp_path: Path) -> None:
    settings = {name.removeprefix("model."): value for name, value in PRESETS["llama3-8b"].items()}
    converted = tmp_path / "converted"
    environment = {"HF_MODEL": "theirs", "CONVERTED": str(converted), "GPUS_PER_NODE": "8", "PYTHON": stub_python}
    before, _ = words_of(run_example("finetune_llama3_8b", **environment, **data))
    assert before[:4] == ["tools/convert_checkpoint.py", "from-hf", "theirs", str(converted)]
    converted.mkdir()
    found = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": data["TOKENIZER_MODEL"]}
    (converted / "config.json").write_text(json.dumps({"model": settings, "data": found}))
    before, words = words_of(run_example("finetune_llama3_8b", **environment, **data))
    assert before[:2] == ["-m", "torch.distributed.run"]
    config = flags.parse(words).config
    assert rules.problems(config, 8) == []
    assert config.model.rotary_base == 500_000 and config.checkpoint.pretrained_checkpoint == str(converted)
    refused = run_example("finetune_llama3_8b", **environment | {"HF_MODEL": ""}, **data)
    assert refused.returncode != 0 and "HF_MODEL: is not set" in refused.stderr


@pytest.mark.parametrize("name", EXAMPLES)
def test_dry_run_plans_a_cluster_on_this_machine(name: str, stub_python: str) -> None:
    """One runs as a user starts it. For the others, pretrain_gpt.py runs in a process that has its imports."""
    arguments = ("--dry-run", "--world-size", "64", "--target", "h200")
    if name == EXAMPLES[0]:
        result = run_example(name, *arguments, PYTHON=sys.executable)
    else:
        result = run_script("pretrain_gpt.py", *words_of(run_example(name, *arguments, PYTHON=stub_python))[1])
    assert result.returncode == 0, result.stderr
    for part in ("layout: 64 x h200, transformer_engine layers", "parameters (", "GiB", "speed, predicted: ", "bf16"):
        assert part in result.stdout
    assert len(result.stdout.splitlines()) < 60


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("world_size", [8, 64])
def test_a_run_on_shards_breaks_no_rule(name: str, world_size: int, data, stub_python) -> None:
    _, words = words_of(run_example(name, PYTHON=stub_python, GPUS_PER_NODE="8", **data))
    config = flags.parse(words).config
    assert rules.problems(config, world_size) == []
    assert config.data.data_path == (data["DATA_PATH"],)
    assert config.checkpoint.save == config.checkpoint.load == data["SAVE"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_arguments_override_the_examples_flags(name: str, data, stub_python) -> None:
    arguments = ("--train-iters", "10", "--fp8-format", "e4m3", "--fp8-recipe", "tensorwise")
    _, words = words_of(run_example(name, *arguments, PYTHON=stub_python, GPUS_PER_NODE="8", **data))
    config = flags.parse(words).config
    assert (config.training.train_iters, config.precision.fp8_format) == (10, "e4m3")
    assert rules.problems(config, 8) == []


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_blend_of_shards(name: str, data, stub_python) -> None:
    blend = f"0.3 {data['DATA_PATH']} 0.7 {data['DATA_PATH']}"
    _, words = words_of(run_example(name, PYTHON=stub_python, GPUS_PER_NODE="8", **data | {"DATA_PATH": blend}))
    assert flags.parse(words).config.data.data_path == tuple(blend.split())


@pytest.mark.parametrize("name", EXAMPLES)
def test_runs_on_mock_data_save_nothing(name: str, stub_python) -> None:
    _, words = words_of(run_example(name, PYTHON=stub_python, GPUS_PER_NODE="8"))
    config = flags.parse(words).config
    assert config.data.mock_data
    assert config.checkpoint.save is None


@pytest.mark.parametrize("name", EXAMPLES)
def test_shards_without_a_tokenizer_are_one_error(name: str, data, stub_python) -> None:
    result = run_example(name, PYTHON=stub_python, DATA_PATH=data["DATA_PATH"])
    assert result.returncode != 0
    assert "is not set" in result.stderr and not result.stdout


@pytest.mark.parametrize("name", EXAMPLES)
def test_only_a_real_run_is_launched(name: str, stub_python) -> None:
    real, _ = words_of(run_example(name, PYTHON=stub_python, GPUS_PER_NODE="4"))
    assert real[:2] == ["-m", "torch.distributed.run"]
    assert real[real.index("--nproc-per-node") + 1] == "4"
    dry, words = words_of(run_example(name, "--dry-run", PYTHON=stub_python, GPUS_PER_NODE="4"))
    assert dry == []
    assert flags.parse(words).dry_run


@pytest.mark.parametrize("name", [*EXAMPLES, "finetune_llama3_8b"])
def test_torchrun_need_not_warn_that_it_sets_the_threads(name: str, data: dict[str, str], tmp_path: Path) -> None:
    stub = tmp_path / "python"
    stub.write_text('#!/usr/bin/env bash\necho "threads: ${OMP_NUM_THREADS:-not set}"\n', encoding="utf-8")
    stub.chmod(0o755)
    environment = data | {"PYTHON": str(stub), "HF_MODEL": "theirs", "CONVERTED": str(tmp_path)}
    for ranks, given, expected in (("8", "", "1"), ("8", "4", "4"), ("1", "", "not set")):
        result = run_example(name, **environment, GPUS_PER_NODE=ranks, OMP_NUM_THREADS=given)
        assert result.stdout == f"threads: {expected}\n", result.stderr


@pytest.mark.parametrize(
    "environment",
    [
        {"NNODES": "8", "NODE_RANK": "3", "MASTER_ADDR": "first"},
        {"SLURM_NNODES": "8", "SLURM_NODEID": "3", "MASTER_ADDR": "first"},
    ],
)
def test_machines_rendezvous(environment: dict[str, str], stub_python) -> None:
    launcher, _ = words_of(run_example("pretrain_llama3_8b_multinode", PYTHON=stub_python, **environment))
    found = dict(zip(launcher[2::2], launcher[3::2], strict=True))
    assert found == {
        "--nproc-per-node": "8", "--nnodes": "8", "--node-rank": "3", "--master-addr": "first",
        "--master-port": "29500",
    }  # fmt: skip


REPORT_RUNS = [
    *(("small", recipe) for recipe in ("bf16", "bf16-control", "delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4")),
    *(("large", recipe) for recipe in ("bf16", "delayed", "tensorwise")),
    *(("mixture", recipe) for recipe in ("bf16", "delayed", "tensorwise")),
    *(("explain", recipe) for recipe in ("delayed-te-start", "delayed-no-graph", "bf16-no-graph")),
]


@pytest.mark.parametrize(("size", "recipe"), REPORT_RUNS)
def test_the_runs_of_the_loss_report_are_accepted(size: str, recipe: str, stub_python: str, tmp_path: Path) -> None:
    """Every command that it documents passes the rules of a run on an H200."""
    config = loss_report_config([size, recipe, "2"], stub_python, tmp_path)
    assert config.training.seed == 2 and config.training.global_batch_size * config.data.seq_length == 65_536
    problems = [problem for problem in rules.problems(config, 1) if "/nowhere/" not in problem]
    assert problems == []
    is_small = config.training.micro_batch_size == 16
    assert is_small == (recipe == "bf16-control" or size == "mixture")


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_levels_of_the_loss_report_have_two_ranks(level: str, stub_python: str, tmp_path: Path) -> None:
    config = loss_report_config(["small", level, "1"], stub_python, tmp_path, GPUS="2")
    assert config.precision.fp8_lm_level == level
    assert [problem for problem in rules.problems(config, 2) if "/nowhere/" not in problem] == []


def test_a_loss_report_can_be_shortened(stub_python: str, tmp_path: Path) -> None:
    config = loss_report_config(["small", "bf16-control", "1", "--eval-iters", "3"], stub_python, tmp_path,
                                STEPS="40", BATCH="8")  # fmt: skip
    training = config.training
    assert (training.train_iters, training.global_batch_size, training.micro_batch_size) == (40, 8, 4)
    assert (training.eval_interval, training.eval_iters) == (2, 3)


def test_records_of_a_loss_report_travel_and_its_queue_leaves_them_out(stub_python: str, tmp_path: Path) -> None:
    for recipe, state in (("bf16", "done"), ("delayed", "stopped")):
        run = tmp_path / "report/small" / recipe / "seed1"
        (run / "iter_0000020").mkdir(parents=True)
        (run / "run_state.json").write_text(f'{{"state": "{state}"}}', encoding="utf-8")
        for name in ("config.json", "records.jsonl"):
            (run / name).write_text("{}", encoding="utf-8")
    assert loss_report(["records"], stub_python, tmp_path).returncode == 0
    with tarfile.open(tmp_path / "report/records.tar.gz") as packed:
        packed.extractall(tmp_path / "other", filter="data")
        names = {Path(name).name for name in packed.getnames()}
    assert names == {"config.json", "run_state.json", "records.jsonl"}
    for recipes, code in (("bf16", 0), ("bf16 delayed", 75)):  # the stub leaves no run that is done
        done = loss_report(["queue", "small", recipes, "1"], stub_python, tmp_path, OUT="other")
        assert done.returncode == code and ("pretrain_gpt.py" in done.stdout) == (code != 0), done.stderr
    assert loss_report(["queue", "small", "delayed", "1"], stub_python, tmp_path, QUEUE_MINUTES="-1").stdout == ""
    with (tmp_path / "report/small/delayed/seed1/queue.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        other = loss_report(["queue", "small", "delayed", "1"], stub_python, tmp_path)
    assert (other.returncode, other.stdout) == (75, ""), "another queue has the run"


def loss_report(
    arguments: list[str], stub_python: str, folder: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Call the loss report with a program in place of Python."""
    if not (folder / "tools").exists():
        (folder / "examples").symlink_to(ROOT / "examples")
        (folder / "tools").mkdir()
        (folder / "tools/setup_venv.sh").write_text("export PYTHON\n", encoding="utf-8")
    return subprocess.run(
        ["bash", "examples/loss_report_h200.sh", *arguments], cwd=folder, capture_output=True, text=True,
        timeout=60, env=os.environ | {"PYTHON": stub_python, "OUT": "report"} | environment,
    )  # fmt: skip


def loss_report_config(arguments: list[str], stub_python: str, folder: Path, **environment: str) -> RunConfig:
    """The settings of a run of the loss report."""
    done = loss_report(arguments, stub_python, folder, **environment)
    assert done.returncode == 75, done.stderr  # the stub leaves no run that is done
    words = [word.replace("report/", "/nowhere/") for word in words_of_script(done.stdout)]
    return flags.parse(words).config


def words_of_script(text: str) -> list[str]:
    """The flags of pretrain_gpt.py that the program in place of Python printed."""
    words = shlex.split(text)
    return words[words.index("pretrain_gpt.py") + 1 :]


def words_of_example(name: str, folder: Path, environment: dict[str, str]) -> list[str]:
    """What the program in place of Python printed for an example that makes no environment."""
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "tools").mkdir()
    (folder / "tools/setup_venv.sh").write_text("export PYTHON\n", encoding="utf-8")
    done = subprocess.run(
        ["bash", f"examples/{name}.sh", "runs"], cwd=folder, capture_output=True, text=True, timeout=60,
        env=os.environ | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return shlex.split(done.stdout)


@pytest.mark.parametrize("name", ["precision_table", "compare_recipes_h200", "compare_recipes"])
def test_words_after_the_folder_are_refused(name: str, stub_python: str, tmp_path: Path) -> None:
    refused = subprocess.run(
        ["bash", str(ROOT / f"examples/{name}.sh"), str(tmp_path / "out"), "--lr", "1"],
        capture_output=True, text=True, timeout=60, env=os.environ | {"PYTHON": stub_python},
    )  # fmt: skip
    assert refused.returncode == 64 and refused.stderr == f"usage: bash examples/{name}.sh [FOLDER]\n"
    assert not (tmp_path / "out").exists()


def test_the_table_of_precisions_is_accepted(stub_python: str, tmp_path: Path) -> None:
    """Its flags pass the command's parser, and with each precision the rules of a run on an H200; no search is due."""
    words = words_of_example("precision_table", tmp_path, {"PYTHON": stub_python, "MEMORY_LIMIT": "4"})
    options = precision_table.build_parser().parse_args(words[words.index("tools/precision_table.py") + 1 :])
    assert options.search_batch == 512 and options.memory_limit == 4
    for name in precision_table.default_precisions(["tensorwise", "delayed", "blockwise"]):
        own = [] if name == "fp32" else ["--bf16"]
        if name in registry.names():
            recipe = registry.get(name)
            own += [f"--{recipe.family}-format", recipe.default_format, f"--{recipe.family}-recipe", name]
        files = ["--vocab-size", "16384", "--dry-run", "--target", "h200", "--world-size", "1"]
        planned = run_script("pretrain_gpt.py", *options.flags, *own, *files)
        assert planned.returncode == 0, f"{name}: {planned.stderr}"


def test_the_comparison_on_gpus_is_accepted(stub_python: str, tmp_path: Path) -> None:
    """Its flags pass the comparison's parser, and with each recipe the rules of a run on an H200."""
    words = words_of_example("compare_recipes_h200", tmp_path, {"PYTHON": stub_python, "PARALLEL": "1"})
    options = run_comparison.build_parser().parse_args(words[words.index("tools/run_comparison.py") + 1 :])
    for recipe in options.recipes.split(","):
        precision = [] if recipe.startswith("bf16") else ["--fp8-format", "hybrid", "--fp8-recipe", recipe]
        files = ["--vocab-size", "32000", "--dry-run", "--target", "h200", "--world-size", "1"]
        planned = run_script("pretrain_gpt.py", *options.flags, "--bf16", *precision, *files)
        assert planned.returncode == 0, planned.stderr


def test_a_transformers_model_is_trained_in_two_precisions() -> None:
    pytest.importorskip("transformers")
    done = run_script("examples/quantize_transformers_model.py", "--steps", "3")
    assert done.returncode == 0, done.stderr
    replaced, _, header, *rows = done.stdout.splitlines()
    assert replaced == "14 layers quantized, 1 skipped" and header.split() == ["step", "plain", "nvfp4"]
    first, *_, last = ([float(cell) for cell in row.split()[1:]] for row in rows)
    assert len(rows) == 3 and all(after < before - 0.5 for before, after in zip(first, last, strict=True))
    assert 0 < abs(last[0] - last[1]) < 0.2
