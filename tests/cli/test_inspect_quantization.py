"""The command line of tools/inspect_quantization.py as a user starts it."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from forked_script import run_script
from saved_run import configure, save_initial

from megafp8.cli import inspect_quantization

SCRIPT = "tools/inspect_quantization.py"
TOOL = Path(__file__).resolve().parents[2] / SCRIPT


def inspect(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, str(TOOL), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of two layers, split over two pipeline stages and two tensor-parallel ranks."""
    config = configure(
        "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --vocab-size 127 --tensor-model-parallel-size 2 "
        "--pipeline-model-parallel-size 2 --bf16"
    )
    return save_initial(tmp_path_factory.mktemp("run"), config, world_size=4)


def test_help_names_every_flag() -> None:
    result = inspect("--help")
    assert result.returncode == 0
    for flag in ("--recipes", "--formats", "--operand", "--parameter", "--output-dir", "--json"):
        assert flag in result.stdout


def test_choices_equal_those_of_the_library() -> None:
    """The tool has its own lists, so that --help needs no torch."""
    from megafp8.metrics import recipe_comparison
    from megafp8.recipes.base import Operand

    assert inspect_quantization.FORMATS == recipe_comparison.FORMATS
    assert [operand.value for operand in Operand] == list(inspect_quantization.OPERANDS)


def test_the_default_recipes_are_those_that_take_the_shape(capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect_quantization.main(["normal:7x64", "--json"]) == 0
    said, told = capsys.readouterr()
    assert {each["recipe"] for each in json.loads(said)} == set(inspect_quantization.DEFAULT_RECIPES) - {"nvfp4"}
    assert told.startswith("normal:7x64 without nvfp4: nvfp4 needs a multiple of 16 rows")
    assert inspect_quantization.main(["normal:7x64", "--recipes", "nvfp4"]) == 66
    assert "FP8 recipes take any shape" in capsys.readouterr().err


def test_table_and_files_of_a_generated_tensor(tmp_path) -> None:
    result = inspect("normal:256x512", "--output-dir", tmp_path / "out")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith("normal:256x512   [256 x 512] bfloat16, amax 4.")
    tensorwise = next(line for line in lines if line.startswith("tensorwise  e4m3"))
    assert " 31.5" in tensorwise
    assert len([line for line in lines if line.startswith("mxfp8")]) == 4
    results = json.loads((tmp_path / "out" / "quantization.json").read_text())
    assert len(results) == 16
    assert (tmp_path / "out" / "quantization.png").stat().st_size > 10_000


def test_json_has_only_standard_numbers(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "zeros.npy", np.zeros((4, 4), dtype=np.float32))
    torch.save({"w": torch.ones(4, 4)}, tmp_path / "ones.pt")
    assert here([str(tmp_path / "zeros.npy"), "--json", "--recipes", "tensorwise"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["stats"]["sqnr_db"] is None
    assert here([str(tmp_path / "ones.pt"), "--json", "--recipes", "mxfp8", "--formats", "e5m2"]) == 0
    row, _ = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert (row["tensor"], row["format"], row["orientation"]) == ("w", "e5m2", "row")
    assert row["stats"]["sqnr_db"] is None
    assert row["stats"]["max_abs_error"] == 0


def test_weights_of_a_run_are_complete_and_named_by_layer(folder) -> None:
    result = run_script(SCRIPT, folder, "--recipes", "tensorwise", "blockwise", "--formats", "e4m3")
    assert result.returncode == 0, result.stderr
    for layer in (0, 1):
        assert f"decoder.layers.{layer}.mlp.linear_fc1.weight   [256 x 64] bfloat16" in result.stdout
    assert "128x128" in result.stdout
    assert "all 8 tensors, as weight" in result.stdout


def test_values_of_a_checkpoint_equal_the_saved_ones(folder) -> None:
    """Layer by layer, against megatron-core's own reading of the stacked tensor."""
    pattern = "decoder.layers.1.*linear_fc2.weight"
    result = run_script(SCRIPT, folder / "iter_0000007", "--parameter", pattern, "--json", "--recipes", "mxfp8")
    results = json.loads(result.stdout)
    assert {each["tensor"] for each in results} == {"decoder.layers.1.mlp.linear_fc2.weight"}
    stacked = torch.empty(2, 64, 256, dtype=torch.bfloat16)
    torch.distributed.checkpoint.load(
        {"decoder.layers.mlp.linear_fc2.weight": stacked}, checkpoint_id=folder / "iter_0000007", no_dist=True
    )
    assert {each["stats"]["amax"] for each in results} == {stacked[1].abs().max().item()}
    assert stacked[0].abs().max() != stacked[1].abs().max()


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["absent.npy"], 66, "no such file"),
        (["normal:4"], 66, "for example outliers:4096x4096:1000"),
        (["normal:4x4", "--parameter", "x", "--ckpt-step", "3"], 64, "--parameter has no effect"),
        (["normal:4x4", "--delayed-amax-ratio", "0.5"], 64, "without --recipes delayed"),
        (["normal:4x4", "--delayed-amax-ratio", "0", "--recipes", "delayed"], 64, "must be above 0"),
        (["normal:4x4", "--recipes", "nvfp5"], 64, "invalid choice"),
    ],
)
def test_bad_input_is_reported_without_a_traceback(
    arguments: list[str], status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert here(arguments) == status
    output, errors = capsys.readouterr()
    assert output == ""
    assert said in errors


def here(arguments: list[str]) -> int:
    """The exit status of a start in this process, without new imports."""
    try:
        return inspect_quantization.main(arguments)
    except SystemExit as ended:
        return ended.code


def test_folders_without_the_requested_data(folder, tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    assert here([str(tmp_path)]) == 74
    assert "holds no checkpoint" in capsys.readouterr().err
    assert here([str(folder), "--ckpt-step", "8"]) == 74
    assert "has steps: 7" in capsys.readouterr().err
    result = run_script(SCRIPT, folder, "--parameter", "fc9")
    assert result.returncode == 74
    assert "no tensor name matches 'fc9'; the names are" in result.stderr
    assert "Traceback" not in result.stderr
