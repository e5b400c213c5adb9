"""Which cells of the matrix of mixtures count as slower, and that its modes are what other benchmarks take."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import expert_matrix, gpu_layouts
from benchmarks.expert_matrix import DISPATCHER, ONE_LAUNCH, Block, blocks, cells, read
from benchmarks.matrix import missing


def written(path: Path, block: Block, steps: dict[str, list[float]]) -> None:
    with path.open("a", encoding="utf-8") as lines:
        for mode, times in steps.items():
            is_peer = mode.startswith("@")
            for step_ms in times:
                row = {
                    "shape": block.shape, "layout": block.layout, "recipe": mode.removeprefix("@"), "step_ms": step_ms,
                    "software": "mcore" if is_peer else "megafp8",
                    "flags": "" if is_peer else f"{DISPATCHER} {block.dispatcher}",
                }  # fmt: skip
                lines.write(json.dumps(row) + "\n")


def test_slower_in_two_rounds_is_slower(tmp_path: Path) -> None:
    path, block = tmp_path / "rows", Block("M1", "EP 2", "peer")
    steps = {
        "bf16": [100.0, 110.0], "tensorwise-e4m3": [104.0, 115.0], "tensorwise": [104.0, 112.0],
        "delayed": [90.0, 80.0], "delayed-e4m3": [150.0], "@delayed": [80.0, 77.0], "@tensorwise": [300.0, 300.0],
    }  # fmt: skip
    written(path, block, steps)
    words = {line[3]: line[-1] for line in cells(read(path))}
    assert words == {
        "bf16": "", "tensorwise-e4m3": "slower than bf16", "tensorwise": "", "delayed": "slower than @delayed",
        "delayed-e4m3": "",
    }  # fmt: skip


def test_a_cell_in_doubt_is_measured_again() -> None:
    block = Block("M1", "EP 2", "peer")
    steps = dict.fromkeys(block.recipes, [100.0])
    assert missing(block.recipes, steps) == []
    assert missing(block.recipes, steps | {"delayed": [110.0]}) == ["bf16", "delayed", "@delayed"]
    twice = {name: [100.0, 100.0] for name in ("bf16", "@delayed")}
    assert missing(block.recipes, steps | twice | {"delayed": [110.0, 111.0]}) == []
    assert missing(block.recipes, steps | twice | {"delayed": [110.0, 99.0]}) == []
    # BF16 was measured again for another recipe before.
    often = steps | {"bf16": [100.0, 90.0, 100.0], "@delayed": [100.0, 90.0, 100.0]}
    assert missing(block.recipes, often | {"delayed": [110.0, 111.0]}) == []
    assert missing(block.recipes, {"bf16": [100.0]}) == list(block.recipes[1:])


def test_shards_take_every_block_once_and_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, done = tmp_path / "rows", list[Block]()

    def measure(block: Block, recipes: Sequence[str], options: object) -> None:
        done.append(block)
        written(path, block, {recipe: [1.0] for recipe in recipes})

    monkeypatch.setattr(expert_matrix, "measure", measure)
    ends = [expert_matrix.main(["--shard", f"{number}/5", "--json", str(path)]) for number in (1, 2, 3, 4, 5, 1, 3)]
    assert sorted(done) == sorted(blocks(["M1", "M2", "M3"])) and ends == [1, 1, 1, 1, 0, 0, 0]


def test_rows_are_appended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the benchmark that measures, which otherwise empties its file."""
    path = tmp_path / "rows"
    path.write_text('{"before": 1}\n')

    def run(command: list[object], cwd: Path) -> None:
        monkeypatch.setattr(gpu_layouts, "measure_all", lambda options: ([], {}))
        gpu_layouts.main([*map(str, command[2:]), "--gpus", "2"])

    monkeypatch.setattr(expert_matrix.subprocess, "run", run)
    options = expert_matrix.parse(["--json", str(path)])
    expert_matrix.measure(Block("M1", "EP 2", "peer"), ["bf16"], options)
    assert path.read_text() == '{"before": 1}\n'


def test_the_peer_has_half_of_the_steps_and_in_fp8_no_fused_router(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr(expert_matrix.subprocess, "run", lambda command, cwd: calls.append(" ".join(command)))
    options = expert_matrix.parse(["--json", str(tmp_path / "rows"), "--warm-up", "4", "--steps", "8"])
    expert_matrix.measure(Block("M2", "1 GPU", "auto"), ["@bf16", "bf16", "@delayed"], options)
    assert [call.partition(" --warm-up ")[2] for call in calls] == [
        f"4 --steps 8 --modes bf16 {DISPATCHER} auto",
        f"2 --steps 4 --modes {ONE_LAUNCH} @bf16 @delayed moe_router_fusion",
    ]  # fmt: skip


def test_the_peer_has_one_launch_for_up_to_64_experts_of_a_rank() -> None:
    modes = {(block.shape, block.layout): block.mode("@bf16") for block in blocks(["M1", "M3"]) if block.has_peer}
    fast = f"{ONE_LAUNCH} @bf16"
    assert modes == {("M1", "1 GPU"): "@bf16", ("M3", "1 GPU"): fast, ("M1", "EP 2"): fast, ("M3", "EP 2"): fast}
    assert Block("M1", "EP 2", "peer").mode("@tensorwise") == f"{ONE_LAUNCH} @tensorwise moe_router_fusion"


@pytest.mark.parametrize("block", blocks(["M1"]))
def test_its_modes_are_those_of_layouts(block: Block) -> None:
    modes = [block.mode(recipe) for recipe in block.recipes]
    options = gpu_layouts.parse(["--shape", block.shape, "--layouts", block.layout, "--modes", *modes])
    assert len(options.modes) in (4, 10)


def test_a_shard_out_of_range_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        expert_matrix.parse(["--shard", "6/5", "--json", "x"])
    assert "6/5: give I/N" in capsys.readouterr().err
