"""A crafted checkpoint runs no code, reads no file outside its folder and takes no more memory than its files.

Each payload is put where a loader reads it, and would create a file if it ran. A first test shows that it runs in a
plain loader, so that the tests below can fail.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import os
import pickle
import shutil
import subprocess
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.strategies.torch import MCoreLoadPlanner, TorchDistLoadShardedStrategy
from ranks import RankFailed, run_ranks
from saved_run import build_initial, configure, save_initial
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from megafp8.checkpoint.directory import find_checkpoint
from megafp8.checkpoint.load import load_weights
from megafp8.checkpoint.metadata import read_config
from megafp8.checkpoint.serialization import (
    COMMON_FILE,
    FORMAT_FILE,
    METADATA_FILE,
    UNSAFE_LOAD_VARIABLE,
    SafeLoadPlanner,
    SafeReader,
    check_archive,
)
from megafp8.errors import CheckpointError

FLAGS = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --vocab-size 64 --transformer-impl local"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint. Tests must not write to it."""
    folder = save_initial(tmp_path_factory.mktemp("saved"), configure(FLAGS))
    return find_checkpoint(folder)[1]


@pytest.fixture
def path(saved: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(saved, tmp_path / saved.name))


class Call:
    """Pickles as a call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any):
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


class Build(Call):
    """Pickles as a call whose result then gets a state."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (*self.call, {"state": 1})


def payloads(flag: Path) -> dict[str, bytes]:
    """Pickles that create a file."""
    command = f"touch {flag}"
    calls = {
        "os.system": Call(os.system, command),
        "os.mkdir": Call(os.mkdir, str(flag)),
        "eval": Call(eval, f"open({str(flag)!r}, 'w')"),
        "exec": Call(exec, f"open({str(flag)!r}, 'w')"),
        "open": Call(open, str(flag), "w"),
        "subprocess": Call(subprocess.check_call, ["touch", str(flag)]),
        "popen": Call(subprocess.Popen, ["touch", str(flag)]),
        "getattr": Call(getattr, Call(__import__, "os"), "system"),
        "shutil": Call(shutil.copy, "/etc/hostname", str(flag)),
        "path": Call(Path.touch, flag),
        "state": Build(os.system, command),
        "inside a list": [1, {"weights": Call(os.system, command)}],
        "as a key": {Call(os.system, command): 1},
        "torch.load": Call(torch.load, str(flag)),
    }
    found = {name: pickle.dumps(call) for name, call in calls.items()}
    text = command.encode()
    found["opcode INST"] = b"(S'" + text + b"'\nios\nsystem\n."
    found["opcode OBJ"] = b"(cos\nsystem\nS'" + text + b"'\no."
    found["opcode STACK_GLOBAL"] = b"\x8c\x02os\x8c\x06system\x93(S'" + text + b"'\ntR."
    found["dotted name"] = b"\x80\x04\x8c\x05torch\x8c\x12os.system.__call__\x93(S'" + text + b"'\ntR."
    found["an allowed module's"] = b"\x80\x04\x8c\x13torch.serialization\x8c\x09os.system\x93(S'" + text + b"'\ntR."
    found["before a real object"] = found["opcode INST"][:-1] + b"0" + pickle.dumps(torch.Size([1]))
    return found


NAMES = tuple(payloads(Path("flag")))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("getattr", "torch.load", "dotted name")])
def test_the_payloads_are_live(name: str, tmp_path: Path) -> None:
    """In a plain loader they run. The others abort, or only look up an object."""
    with contextlib.suppress(Exception):
        pickle.loads(payloads(tmp_path / "flag")[name])
    deadline = time.monotonic() + 5
    while not (tmp_path / "flag").exists() and time.monotonic() < deadline:
        time.sleep(0.01)  # for the one that does not wait
    assert (tmp_path / "flag").exists()


def archive_of(content: bytes, like: Path) -> bytes:
    """A torch archive whose pickle is this."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(like) as good, zipfile.ZipFile(buffer, "w") as bad:
        for member in good.infolist():
            bad.writestr(member, content if member.filename.endswith("data.pkl") else good.read(member))
    return buffer.getvalue()


@pytest.mark.parametrize("name", NAMES)
def test_metadata_runs_nothing(name: str, path: Path, tmp_path: Path) -> None:
    (path / METADATA_FILE).write_bytes(payloads(tmp_path / "flag")[name])
    with pytest.raises(pickle.UnpicklingError, match="refused"):
        SafeReader(path).read_metadata()
    assert not (tmp_path / "flag").exists()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol:UserWarning")
@pytest.mark.parametrize("name", NAMES)
def test_plain_values_run_nothing(name: str, path: Path, tmp_path: Path) -> None:
    content = payloads(tmp_path / "flag")[name]
    for file in (content, archive_of(content, path / COMMON_FILE)):
        (path / COMMON_FILE).write_bytes(file)
        with pytest.raises(CheckpointError, match="cannot be read as a checkpoint"):
            read_config(path)
    assert not (tmp_path / "flag").exists()


def test_without_plain_values_nothing_else_is_unpickled(path: Path, tmp_path: Path) -> None:
    """megatron-core 0.19 searches the other files for them, and unpickles their metadata: of all ranks, and of each."""
    (path / COMMON_FILE).unlink()
    for name in (METADATA_FILE, "__0.metadata"):
        (path / name).write_bytes(payloads(tmp_path / "flag")["os.mkdir"])
    with pytest.raises(CheckpointError, match=f"has no {COMMON_FILE}"):
        read_config(path)
    assert not (tmp_path / "flag").exists()


class Evil:
    """A module's extra state: an object that is no tensor."""

    def __init__(self, flag: Path):
        self.flag = flag

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.flag),)


@pytest.mark.parametrize("guarded", [True, False])
def test_objects_run_nothing(guarded: bool, path: Path, tmp_path: Path) -> None:
    """Random state and other objects are stored beside the tensors. torch's own planner runs them."""

    def load() -> str:
        stream = io.BytesIO()
        torch.save({"state": Evil(tmp_path / "flag")}, stream)
        stream.seek(0)
        planner = (SafeLoadPlanner if guarded else MCoreLoadPlanner)()
        planner.original_state_dict, planner.mappings = {}, {"key": ("key",)}
        item = SimpleNamespace(dest_index=SimpleNamespace(fqn="key"))
        try:
            planner.load_bytes(item, stream)
        except pickle.UnpicklingError as error:
            return str(error)
        return ""

    text = load()
    assert (tmp_path / "flag").exists() != guarded
    assert ("Weights only load failed" in text) == guarded


def rewrite(path: Path, change: Callable[[Metadata], None]) -> None:
    """Change a checkpoint's metadata."""
    with open(path / METADATA_FILE, "rb") as stream:
        metadata = pickle.load(stream)
    change(metadata)
    (path / METADATA_FILE).write_bytes(pickle.dumps(metadata))


def point_to(name: str) -> Callable[[Metadata], None]:
    """Let the first tensor be in another file."""

    def change(metadata: Metadata) -> None:
        index, location = next(iter(metadata.storage_data.items()))
        metadata.storage_data[index] = dataclasses.replace(location, relative_path=name)

    return change


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../iter_0000007/common.pt", "sub/../common.pt", "..", "", "link", "pipe"]
)
def test_only_files_of_the_folder_are_read(name: str, path: Path) -> None:
    (path / "sub").mkdir()
    (path / "link").symlink_to("/etc/passwd")
    os.mkfifo(path / "pipe")
    rewrite(path, point_to(name))
    with pytest.raises(CheckpointError, match="is not a regular file in that folder"):
        SafeReader(path).read_metadata()


@pytest.mark.parametrize("name", [METADATA_FILE, COMMON_FILE, FORMAT_FILE])
@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_small_files_must_be_regular(kind: str, name: str, path: Path) -> None:
    """A named pipe would block forever."""
    (path / name).rename(path / "moved")
    make = {"link": lambda: (path / name).symlink_to(path / "moved"), "pipe": lambda: os.mkfifo(path / name)}
    make.get(kind, (path / name).mkdir)()
    with pytest.raises(CheckpointError, match="is not a regular file"):
        read_config(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda location: dataclasses.replace(location, offset=-1),
        lambda location: dataclasses.replace(location, length=-5),
        lambda location: dataclasses.replace(location, transform_descriptors=["zstd"]),
    ],
)
def test_impossible_offsets_are_refused(change: Callable[[Any], Any], path: Path) -> None:
    def change_one(metadata: Metadata) -> None:
        index, location = next(iter(metadata.storage_data.items()))
        metadata.storage_data[index] = change(location)

    rewrite(path, change_one)
    with pytest.raises(CheckpointError, match="an unexpected entry"):
        SafeReader(path).read_metadata()


def test_metadata_of_another_type_is_refused(path: Path) -> None:
    (path / METADATA_FILE).write_bytes(pickle.dumps({"storage_data": {}}))
    with pytest.raises(CheckpointError, match="contains a dict instead of metadata"):
        SafeReader(path).read_metadata()


def test_a_zip_bomb_is_not_unpacked(path: Path) -> None:
    """A thousand times its size, from zeros."""
    bomb = path / COMMON_FILE
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(1 << 24))
    assert bomb.stat().st_size < 1 << 16
    with pytest.raises(CheckpointError, match="has compressed entries"):
        read_config(path)
    with open(bomb, "rb") as stream, pytest.raises(CheckpointError, match="has compressed entries"):
        check_archive(stream, 1 << 30, "bomb")


def test_an_environment_that_allows_code_execution_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(UNSAFE_LOAD_VARIABLE, "1")
    with pytest.raises(CheckpointError, match=f"{UNSAFE_LOAD_VARIABLE}=1 allows checkpoints to run code"):
        read_config(path)
    monkeypatch.setenv(UNSAFE_LOAD_VARIABLE, "0")
    read_config(path)


def test_loading_uses_the_safe_reader(path: Path) -> None:
    """The purpose of the tests above: loading weights reaches the refusals."""
    config = read_config(path)
    run_ranks(1, lambda: load_weights(path, build_initial(config).chunks))
    rewrite(path, point_to("/etc/passwd"))
    with pytest.raises(RankFailed, match="lists the file '/etc/passwd'"):
        run_ranks(1, lambda: load_weights(path, build_initial(config).chunks))


def test_torch_still_needs_the_safe_reader() -> None:
    """When these are removed from torch and megatron-core, `serialization.py` can become shorter."""
    source = inspect.getsource(FileSystemReader.read_metadata)
    assert "pickle.load(" in source
    assert "weights_only=False" in inspect.getsource(DefaultLoadPlanner.load_bytes)
    assert "MCoreLoadPlanner(" in inspect.getsource(TorchDistLoadShardedStrategy.load)
