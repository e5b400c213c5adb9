"""The planner's errors for rows that `gpu_layouts.py` wrote are those of the table of measurements."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmarks import planner_accuracy, planner_rows
from benchmarks.gpu_layout_rows import LAYOUTS, Row
from benchmarks.planner_measurements import MEASUREMENTS

H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"


def row(layout: str, recipe: str, flags: str = "", device: str = H200) -> Row:
    return Row(
        shape="B", recipe=recipe, extra=f"{flags} {LAYOUTS[layout].flags}", label=f"{layout} {flags}",
        num_gpus=LAYOUTS[layout].num_gpus, step_ms=100.0, peak_gib=20.0, gathered_mb=None, losses=[5.0],
        device=device, layout=layout, flags=flags,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "measured"),
    [
        ("megafp8 B bf16 PP 2", row("PP 2", "bf16", "--cuda-graph-impl none")),
        ("megafp8 B bf16 TP 2, DP 2", row("TP 2, DP 2", "bf16", "--cuda-graph-impl none")),
        ("megafp8 B delayed TP 4, graph", row("TP 4", "delayed")),
        ("megafp8 B delayed DP 4, W, graph", row("DP 4", "delayed", "--fp8-param-gather")),
    ],
)
def test_predictions_are_those_of_the_table(name: str, measured: Row) -> None:
    """Batches are of the layouts, and settings that are not given those of a run, such as the CUDA graph."""
    expected = planner_accuracy.compare(next(entry for entry in MEASUREMENTS if entry.name == name))
    found = planner_rows.predict(measured)
    assert found.gpu == "h200"
    assert (found.step_ms, found.peak_gib) == pytest.approx((expected.step_ms, expected.peak_gib), rel=1e-6)


def test_each_row_has_its_gpu() -> None:
    slow, fast = (planner_rows.predict(row("DP 4", "bf16", device=device)) for device in (H100, H200))
    assert slow.gpu == "h100" and slow.step_ms > fast.step_ms


def test_the_command_prints_medians_and_what_it_cannot_predict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, path = row("DP 4", "bf16"), tmp_path / "rows.jsonl"
    rows = [dataclasses.replace(one, step_ms=step_ms) for step_ms in (180.0, 190.0, 250.0)]
    rows += [row("TP 4", "bf16", device="cpu"), dataclasses.replace(row("TP 2", "bf16"), recipe="other")]
    path.write_text("".join(json.dumps(vars(each)) + "\n" for each in rows))
    assert planner_accuracy.main(["--rows", str(path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    cells = [cell.strip() for cell in lines[2].split("|")[1:-1]]
    step_ms, peak_gib = planner_rows.predict(one).step_ms, planner_rows.predict(one).peak_gib
    assert cells == [
        "B", "DP 4", "bf16", "h200", "190.0", f"{step_ms:.1f}", f"{step_ms / 190 - 1:+.1%}", "20.0", f"{peak_gib:.1f}",
        f"{peak_gib / 20 - 1:+.1%}",
    ]  # fmt: skip
    assert len(lines) == 5 and "not 'cpu'" in lines[3] and "the planner's recipes are" in lines[4], lines
