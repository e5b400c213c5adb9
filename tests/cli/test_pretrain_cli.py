"""The command line of pretrain_gpt.py: fast help, all errors reported together, plans for other machines."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from ranks import run_ranks

from megafp8.cli import pretrain
from megafp8.config import flags as config_flags
from megafp8.config import settings
from megafp8.config.model_shapes import PRESETS
from megafp8.data.preprocessing.tokenizer_training import train_tokenizer
from megafp8.errors import CheckpointError

ROOT = Path(__file__).resolve().parents[2]
TOOLS = sorted(f"{folder}/{path.name}" for folder in ("tools", "launcher") for path in (ROOT / folder).glob("*.py"))
# Of the CPU time of `import torch`, which a help text does not need: a relation, so that slow processors pass too.
HELP_LIMIT, TOOL_HELP_LIMIT = 0.4, 0.75
TRAINING = "--micro-batch-size 1 --global-batch-size 512 --train-iters 1000 --lr 1e-4 --bf16"
MADE_UP = "--mock-data --tokenizer-type NullTokenizer --vocab-size 255"
TINY = f"--model-preset tiny --seq-length 64 {TRAINING} {MADE_UP}"


def start(script: str, *arguments: str) -> subprocess.CompletedProcess:
    """Run a script of the project as a user does."""
    return subprocess.run(
        [sys.executable, str(ROOT / script), *arguments], capture_output=True, text=True, cwd="/", timeout=120
    )


def cpu_seconds(*words: str) -> float:
    """The CPU time of a complete process of Python: other work on the machine only adds to the wall clock's."""
    before = os.times()
    subprocess.run([sys.executable, *words], capture_output=True, check=True, cwd="/", timeout=120)
    after = os.times()
    return after.children_user - before.children_user + after.children_system - before.children_system


@pytest.fixture(scope="module")
def torch_s() -> float:
    return cpu_seconds("-c", "import torch")


def problems_of(capsys: pytest.CaptureFixture, arguments: str) -> list[str]:
    """The errors of a wrong command line, one text each."""
    assert pretrain.main(arguments.split()) == 64
    output = capsys.readouterr()
    assert output.out == ""
    head, *problems = output.err.splitlines()
    assert head.endswith(f"{len(problems)} problem{'s' * (len(problems) > 1)} with the settings:")
    return [problem.removeprefix("  - ") for problem in problems]


def plan_of(capsys: pytest.CaptureFixture, arguments: str) -> str:
    """What a dry run prints with `--verbose`."""
    assert pretrain.main(["--dry-run", "--verbose", *arguments.split()]) == 0
    return capsys.readouterr().out


# ---- help ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["--help", "--version", "--list-presets"])
def test_help_is_fast(flag: str, torch_s: float) -> None:
    assert cpu_seconds(str(ROOT / "pretrain_gpt.py"), flag) < HELP_LIMIT * torch_s


@pytest.mark.parametrize("tool", TOOLS)
def test_the_help_of_every_tool_is_fast(tool: str, torch_s: float) -> None:
    assert cpu_seconds(str(ROOT / tool), "--help") < TOOL_HELP_LIMIT * torch_s


def test_help_needs_no_torch() -> None:
    code = (
        "import sys; from megafp8.cli import pretrain\n"
        "try:\n    pretrain.main(['--help'])\n"
        "except SystemExit as end:\n    sys.exit(end.code or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.DEVNULL, timeout=60).returncode == 0


@pytest.mark.parametrize("package", ["torch", "psutil"])
@pytest.mark.parametrize("also", ["", "--use-checkpoint-args --load r"])
def test_a_python_without_a_package_reports_the_command_line_and_what_to_install(package: str, also: str) -> None:
    code = f"import sys\nsys.modules['{package}'] = None\nfrom megafp8.cli import pretrain\nsys.exit(pretrain.main())"
    words = [sys.executable, "-c", code, "--hiden-size", "64", *also.split()]
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 64, result.stderr
    head, flag, missing = result.stderr.splitlines()
    assert head == "CapabilityError: 2 problems with the settings or this machine:"
    assert "--hiden-size" in flag and "did you mean --hidden-size" in flag
    assert missing.startswith(f"  - {sys.executable} has no {package}")
    assert f"`{sys.executable} -m pip install -e .` in the checkout" in missing


def test_presets_are_listed() -> None:
    listed = start("pretrain_gpt.py", "--list-presets").stdout
    assert [line.split()[0] for line in listed.splitlines()[1:]] == list(PRESETS)


# ---- wrong command lines ------------------------------------------------------------------------------------------


def test_a_wrong_command_line_ends_with_status_64_and_no_traceback() -> None:
    result = start("pretrain_gpt.py", "--num-layres", "2")
    assert result.returncode == 64
    assert result.stdout == ""
    assert "did you mean --num-layers?" in result.stderr and "is missing" not in result.stderr
    assert "Traceback" not in result.stderr


def test_wrong_overrides_are_reported_with_all_errors_before_any_work(capsys) -> None:
    overrides = (
        "transformer.num_layer=3 ddp.suggested_communication_unit_size=many optimizer.decoupled_weight_decay=small"
    )
    problems = problems_of(capsys, f"{TINY} --min-lr 1 --override {overrides}")
    for part in ("--min-lr 1", "has no field num_layer", "'many' is not of type", "'small' is not of type"):
        assert any(part in problem for problem in problems), (part, problems)


@pytest.mark.parametrize(("local_rank", "is_said"), [("0", True), ("1", False)])
def test_one_rank_of_every_machine_reports_its_errors(capsys, monkeypatch, local_rank: str, is_said: bool) -> None:
    """The second machine may lack a path that the first one has."""
    monkeypatch.setenv("RANK", "8")
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setattr("logging.disable", lambda level: None)  # other ranks than 0 disable warnings for good
    assert pretrain.main(["--num-layres", "2"]) == 64
    assert ("--num-layres" in capsys.readouterr().err) == is_said


@pytest.mark.parametrize(
    ("ends", "saying"),
    [
        (("of a different model", "of a different model"), [True, False]),
        (("no such file", "stale file handle"), [True, True]),
        ((None, "stale file handle"), [False, True]),
    ],
    ids=["the same on both", "each its own", "one alone"],
)
def test_a_checkpoint_error_is_reported_once(ends: tuple[str | None, ...], saying: list[bool]) -> None:
    import megafp8.training.pretrain  # noqa: F401  once, before ranks are forked

    def start() -> tuple[int, bool]:
        end = ends[dist.get_rank()]

        def run_training(validated: object) -> int:
            if end is None:
                return 0
            raise CheckpointError(end)

        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()) as errors:
            patch.setattr("megafp8.training.pretrain.run_training", run_training)
            patch.setattr("megafp8.device.platform.FIRST_RANK_TIMEOUT_S", 0.5 if None in ends else 60)
            status = pretrain.main(TINY.split())
        dist.barrier()
        assert not errors.getvalue() or errors.getvalue() == f"CheckpointError: {end}\n"
        return status, bool(errors.getvalue())

    assert run_ranks(2, start) == [(74 if end else 0, is_saying) for end, is_saying in zip(ends, saying, strict=True)]


def test_problems_of_every_kind_are_reported_together(capsys, monkeypatch) -> None:
    """Flags, layout, model, batch, length, paths and device: no error hides another one."""
    monkeypatch.setenv("WORLD_SIZE", "6")
    problems = problems_of(
        capsys,
        "--eval-intervall 64 --lr --swiglu yes --fp4-param-gather --eval-iters ten "
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
        "--num-layers 5 --hidden-size 100 --num-attention-heads 3 --seq-length 64 --position-embedding-type rope "
        "--micro-batch-size 1 --data-path /nowhere/shard --save /dev/null/run "
        "--tokenizer-type SentencePieceTokenizer --tokenizer-model /nowhere/model "
        "--transformer-impl local --attention-backend fused",
    )
    for part in (
        "did you mean --eval-interval?", "--lr: a value is missing",
        "--swiglu: does not take 'yes'", "--fp4-param-gather: ", "'ten' is not an integer",
        "2 x 2 x 1 = 4 (6 / 4 = 1.5): start 8 ranks", "--num-layers 5 is not divisible", "--hidden-size 100 is not",
        "--num-attention-heads 3 is not divisible", "--train-iters", "/nowhere/shard.bin", "--save /dev/null/run: ",
        "--tokenizer-model /nowhere/model: no such file", "--attention-backend fused: the local layers support",
    ):  # fmt: skip
        assert sum(part in problem for problem in problems) == 1, (part, problems)


def test_a_hybrid_model_is_refused_without_suggestion_about_its_layers(capsys) -> None:
    line = "--hybrid-layer-pattern M*M- --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
    line += f"--position-embedding-type rope {TRAINING} {MADE_UP}"
    (problem,) = problems_of(capsys, line)
    assert problem.startswith("--hybrid-layer-pattern: for another kind of model")
    (problem,) = problems_of(capsys, f"--mamba-num-heads 8 {line}")
    assert problem.startswith("--mamba-num-heads, --hybrid-layer-pattern: for another kind of model")
    (problem,) = problems_of(capsys, line.replace("--hybrid-layer-pattern M*M-", ""))
    assert problem.startswith("--num-layers: missing; give them")


def test_paths_of_a_cluster_are_notices_in_its_dry_run(capsys) -> None:
    plan = plan_of(
        capsys,
        f"--model-preset tiny --vocab-size 500 --seq-length 64 {TRAINING} --world-size 8 --target h200 "
        "--data-path /nowhere/shard --tokenizer-type SentencePieceTokenizer --tokenizer-model /nowhere/model",
    )
    for path in ("/nowhere/shard.bin", "/nowhere/model"):
        assert any(line.startswith("notice: on this machine: ") and path in line for line in plan.splitlines())


def test_an_indivisible_batch_names_the_next_divisible_one(capsys) -> None:
    (problem,) = problems_of(capsys, f"{TINY} --dry-run --world-size 5")
    assert "use --global-batch-size 515" in problem


@pytest.mark.parametrize(
    ("recipe", "target", "part"),
    [
        ("mxfp8", "h100", "supported natively: --fp8-recipe tensorwise, delayed, blockwise"),
        ("delayed", "cpu", "no recipe is supported natively"),
    ],
)
def test_an_unsupported_recipe_is_refused_with_the_supported_ones(capsys, recipe: str, target: str, part: str) -> None:
    arguments = f"{TINY} --fp8-format e4m3 --fp8-recipe {recipe} --no-emulation --dry-run --target {target}"
    (problem,) = problems_of(capsys, arguments)
    assert f"--fp8-recipe {recipe}" in problem and part in problem


def test_a_named_gpu_is_for_dry_runs_only(capsys) -> None:
    (problem,) = problems_of(capsys, f"{TINY} --world-size 8")
    assert "--dry-run" in problem


# ---- dry runs -----------------------------------------------------------------------------------------------------


def test_dry_run_shows_settings_layout_size_memory_and_precision(capsys) -> None:
    plan = plan_of(capsys, f"{TINY} --target cpu --fp8-format hybrid --fp8-recipe tensorwise --use-flash-attn")
    for part in (
        "notice: --use-flash-attn", "* model.model_preset = tiny", "  model.hidden_size = 128",
        "layout: 1 x cpu, emulated layers", "32,768 tokens a step = 512 microbatches x 1 sequences",
        "GiB (weights", "input e4m3 x weight e4m3", "grad_output e5m2 x input e4m3", "output_layer",
    ):  # fmt: skip
        assert part in plan, plan


def test_dry_run_shows_phases_of_data_with_those_of_the_learning_rate(capsys, tmp_path: Path) -> None:
    phases = tmp_path / "phases.yaml"
    phases.write_text("- {name: web, data_path: [7, w, 3, c]}\n- {name: anneal, start: 900 steps, data_path: m}\n")
    wsd = "--lr-decay-style WSD --lr-wsd-decay-iters 100 --lr-warmup-iters 10"
    run = TINY.replace("--mock-data", f"--data-phases {phases} {wsd} --target cpu --world-size 1")
    plan = plan_of(capsys, run)
    assert "data: 2 phases for training, held out from nothing (give --data-path or --valid-data-path)" in plan
    lines = plan[plan.index("phases of data and of the learning rate") :].splitlines()[1:4]
    assert lines == [
        "  step 1: data: web from sample 0: 7 w 3 c", "  step 11: warm-up ends",
        "  step 901: decay begins; data: anneal from sample 460,800: m",
    ]  # fmt: skip


def test_dry_run_shows_the_sizes_of_an_automatic_search(capsys) -> None:
    flags = f"{TINY} --micro-batch-size auto --global-batch-size 24 --world-size 2"
    plan = plan_of(capsys, f"{flags} --target h200")
    assert "* training.micro_batch_size = auto" in plan
    assert "micro-batch size: auto, to be tried below 133.38 GiB a rank; what follows is for 12" in plan
    rows = [line.split() for line in plan.partition("ms/sample\n")[2].partition("\n\n")[0].splitlines()]
    assert [row[0] for row in rows] == ["1", "2", "3", "4", "6", "12"] and rows[-1][-1] == "first"
    assert "1 microbatches x 12 sequences x 2 data-parallel ranks" in plan
    small = plan_of(capsys, f"{flags} --target cpu --micro-batch-size-memory-limit 0.01")
    assert "below 0.01 GiB a rank" in small and "not tried: predicted far above the limit" in small
    fp8 = plan_of(capsys, f"{flags} --target cpu --fp8-format e4m3 --fp8-recipe mxfp8 --seq-length 16")
    assert "\n  1 is skipped: a microbatch has" in fp8


def test_dry_run_of_70b_on_512_gpus(capsys) -> None:
    plan = plan_of(
        capsys,
        "--world-size 512 --target h200 --model-preset llama3-70b --seq-length 8192 --fp8-format hybrid "
        "--fp8-recipe tensorwise --tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 4 "
        f"--num-layers-per-virtual-pipeline-stage 5 --use-distributed-optimizer {TRAINING} "
        "--mock-data --tokenizer-type NullTokenizer --vocab-size 128255",
    )
    for part in (
        "512 x h200, transformer_engine layers: tensor 8 x context 1 x pipeline 4 (virtual 4) x data 16",
        "70,566,289,408 parameters (129,024 rows", "4,194,304 tokens a step = 32 microbatches", "ranks 384-511",
    ):  # fmt: skip
        assert part in plan, plan


def test_dry_run_for_a_gpu_machine_plans_transformer_engines_optimizer_state(capsys) -> None:
    flags = f"{TINY} --bf16 --use-distributed-optimizer --transformer-impl transformer_engine"
    low = "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
    text = plan_of(capsys, f"{flags} {low} --world-size 1 --target h200")
    assert "exp_avg_dtype = bf16" in text


def test_dry_run_reads_a_real_tokenizer(capsys, tmp_path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(json.dumps({"text": Path(__file__).read_text(encoding="utf-8")}) + "\n", encoding="utf-8")
    model = train_tokenizer([str(corpus)], str(tmp_path / "tokenizer"), vocab_size=400).model_path
    plan = plan_of(
        capsys,
        f"--model-preset tiny --seq-length 64 {TRAINING} --mock-data --tokenizer-type SentencePieceTokenizer "
        f"--tokenizer-model {model}",
    )
    assert "(512 rows of embedding)" in plan


def test_dry_run_writes_nothing(capsys, tmp_path) -> None:
    plan_of(capsys, f"{TINY} --save {tmp_path}/run --load {tmp_path}/run --save-interval 10")
    assert list(tmp_path.iterdir()) == []


def test_flags_override_a_configuration_file(capsys, tmp_path) -> None:
    path = tmp_path / "config.json"
    path.write_text(settings.to_json(config_flags.parse(TINY.split()).config), encoding="utf-8")
    plan = plan_of(capsys, f"--config {path} --lr 0.5")
    assert "* optimizer.lr = 0.5" in plan and "  training.train_iters = 1000" in plan
