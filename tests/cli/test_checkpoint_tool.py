"""tools/checkpoint.py as a user runs it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from saved_run import configure, copy_as_step, save_initial

from megafp8.checkpoint.directory import complete_steps
from megafp8.checkpoint.manifest import MANIFEST, find_damage, read_manifest
from megafp8.cli import checkpoint
from megafp8.training.run import non_persistent_folder

ROOT = Path(__file__).resolve().parents[2]
FLAGS = "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --vocab-size 127 --tensor-model-parallel-size 2 --bf16"


@pytest.fixture(scope="module")
def tool():
    return checkpoint


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """The folder of a run on two ranks, with a checkpoint of step 7. Tests must not write to it."""
    return save_initial(tmp_path_factory.mktemp("run"), configure(FLAGS), world_size=2)


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))


def damage(path: Path) -> str:
    """Flip a bit in the largest file."""
    file = max(path.iterdir(), key=lambda each: each.stat().st_size)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))
    return file.name


def test_list_and_verify_as_commands_need_no_torch(saved: Path) -> None:
    code = (
        "import sys; from megafp8.cli import checkpoint; status = checkpoint.main(); "
        "sys.exit(status or 7 * ('torch' in sys.modules))"
    )
    for command in ("list", "verify"):
        result = subprocess.run(
            [sys.executable, "-c", code, command, str(saved)],
            capture_output=True, text=True, timeout=60, cwd=ROOT,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        assert result.stdout.startswith(f"whole    {saved / 'iter_0000007'}  7 samples  0.0")
        assert "pp1 tp2 dp1" in result.stdout


def test_only_verify_reads_every_byte(tool, run: Path, capsys) -> None:
    name = damage(run / "iter_0000007")
    assert tool.main(["list", str(run)]) == 0
    assert capsys.readouterr().out.startswith("whole")
    assert tool.main(["verify", str(run)]) == 74
    out = capsys.readouterr().out
    assert out.startswith("DAMAGED") and f"{name} is damaged: SHA-256" in out
    assert tool.main(["verify", str(run / "iter_0000007"), "--json"]) == 74
    (state,) = json.loads(capsys.readouterr().out)
    assert not state["is_whole"] and state["step"] == 7


def test_a_missing_checkpoint_is_an_error(tool, run: Path, tmp_path: Path, capsys) -> None:
    assert tool.main(["verify", str(tmp_path / "none")]) == 74
    assert tool.main(["show", str(run), "--ckpt-step", "8"]) == 74
    assert "--ckpt-step 8" in capsys.readouterr().err
    (run / "iter_0000007" / MANIFEST).unlink()
    assert tool.main(["list", str(run)]) == 74
    assert "no manifest" in capsys.readouterr().out


@pytest.mark.parametrize(
    "command", [["list"], ["verify"], ["show"], ["hash"], ["seal"], ["prune", "--ckpt-keep", "1"]], ids=lambda c: c[0]
)
def test_a_missing_folder_is_an_error(command: list[str], tool, tmp_path: Path, capsys) -> None:
    for name in ("none", "iter_0000020"):
        assert tool.main([*command, str(tmp_path / name)]) == 74
        assert "there is no such folder" in capsys.readouterr().err


def test_the_folder_of_one_checkpoint_has_one_step(tool, saved: Path, capsys) -> None:
    own = str(saved / "iter_0000007")
    assert tool.main(["verify", own]) == 0
    for command in ("verify", "show", "hash"):
        assert tool.main([command, own, "--ckpt-step", "5"]) == 64
        assert "iter_0000007 is one checkpoint" in capsys.readouterr().err
    assert tool.main(["prune", own, "--ckpt-keep", "1"]) == 64


def test_list_names_checkpoints_with_missing_bytes(tool, run: Path, capsys) -> None:
    largest = max((run / "iter_0000007").iterdir(), key=lambda each: each.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])
    assert tool.main(["list", str(run)]) == 74
    assert capsys.readouterr().out.startswith("DAMAGED")


def test_temporary_checkpoints_are_listed(tool, run: Path, capsys) -> None:
    """In the folder where runs write it."""
    config = configure(f"{FLAGS} --save {run} --non-persistent-save-interval 1")
    second = non_persistent_folder(config)
    for step in (7, 9):
        copy_as_step(run / "iter_0000007", second, step)
    (second / "iter_0000003.corrupt").mkdir()
    assert tool.main(["list", str(run)]) == 0
    lines = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ["whole", str(run / "iter_0000007")], ["whole", str(second / "iter_0000007")],
        ["whole", str(second / "iter_0000009")], ["aside", str(second / "iter_0000003.corrupt")],
    ]  # fmt: skip
    assert tool.main(["hash", str(run)]) == 0
    assert f"hash of {second / 'iter_0000009'}" in capsys.readouterr().err
    assert tool.main(["show", str(run), "--ckpt-step", "9"]) == 0
    assert capsys.readouterr().out.startswith(f"whole    {second / 'iter_0000009'}")
    damage(second / "iter_0000009")
    assert tool.main(["verify", str(run), "--ckpt-step", "7"]) == 0
    assert tool.main(["verify", str(run)]) == 74


def test_a_checkpoint_with_the_name_of_another_step_is_an_error(tool, run: Path, capsys) -> None:
    shutil.copytree(run / "iter_0000007", run / "iter_0000009")
    assert tool.main(["verify", str(run), "--ckpt-step", "7"]) == 0
    assert tool.main(["verify", str(run)]) == 74
    assert "manifest.json is of step 7" in capsys.readouterr().out


def test_show(tool, saved: Path, capsys) -> None:
    assert tool.main(["show", str(saved), "--tensors"]) == 0
    out = capsys.readouterr().out
    assert "embedding.word_embeddings.weight  [256 x 32] bfloat16, 16,384 bytes in 2 parts" in out
    assert "random_state" in out and '"hidden_size"' in out
    assert tool.main(["show", str(saved), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    tensors = {tensor["name"]: tensor for tensor in shown["tensors"]}
    assert tensors["decoder.layers.mlp.linear_fc1.weight"]["shape"] == [2, 128, 32]
    assert shown["config"]["model"]["hidden_size"] == 32 and shown["step"] == 7
    assert shown["history"]["skipped"] == []
    assert shown["num_parameters"] > 256 * 32


def test_scales_are_no_parameters(tool, tmp_path: Path, capsys) -> None:
    """The checkpoint has those of both data-parallel ranks."""
    numbers = []
    for kind in ("", "--fp8-format hybrid --fp8-recipe delayed --tp-only-amax-red"):
        flags = f"{FLAGS.replace('--tensor-model-parallel-size 2', '')} {kind}"
        folder = save_initial(tmp_path / f"run{len(numbers)}", configure(flags), world_size=2)
        assert tool.main(["show", str(folder), "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert bool(kind) == any(".quantizer_state." in tensor["name"] for tensor in shown["tensors"])
        numbers.append(shown["num_parameters"])
    assert numbers[0] == numbers[1]


def test_prune_keeps_the_newest_complete_checkpoints(tool, run: Path, capsys) -> None:
    for step in (8, 9, 10):
        copy_as_step(run / "iter_0000007", run, step)
    (run / "iter_0000003.corrupt").mkdir()
    assert tool.main(["prune", str(run), "--ckpt-keep", "2", "--dry-run"]) == 0
    assert complete_steps(run) == [7, 8, 9, 10]
    name = damage(run / "iter_0000010")
    assert tool.main(["prune", str(run), "--ckpt-keep", "2"]) == 74
    assert "iter_0000010 would be kept and is damaged" in capsys.readouterr().err
    assert complete_steps(run) == [7, 8, 9, 10]
    shutil.copy(run / "iter_0000007" / name, run / "iter_0000010" / name)
    assert tool.main(["prune", str(run), "--ckpt-keep", "2", "--set-aside", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["deleted"] == ["iter_0000007", "iter_0000008", "iter_0000003.corrupt"]
    assert complete_steps(run) == [9, 10] and not (run / "iter_0000003.corrupt").exists()
    assert tool.main(["prune", str(run), "--ckpt-keep", "0"]) == 64


def test_seal_writes_a_missing_manifest(tool, run: Path, capsys) -> None:
    path = run / "iter_0000007"
    before = read_manifest(path)
    assert tool.main(["seal", str(path)]) == 74
    (path / MANIFEST).unlink()
    assert tool.main(["seal", str(path)]) == 0
    assert read_manifest(path).files == before.files
    assert find_damage(path) == []
    (path / MANIFEST).unlink()
    assert tool.main(["seal", str(path.rename(run / "iter_0000008"))]) == 74
    assert "contains step 7" in capsys.readouterr().err


def test_merge(tool, run: Path, tmp_path: Path, capsys) -> None:
    copy_as_step(run / "iter_0000007", run, 9)
    output = tmp_path / "merged"
    command = ["merge", str(run), "--ckpt-step", "7", "9", "--output", str(output)]
    assert tool.main([*command, "--weights", "ema", "--ema-decay", "0.5"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        f"{output / 'iter_0000007'} is the mean in FP32, without optimizer state\nmerged     --weights"
    )
    assert f"  0.333333  {run / 'iter_0000007'}  step 7, FP32 main weights, manifest " in out
    assert tool.main(["verify", str(output)]) == 0 and tool.main(["show", str(output)]) == 0
    assert "ema 0.5" in capsys.readouterr().out
    assert tool.main(["show", str(output), "--json"]) == 0
    merged = json.loads(capsys.readouterr().out)["merged"]
    assert [source["step"] for source in merged["sources"]] == [7, 9]
    assert tool.main(command) == 64 and "exists; give a folder that does not" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        ("RUN --output OUT", 64, "give --ckpt-step, or folders of checkpoints"),
        ("RUN --ckpt-step 7 --output OUT", 64, "give at least two checkpoints"),
        ("RUN --ckpt-step 7 7 --output OUT", 64, "each of them once"),
        ("RUN --ckpt-step 7 8 --output OUT", 74, "--ckpt-step 8: "),
        ("RUN/iter_0000007 --ckpt-step 7 --output OUT", 64, "iter_0000007 is one checkpoint"),
        ("RUN/iter_0000007 NONE --output OUT", 74, "NONE: there is no such folder"),
        ("RUN --ckpt-step 7 9 --output OUT/iter_0000009", 64, "has the name of a checkpoint"),
        ("RUN --ckpt-step 7 7 --output OUT --ema", 64, "give at least one checkpoint, each of them once"),
        ("RUN --ckpt-step 7 --output OUT --ema", 74, "has no moving average of the weights: its run needs --ema-decay"),
        ("RUN --ckpt-step 7 9 --output OUT --ema-decay 0.5", 64, "--ema-decay 0.5 needs --weights ema"),
        ("RUN --ckpt-step 7 9 --output OUT --weights ema --ema-decay 1", 64, "must be between 0 and 1"),
    ],
)
def test_what_merge_refuses(words: str, status: int, text: str, tool, run: Path, tmp_path: Path, capsys) -> None:
    copy_as_step(run / "iter_0000007", run, 9)
    command = words.replace("RUN", str(run)).replace("OUT", str(tmp_path / "out")).split()
    assert tool.main(["merge", *command]) == status
    assert text in capsys.readouterr().err and not list(tmp_path.glob("out*"))


def test_merge_refuses_urls(tool, capsys) -> None:
    with pytest.raises(SystemExit, match="64"):
        tool.main(["merge", "s3://bucket/run", "--ckpt-step", "7", "9", "--output", "out"])
    assert "is a URL, but this flag takes a path" in capsys.readouterr().err


def test_merge_refuses_a_damaged_checkpoint(tool, run: Path, tmp_path: Path, capsys) -> None:
    copy_as_step(run / "iter_0000007", run, 9)
    name = damage(run / "iter_0000007")
    assert tool.main(["merge", str(run), "--ckpt-step", "7", "9", "--output", str(tmp_path / "out")]) == 74
    assert f"{name} is damaged" in capsys.readouterr().err and not list(tmp_path.glob("out*"))
