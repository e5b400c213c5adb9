"""The start of a run takes at most 15 lines, all from rank 0, and a dry run less than 60; --verbose prints the rest."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from forked_runs import prepare, run_forked

from megafp8.cli import pretrain

ROOT = Path(__file__).resolve().parents[2]
MAX_START_LINES, MAX_DRY_RUN_LINES = 15, 59
MOCK = "--mock-data --tokenizer-type NullTokenizer --vocab-size 255 --eval-iters 0 --num-workers 0"
SHORT = f"--train-iters 1 --lr-warmup-iters 0 {MOCK}"
TINY = f"--model-preset tiny --num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --seq-length 32 --lr 1e-3 {SHORT}"
MANY_WARNINGS = (
    "--use-mcore-models --use-flash-attn --no-one-logger --log-straggler --legacy-tokenizer --enable-experimental "
    "--use-cpu-initialization --no-persist-layer-norm --tensorboard-queue-size 5 --train-sync-interval 1 "
    "--timing-log-level 1 --hysteresis 3 --fp8-hybrid --sequence-parallel"
)
PRECISION_MAP = (
    "--bf16 --fp8-format hybrid --fp8-recipe tensorwise --precision *.linear_fc2=blockwise/e4m3 layers.0.*=bf16"
)


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    prepare()


def quickstart_flags() -> str:
    """The flags of the quickstart's FP8 run for two steps, with made-up tokens in place of its text."""
    script = (ROOT / "examples/quickstart.sh").read_text(encoding="utf-8")
    arrays = script[script.index("model=(") : script.index("# High precision is BF16")]
    words = '"${model[@]}" "${training[@]}" "${fp8[@]}"'
    flags = subprocess.run(
        ["bash", "-c", f"{arrays}\necho {words}"], env={"STEPS": "2"}, capture_output=True, text=True
    )
    return f"{flags.stdout.strip()} {MOCK} --vocab-size 4095"


def start_lines(output: str) -> list[str]:
    """The lines before the first one about training."""
    lines = output.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith(" step 1/"))
    return lines[:first]


# ---- the start of a run -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (1, f"{TINY} --micro-batch-size 2 --global-batch-size 4"),
        (1, f"{TINY} --micro-batch-size auto --global-batch-size 8 --fp8-format hybrid"),
        (1, f"{TINY} --micro-batch-size 2 --global-batch-size 4 {MANY_WARNINGS}"),
        (2, f"{TINY} --micro-batch-size 2 --global-batch-size 4 {PRECISION_MAP} --use-distributed-optimizer"),
        (2, "QUICKSTART"),
    ],
)
def test_the_start_of_a_run_is_short_and_from_rank_0(ranks: int, flags: str, tmp_path: Path) -> None:
    flags = flags.replace("QUICKSTART", quickstart_flags())
    ended = run_forked(ranks, f"{flags} --save {tmp_path}/run --load {tmp_path}/run", timeout_s=120)
    assert set(ended.statuses) == {0}, ended.report()
    lines = start_lines(ended.output[0])
    assert len(lines) <= MAX_START_LINES, "\n".join(lines)
    assert set(ended.output[1:]) <= {""}
    assert lines[0].startswith("megafp8 ") and lines[0].endswith(f"run folder {tmp_path}/run")
    (chosen,) = (line for line in lines if line.startswith("chosen: "))
    assert "--transformer-impl emulated (no GPU)" in chosen
    assert ("--micro-batch-size" in chosen) == ("auto" in flags)
    (run,) = (line for line in lines if line.startswith(" run "))
    assert "parameters" in run and ("data 2" in run) == (ranks == 2) and "fp" in run
    assert any("starting from step 0" in line for line in lines)
    assert not any("linear_fc1" in line or "fprop" in line for line in lines)


def test_warnings_stay_and_flags_without_effect_share_a_line() -> None:
    ended = run_forked(1, f"{TINY} --micro-batch-size 2 --global-batch-size 4 {MANY_WARNINGS}")
    warnings = [line for line in start_lines(ended.output[0]) if line.startswith("notice: ")]
    for text in ("--sequence-parallel has no effect", "add --bf16", "--fp8-hybrid is read as", "--hysteresis 3"):
        assert any(text in warning for warning in warnings), text
    (no_effect,) = (warning for warning in warnings if warning.startswith("notice: no effect"))
    assert no_effect.startswith("notice: no effect: --use-mcore-models, --use-flash-attn, ")


def test_verbose_prints_the_recipe_the_reasons_and_the_setup() -> None:
    flags = f"{TINY} --micro-batch-size auto --global-batch-size 4 {PRECISION_MAP} {MANY_WARNINGS}"
    ended = run_forked(2, f"{flags} --use-distributed-optimizer --verbose", timeout_s=120)
    lines = "\n".join(start_lines(ended.output[0]))
    for text in (
        "notice: --use-flash-attn: no effect; kernels are chosen", "linear_fc2    1       blockwise e4m3",
        "microbatches per step", " step 0/1 | parameter gather: ", " step 0/1 | micro-batch size: ",
    ):  # fmt: skip
        assert text in lines, lines


@pytest.mark.slow
def test_two_ranks_under_torchrun_print_no_warning(tmp_path: Path) -> None:
    """From the imports on, as a user starts it."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "pretrain_gpt.py",
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(
        [*command, *quickstart_flags().split(), "--save", str(tmp_path / "run")],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stderr
    lines = start_lines(ended.stdout)
    assert len(lines) <= MAX_START_LINES and len(set(lines)) == len(lines), "\n".join(lines)


# ---- dry runs -----------------------------------------------------------------------------------------------------

CLUSTER = f"--bf16 --fp8-format hybrid --fp8-recipe tensorwise --train-iters 1000 --lr 1e-4 {MOCK}"
LAYOUTS = {
    "tiny": ("--seq-length 64 --micro-batch-size 1 --world-size 16", "cpu"),
    "gpt2-124m": ("--seq-length 1024 --micro-batch-size auto --global-batch-size 512 --world-size 8", "h200"),
    "llama-1b": (f"--seq-length 4096 --micro-batch-size 1 --world-size 64 {MANY_WARNINGS}", "h100"),
    "llama3-8b": (
        "--seq-length 8192 --micro-batch-size 1 --pipeline-model-parallel-size 16 --world-size 16 "
        "--precision layers.0-9.*=blockwise layers.3.*=bf16 *.linear_fc1=bf16 layers.20-24.linear_proj=blockwise",
        "h200",
    ),
    "llama3-70b": (
        "--seq-length 8192 --tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 20 "
        "--micro-batch-size 1 --global-batch-size 512 --world-size 1280 --use-distributed-optimizer",
        "b200",
    ),
}


def dry_run(capsys: pytest.CaptureFixture, *flags: str) -> list[str]:
    status = pretrain.main(["--dry-run", *" ".join(flags).split()])
    output = capsys.readouterr()
    assert status == 0, output.err
    return output.out.splitlines()


@pytest.mark.parametrize("preset", LAYOUTS)
def test_a_dry_run_is_short(preset: str, capsys: pytest.CaptureFixture) -> None:
    layout, target = LAYOUTS[preset]
    flags = f"--model-preset {preset} {CLUSTER} {layout} --target {target}"
    lines = dry_run(capsys, flags)
    assert len(lines) <= MAX_DRY_RUN_LINES, "\n".join(lines)
    for start in ("model: ", "layout: ", "size", "memory of one rank", "speed", "data: ", "checkpoints: ", "chosen: "):
        assert any(line.startswith(start) for line in lines), start
    assert any(line.startswith("speed, predicted: ") for line in lines) == (target != "cpu")
    verbose = dry_run(capsys, flags, "--verbose")
    assert "  * logging.verbose = True" in verbose and "  * optimizer.lr = 0.0001" in verbose
    assert any(line.split()[:1] == ["linear_fc1"] for line in verbose)


def test_only_one_rank_prints_a_dry_run(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = f"{TINY} --micro-batch-size 2 --world-size 2 --global-batch-size 4"
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr("logging.disable", lambda level: None)
    assert dry_run(capsys, flags) == []
