"""The matrix of dense models: legal flags, all pairs, and what counts as slow, as named and as measured."""

from __future__ import annotations

import dataclasses
import itertools
import json
import multiprocessing
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_matrix, gpu_steps, megatron_loop
from benchmarks.gpu_matrix import Task
from benchmarks.gpu_matrix_blocks import FEATURES, SHAPES, TINY, Block, blocks, covering_array
from benchmarks.gpu_matrix_rows import EMULATED, Row, Table
from megafp8.config import flags, rules
from megafp8.device.capability import TARGETS, capability_problems

HUNG_S = 240
MID, WIDE = (name for name in SHAPES if name != TINY)
OF_THE_LOOP = {"seq", "batch", "microbatches", "model", "optimizer"}


def problems(task: Task) -> list[str]:
    parsed, found = flags.parse_with_problems(task.flags.split())
    found = [*found, *rules.setting_problems(parsed.config, task.block.num_gpus)]
    return found + capability_problems(parsed.config, TARGETS["h200"])


def test_no_flags_are_refused() -> None:
    everything = blocks([MID, WIDE])
    names = {block.name for block in everything if block.shape == MID}
    once = [block for block in everything if block.shape == MID or block.name not in names]
    assert len(once) > len(names)
    tasks = [Task(block, side) for block in once for side in block.sides]
    refused = {str(task): problems(task) for task in tasks if not task.is_peer}
    assert not {task: found for task, found in refused.items() if found}


def test_names_are_unique_and_the_default_is_first() -> None:
    everything = blocks([MID, WIDE])
    assert len({(block.shape, block.name) for block in everything}) == len(everything)
    assert [block.name for block in everything[:2]] == ["default", "default"]


def test_the_peer_knows_its_settings() -> None:
    known = {field.name for field in dataclasses.fields(megatron_loop.MLATransformerConfig)} | OF_THE_LOOP
    for block in blocks([MID, WIDE]):
        assert known >= set(block.peer_changes())
        peers = [mode.removeprefix("@") for mode in block.sides.values() if mode.startswith("@")]
        assert set(peers) <= set(megatron_loop.RECIPES)
    division = {field.name for field in dataclasses.fields(megatron_loop.Division)}
    assert all(division >= set(block.layout.division or {}) for block in blocks([MID]) if block.layout)


def test_pairs_are_covered_by_few_rows() -> None:
    factors = {"shape": [MID, WIDE]} | {name: list(levels) for name, levels in FEATURES.items()}
    rows = covering_array(factors)
    assert rows == covering_array(factors) and len(rows) <= 24
    for one, other in itertools.combinations(factors, 2):
        combined = {(row[one], row[other]) for row in rows}
        assert combined == set(itertools.product(factors[one], factors[other]))
    assert covering_array({"a": ["1", "2"], "b": ["1", "2"]}) == [
        {"a": "1", "b": "1"}, {"a": "1", "b": "2"}, {"a": "2", "b": "1"}, {"a": "2", "b": "2"}
    ]  # fmt: skip


def test_batches_fit_the_length() -> None:
    sizes = {
        name: (block.length, block.micro_batch, block.accumulation)
        for block in blocks([MID])
        if (name := block.name).partition(" ")[0] in ("default", "length", "micro-batch", "accumulation")
    }
    assert sizes == {
        "default": (2048, 8, 1), "length 512": (512, 32, 1), "length 8192": (8192, 2, 1), "length 2000": (2000, 8, 1),
        "micro-batch 1": (2048, 1, 1), "accumulation 16": (2048, 2, 16),
    }  # fmt: skip


def table(path: Path, block: Block, sides: dict[str, list[float]], **others: object) -> Table:
    """Of a block whose rows have these times."""
    rows = [
        Row(shape=block.shape, block=block.name, side=side, step_ms=ms, losses=[2.0], **others)  # type: ignore[arg-type]
        for side, times in sides.items()
        for ms in times
    ]
    path.write_text("".join(json.dumps(dataclasses.asdict(row)) + "\n" for row in rows))
    return Table([block], path)


def test_slow_in_two_rounds_is_slow_and_a_warning_names_it(tmp_path: Path) -> None:
    path, block = tmp_path / "rows", Block(MID, "x", peer={})
    slow = {"bf16": [100.0, 100.0], "delayed": [105.0, 104.0], "@bf16": [98.0], "@delayed": [60.0, 60.0]}
    found = table(path, block, slow)
    assert list(found.unnamed()) == [f"{MID}, x, delayed: 0.96 of bf16, 0.57 of @delayed"]
    assert [line[-1] for line in found.lines()] == ["", "slower than bf16 and @delayed; NOT NAMED"]
    for own_flags, said, is_named in (
        (["--qk-clip"], "--qk-clip costs a lot", True),
        (["--qk-clip"], "--lr is high", False),
        (["--fp8-lm-level"], "--fp8-lm-level O1 stands for --bf16", False),
        ([], f"{EMULATED} because of the map", True),
        (["--transformer-impl"], "", True),
    ):
        found = table(path, block, slow, own_flags=own_flags, said=[said])
        assert (list(found.unnamed()) == []) is is_named
    assert list(table(path, block, slow | {"delayed": [105.0, 99.0], "@delayed": [100.0] * 2}).unnamed()) == []


def test_what_is_there_is_not_measured_again(tmp_path: Path) -> None:
    path, block = tmp_path / "rows", Block(MID, "x", peer={})
    even = dict.fromkeys(block.sides, [100.0])
    assert table(path, block, {}).missing(block) == list(block.sides)
    assert table(path, block, even).missing(block) == []
    assert table(path, block, even | {"delayed": [110.0]}).missing(block) == ["bf16", "delayed", "@delayed"]
    twice = dict.fromkeys(block.sides, [100.0, 100.0])
    assert table(path, block, twice | {"delayed": [110.0, 110.0]}).missing(block) == []
    # A failure is there, too, and what is compared with it is in no doubt.
    without = {side: times for side, times in even.items() if side != "@bf16"} | {"bf16": [110.0]}
    table(path, block, without)
    with path.open("a") as lines:
        lines.write(json.dumps(dataclasses.asdict(Row(shape=MID, block="x", side="@bf16", error="one\ntwo"))) + "\n")
    found = Table([block], path)
    assert found.missing(block) == []
    assert [line[-1] for line in found.lines()][-1] == "failed: two"
    assert list(found.failed()) == [f"{MID}, x, @bf16: two"]


def test_speed_to_the_default(tmp_path: Path) -> None:
    path, default, block = tmp_path / "rows", Block(MID, "default"), Block(MID, "x")
    values = {("default", "bf16"): 10.0, ("default", "delayed"): 20.0, ("x", "bf16"): 5.0, ("x", "delayed"): 5.0}
    with path.open("w") as lines:
        for (name, side), speed in values.items():
            row = Row(shape=MID, block=name, side=side, step_ms=1.0, tokens_per_second=speed)
            lines.write(json.dumps(dataclasses.asdict(row)) + "\n")
    assert [line[6] for line in Table([default, block], path).lines()] == [1.0, 1.0, 0.5, 0.25]


def test_shards_share_the_blocks_and_end_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, done = tmp_path / "rows", list[str]()

    def trained(options: object, task: Task) -> Row:
        done.append(str(task))
        return Row(shape=task.block.shape, block=task.block.name, side=task.side, step_ms=1.0)

    monkeypatch.setattr(gpu_matrix, "trained", trained)
    monkeypatch.setattr(gpu_steps, "import_everything", lambda: None)

    def ends(*words: str) -> int:
        return gpu_matrix.main(["--tiny", "--json", str(path), *words])

    assert ends("--shard", "1/2", "--minutes", "0") == 1 and not done
    assert [ends("--shard", f"{number}/2") for number in (1, 2)] == [1, 1]
    assert [ends("--gpus", "2", "--shard", f"{number}/2") for number in (1, 2)] == [1, 0]
    assert len(done) == len(set(done)) == sum(len(block.sides) for block in blocks([TINY]))
    assert ends("--shard", "1/1") == ends("--table") == 0 and len(done) == len(set(done))


@pytest.mark.slow
def test_a_run_on_a_cpu(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A failure is recorded, and the others go on."""
    path = tmp_path / "rows"
    argv = ["--tiny", "--shard", "1/1", "--warm-up", "1", "--steps", "1", "--json", str(path)]
    argv += ["--only", "offload", "spikes"]
    child = multiprocessing.get_context("fork").Process(target=lambda: sys.exit(gpu_matrix.main(argv)))
    child.start()
    child.join(HUNG_S)
    child.kill()
    assert child.exitcode in (0, 1)  # by how fast they were, a second round is to come
    rows = [Row(**json.loads(line)) for line in path.read_text().splitlines()]
    assert [(row.block, row.side, bool(row.step_ms), bool(row.error)) for row in rows] == [
        ("offload", "bf16", False, True), ("offload", "delayed", False, True),
        ("spikes", "bf16", True, False), ("spikes", "delayed", True, False),
    ]  # fmt: skip
    assert all(len(row.losses) == 2 and row.is_finite and row.has_graph is False for row in rows[2:])
    assert "slow and not named: " in capfd.readouterr().out
