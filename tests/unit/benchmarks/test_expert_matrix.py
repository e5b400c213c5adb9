"""Which cells of the matrix of mixtures count as slower, and that its modes are what other benchmarks take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import expert_matrix, gpu_layouts
from benchmarks.expert_matrix import Block, blocks, cells, read


def written(path: Path, block: Block, steps: dict[str, list[float]]) -> None:
    with path.open("a", encoding="utf-8") as lines:
        for mode, times in steps.items():
            for step_ms in times:
                software = "mcore" if mode.startswith("@") else "megafp8"
                row = {"recipe": mode.removeprefix("@"), "software": software, "step_ms": step_ms}
                lines.write(json.dumps({"block": block, "row": row}) + "\n")


def test_slower_in_every_round_is_slower(tmp_path: Path) -> None:
    path, block = tmp_path / "rows", Block("M1", "EP 2", "peer")
    steps = {
        "bf16": [100.0, 110.0], "tensorwise-e4m3": [104.0, 115.0], "tensorwise": [104.0, 112.0],
        "delayed": [90.0, 80.0], "@delayed": [80.0, 77.0], "@tensorwise": [300.0, 300.0],
    }  # fmt: skip
    written(path, block, steps)
    words = {line[3]: line[-1] for line in cells(read(path))}
    assert words == {
        "bf16": "", "tensorwise-e4m3": "slower than BF16", "tensorwise": "", "delayed": "slower than the peer",
    }  # fmt: skip


def test_shards_take_every_block_once_and_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, done = tmp_path / "rows", list[Block]()

    def measure(block: Block, options: object) -> None:
        done.append(block)
        written(path, block, {"bf16": [1.0, 1.0]})

    monkeypatch.setattr(expert_matrix, "measure", measure)
    ends = [expert_matrix.main(["--shard", f"{number}/5", "--json", str(path)]) for number in (1, 2, 3, 4, 5, 1, 3)]
    assert sorted(done) == sorted(blocks(["M1", "M2", "M3"])) and ends == [1, 1, 1, 1, 0, 0, 0]


@pytest.mark.parametrize("block", blocks(["M1"]))
def test_its_modes_are_those_of_layouts(block: Block) -> None:
    options = gpu_layouts.parse(["--shape", block.shape, "--layouts", block.layout, "--modes", *block.modes()])
    assert len(options.modes) in (6, 10)


def test_a_shard_out_of_range_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        expert_matrix.parse(["--shard", "6/5", "--json", "x"])
    assert "--shard 6/5: give I/N" in capsys.readouterr().err
