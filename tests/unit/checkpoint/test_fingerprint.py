"""The hash of a checkpoint's content: equal for equal state in other files, different for any other state."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import run_ranks
from saved_run import STEP, build_initial, configure

from megafp8.checkpoint.directory import checkpoint_path
from megafp8.checkpoint.fingerprint import fingerprint
from megafp8.checkpoint.progress import Progress
from megafp8.checkpoint.save import save_checkpoint
from megafp8.config.schema import RunConfig

FLAGS = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --vocab-size 63 --make-vocab-size-divisible-by 32 "
    "--fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 2"
)
TENSOR = "--tensor-model-parallel-size 2"
TOOL = Path(__file__).resolve().parents[3] / "tools" / "checkpoint.py"


def save(folder: Path, config: RunConfig, change: str = "", samples: int = STEP) -> None:
    """Step 0 of a run, with one change."""
    training_state = build_initial(config)
    model = training_state.chunks[0]
    if change == "weights":
        next(model.parameters()).data[-1, -1] += 2.0**-10
    elif change == "scales":
        next(buffer for name, buffer in model.named_buffers() if name.endswith("quant_scale"))[0] = 2
    save_checkpoint(folder, config, training_state, Progress(STEP, samples))


def saved(folder: Path, flags: str = "", world_size: int = 1, change: str = "", samples: int = STEP) -> dict[str, str]:
    run_ranks(world_size, save, folder, configure(f"{FLAGS} {flags}"), change, samples)
    return fingerprint(checkpoint_path(folder, STEP))


def differing(one: dict[str, str], other: dict[str, str]) -> set[str]:
    return {name for name in one if one[name] != other[name]}


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A checkpoint and its hashes. Tests must not write to it."""
    folder = tmp_path_factory.mktemp("first")
    return folder, saved(folder)


def test_the_same_state_has_the_same_hash(first: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    """In another folder, saved at another time, with a setting that changes no state."""
    assert saved(tmp_path, "--log-interval 7") == first[1]


@pytest.mark.parametrize("group_bytes", [1, 1000])
def test_what_is_read_together_does_not_matter(
    group_bytes: int, first: tuple[Path, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megafp8.checkpoint.fingerprint.GROUP_BYTES", group_bytes)
    assert fingerprint(checkpoint_path(first[0], STEP)) == first[1]


@pytest.mark.parametrize("change", ["weights", "scales"])
def test_one_number_changes_the_hash_of_its_part(
    change: str, first: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    assert differing(saved(tmp_path, change=change), first[1]) == {change, "all"}


def test_progress_changes_the_hash(first: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    assert differing(saved(tmp_path, samples=STEP + 1), first[1]) == {"progress", "all"}


def test_only_random_states_depend_on_the_layout(first: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    assert differing(saved(tmp_path, TENSOR, world_size=2), first[1]) == {"random", "all"}


def test_the_command(first: tuple[Path, dict[str, str]]) -> None:
    result = subprocess.run(
        [sys.executable, TOOL, "hash", first[0], "--json"], capture_output=True, text=True, timeout=60, check=True
    )
    assert json.loads(result.stdout) == first[1]
