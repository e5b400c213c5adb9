"""Layouts on several GPUs: which ones run concurrently, the content of the rows, and a complete run on CPU ranks."""

from __future__ import annotations

import dataclasses
import json
import math
import multiprocessing
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmarks import gpu_layouts
from benchmarks.gpu_layout_rows import LAYOUTS, Row, Task, W, fitting, mode_text, table
from benchmarks.gpu_layouts import place
from benchmarks.gpu_train import MODES, SHAPES
from megafp8.config import flags as config_flags
from megafp8.config import rules

HUNG_S = 240


class Taken:
    """A running layout."""

    def __init__(self, *gpus: int):
        self.gpus = range(gpus[0], gpus[-1] + 1)


def test_small_layouts_run_concurrently() -> None:
    four, two = Task("DP 4", "bf16"), Task("DP 2", "bf16")
    assert place([four, two], [], 4) == (four, 0)
    assert place([four, two], [Taken(0, 1)], 4) == (two, 2)
    assert place([four, two], [Taken(0, 1), Taken(2, 3)], 4) is None
    assert place([four], [], 2) is None


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("mode", gpu_layouts.MODES)
def test_every_mode_is_legal_under_every_layout(name: str, mode: str) -> None:
    shape = "M1" if name.startswith("EP") else "B"
    recipe, _, extra = mode_text(Task(name, mode), shape).partition(" ")
    config = config_flags.parse(
        f"{SHAPES[shape]} --bf16 --mock-data --tokenizer-type NullTokenizer --train-iters 9 --lr 1e-4 "
        f"{MODES[recipe]} {extra}".split()
    ).config
    assert rules.setting_problems(config, LAYOUTS[name].num_gpus) == []


def test_a_mode_has_its_environment_prefix() -> None:
    task = Task("DP 2", "NCCL_MAX_CTAS=8 X=a=b delayed --recompute-granularity selective --seed=3")
    assert task.environment == {"NCCL_MAX_CTAS": "8", "X": "a=b"} and task.recipe == "delayed"
    assert task.flags == "--recompute-granularity selective --seed=3"
    given = task.flags.split()
    assert mode_text(task, "B").split()[: 3 + len(given)] == ["delayed", "--global-batch-size", "4", *given]


def test_a_mode_without_a_recipe_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert Task("DP 2", "A=1 A=2 bf16 --seed 3").recipe == "bf16"
    with pytest.raises(SystemExit):
        gpu_layouts.parse(["--modes", "bf16", "NCCL_MAX_CTAS=8"])
    assert "'NCCL_MAX_CTAS=8' names no recipe" in capsys.readouterr().err


def row(label: str, recipe: str, step_ms: float, peak_gib: float = 1.0, flags: str = "") -> Row:
    layout = label.removesuffix(" FP8 weights")
    flags = flags or (W if label != layout else "")
    return Row(shape="B", recipe=recipe, extra="", label=label, num_gpus=LAYOUTS[layout].num_gpus, step_ms=step_ms,
               peak_gib=peak_gib, gathered_mb=None, losses=[5.0], device="GPU", layout=layout,
               flags=flags)  # fmt: skip


def column(text: str, number: int) -> list[str]:
    return [line.split("|")[number].strip() for line in text.splitlines()[2:]]


def test_speed_is_compared_under_one_layout() -> None:
    rows = [row("DP 4", "bf16", 200.0), row("TP 4", "bf16", 90.0), row("DP 4 FP8 weights", "delayed", 160.0)]
    assert column(table([*rows, row("TP 4", "delayed", 60.0)]), 4) == ["1.00", "1.00", "1.25", "1.50"]


def test_scaling_is_relative_to_the_same_mode_on_one_gpu() -> None:
    """DP 4 trains four times the sequences. FP8 weights are another mode, which has no ratio without one GPU's."""
    rows = [row("1 GPU", "bf16", 190.0), row("1 GPU", "delayed", 135.0), row("DP 4", "bf16", 200.0)]
    found = table([*rows, row("TP 4", "delayed", 54.0), row("DP 4 FP8 weights", "delayed", 140.0)])
    assert column(found, 5) == ["1.00", "1.00", "0.95", "0.62", ""]


def test_modes_of_different_environments_are_not_mixed() -> None:
    """Each is compared with the same recipe on one GPU, and with BF16 in its own environment."""
    rows = [row("1 GPU", "delayed", 135.0), row("DP 2", "bf16", 200.0), row("DP 2", "delayed", 150.0)]
    tuned = [
        dataclasses.replace(row("DP 2", recipe, step_ms), environment="NCCL_MAX_CTAS=8")
        for recipe, step_ms in (("bf16", 180.0), ("delayed", 135.0))
    ]
    found = table([*rows, *tuned])
    assert column(found, 4) == ["", "1.00", "1.33", "1.00", "1.33"]
    assert column(found, 5) == ["1.00", "", "0.90", "", "1.00"]


def peer(label: str, recipe: str, step_ms: float, flags: str = "") -> Row:
    return dataclasses.replace(row(label, recipe, step_ms, flags=flags), software="mcore")


def test_speed_to_the_peer_is_that_of_its_fastest_settings() -> None:
    """The peer's BF16 is the base of the peer's rows only, and its one GPU that of their scaling."""
    ours = [row("1 GPU", "delayed", 100.0), row("DP 4", "bf16", 200.0), row("DP 4", "delayed", 125.0)]
    ours.append(row("TP 4", "delayed", 60.0))
    peers = [peer("DP 4", "bf16", 210.0), peer("DP 4", "delayed", 175.0), peer("DP 4", "delayed", 150.0, "fusion")]
    found = table([*ours, *peers])
    assert column(found, 2)[-2:] == ["@delayed", "@delayed"]
    assert column(found, 4) == ["", "1.00", "1.60", "", "1.00", "1.20", "1.40"]
    assert column(found, 5) == ["1.00", "", "0.80", "0.42", "", "", ""]
    assert column(found, 8) == ["", "1.05", "1.20", "", "", "", ""]


def test_a_mode_of_the_peer_is_checked_as_the_same_recipe() -> None:
    """Its settings are no flags of megafp8."""
    task = Task("PP 2", "NCCL_MAX_CTAS=8 @delayed batch_p2p_sync")
    assert (task.software, task.recipe, task.flags) == ("mcore", "delayed", "batch_p2p_sync")
    assert mode_text(task, "B") == mode_text(Task("PP 2", "delayed"), "B")


def test_batches_are_those_of_the_shape() -> None:
    batches = {
        "1 GPU": 2, "DP 2": 4, "TP 2": 2, "CP 2": 2, "CP 2 a2a": 2, "PP 2": 8, "DP 4": 8, "TP 2, DP 2": 4, "TP 4": 2,
        "CP 2 allgather": 2,
        "PP 4": 16,
    }  # fmt: skip
    assert {name: LAYOUTS[name].global_batch("B") for name in fitting(4, "B")} == batches
    assert LAYOUTS["EP 4"].global_batch("M1") == 4 * 16 and LAYOUTS["EP 2"].global_batch("M3") == 2 * 16


def test_layouts_fit_the_shape() -> None:
    assert "EP 2" in fitting(2, "M1") and "EP 4" not in fitting(2, "M1")
    assert "PP 4" not in fitting(4, "M3"), "two layers"


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--modes", "@mxfp8"], "the peer has no such recipe"),
        (["--shape", "C", "--modes", "@bf16"], "--shape C: the peer does not have it"),
        (["--layouts", "TP 2 overlapped", "--modes", "@bf16"], "the peer has no user buffers"),
    ],
)
def test_what_the_peer_cannot_do_is_refused(argv: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_layouts.parse(argv)
    assert problem in capsys.readouterr().err


def test_rounds_become_medians() -> None:
    found = table([row("DP 4", "bf16", ms, peak) for ms, peak in ((200.0, 3.0), (100.0, 4.0), (180.0, 3.5))])
    assert column(found, 3) == ["180"] and column(found, 6) == ["4.00"]


def test_modes_of_one_recipe_are_not_mixed() -> None:
    found = table([row("DP 4", "delayed", 140.0), row("DP 4", "delayed", 150.0, flags="--quantize-kernels triton")])
    assert column(found, 3) == ["140", "150"]


def test_a_failing_mode_does_not_affect_others(capfd: pytest.CaptureFixture[str]) -> None:
    argv = ["--shape", "tiny", "--gpus", "2", "--warm-up", "1", "--steps", "1", "--layouts", "DP 2", "--modes"]
    child = multiprocessing.get_context("fork").Process(
        target=lambda: sys.exit(gpu_layouts.main([*argv, "bf16 --fp8-param-gather", "bf16"]))
    )
    child.start()
    child.join(HUNG_S)
    child.kill()
    said = capfd.readouterr().out
    assert child.exitcode == 1
    assert "DP 2 bf16 --fp8-param-gather failed:" in said and "ConfigError" in said
    assert "DP 2 bf16: " in said


def test_a_run_on_cpu_ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The losses do not depend on what is gathered; the bytes do."""
    path = tmp_path / "rows.jsonl"
    argv = ["--shape", "tiny", "--gpus", "2", "--warm-up", "1", "--steps", "1", "--json", str(path)]
    argv += ["--layouts", "DP 2", "TP 2", "--modes", "tensorwise", "tensorwise --fp8-param-gather"]
    argv += ["--extra=--use-distributed-optimizer"]
    child = multiprocessing.get_context("fork").Process(target=lambda: sys.exit(gpu_layouts.main(argv)))
    child.start()
    child.join(HUNG_S)
    child.kill()
    assert child.exitcode == 0
    plain, fp8, *_ = rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(found["label"], found["num_gpus"]) for found in rows] == [
        ("DP 2", 2), ("DP 2 FP8 weights", 2), ("TP 2", 2), ("TP 2 FP8 weights", 2)
    ]  # fmt: skip
    assert fp8["losses"] == plain["losses"]
    assert 0 < fp8["gathered_mb"] < plain["gathered_mb"]
    assert "speed to BF16" in capfd.readouterr().out


def test_the_peer_on_cpu_ranks(tmp_path: Path) -> None:
    """The same sizes as megafp8; its loss is known on the first stage."""
    path = tmp_path / "rows.jsonl"
    argv = ["--shape", "tiny", "--gpus", "2", "--warm-up", "1", "--steps", "1", "--json", str(path)]
    peer = "@bf16 apply_rope_fusion cross_entropy_loss_fusion masked_softmax_fusion"
    argv += ["--layouts", "DP 2", "PP 2", "--modes", peer]
    child = multiprocessing.get_context("fork").Process(target=lambda: sys.exit(gpu_layouts.main(argv)))
    child.start()
    child.join(HUNG_S)
    child.kill()
    assert child.exitcode == 0
    data, stages = [json.loads(line) for line in path.read_text().splitlines()]
    assert (data["software"], data["recipe"], data["extra"]) == ("mcore", "bf16", "")
    assert stages["extra"] == LAYOUTS["PP 2"].flags
    for loss in data["losses"] + stages["losses"]:
        assert loss == pytest.approx(math.log(50_304), rel=0.02)
