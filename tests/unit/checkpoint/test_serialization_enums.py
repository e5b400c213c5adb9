"""Enum members in a checkpoint's metadata: Python 3.11.0 to 3.11.3 pickle them as calls of `getattr`.

Of everything that `getattr` can look up, only members of the allowed enums are returned. A save reads its own metadata
back, so a form that the reader refuses is detected while the run still has its weights.
"""

from __future__ import annotations

import enum
import io
import operator
import pickle
import shutil
import subprocess
from fractions import Fraction
from pathlib import Path
from typing import Optional

import pytest
import torch
from ranks import RankFailed, run_ranks
from saved_run import STEP, build_initial, configure, save_initial
from torch.distributed.checkpoint.planner import WriteItemType

from megafp8.checkpoint import save
from megafp8.checkpoint.directory import complete_steps, find_checkpoint
from megafp8.checkpoint.load import load_weights
from megafp8.checkpoint.metadata import read_config
from megafp8.checkpoint.serialization import METADATA_FILE, MetadataUnpickler, SafeReader
from megafp8.checkpoint.standalone import LazyTensor, save_weights
from megafp8.errors import CheckpointError

FLAGS = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --vocab-size 64 --transformer-impl local"


def enums_of_python_3_11_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pickle enum members as Python 3.11.0 to 3.11.3 do."""
    monkeypatch.setattr(enum.Enum, "__reduce_ex__", lambda self, _: (getattr, (type(self), self._name_)))


def test_enums_of_python_3_11_0_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enums_of_python_3_11_0(monkeypatch)
    path = find_checkpoint(save_initial(tmp_path, configure(FLAGS)))[1]
    content = (path / METADATA_FILE).read_bytes()
    assert b"getattr" in content
    assert SafeReader(path).read_metadata() == pickle.loads(content)
    run_ranks(1, lambda: load_weights(path, build_initial(read_config(path)).chunks))


def old_python() -> Optional[str]:
    """An interpreter with such enums, if one is installed."""
    for folder in ("/usr/bin", "/usr/local/bin"):
        python = shutil.which("python3.11", path=folder)
        if python and ask(python, "import sys; print((3, 11) <= sys.version_info < (3, 11, 4))") == b"True\n":
            return python
    return None


def ask(python: str, program: str) -> bytes:
    """The output of a program."""
    return subprocess.run([python, "-I", "-c", program], stdout=subprocess.PIPE, check=True).stdout


@pytest.mark.skipif(old_python() is None, reason="Python 3.11.0 to 3.11.3 is not installed")
def test_an_enum_that_python_3_11_0_pickles_is_read() -> None:
    """Its own bytes, from a class with the real one's name and members. torch is not needed for that."""
    program = f"""
import enum, pickle, sys, types
module = types.ModuleType({WriteItemType.__module__!r})
sys.modules |= {{"torch": module, module.__name__: module}}
module.WriteItemType = enum.Enum("WriteItemType", {[each.name for each in WriteItemType]}, module=module.__name__)
sys.stdout.buffer.write(pickle.dumps(list(module.WriteItemType)))
"""
    content = ask(old_python() or "", program)
    assert b"getattr" in content
    assert MetadataUnpickler(io.BytesIO(content)).load() == list(WriteItemType)


def pickled_call(owner: bytes, name: bytes) -> bytes:
    """Opcodes of a call of `getattr`."""
    return b"cbuiltins\ngetattr\n" + owner + name + b"\x86R"


ENUM = b"ctorch.distributed.checkpoint.planner\nWriteItemType\n"
CLASS = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
MEMBER = pickled_call(ENUM, b"S'SHARD'\n")
ENUM_ATTRIBUTES = (
    "__class__", "__members__", "__subclasses__", "__init_subclass__", "__reduce_ex__", "__dict__", "__module__", "mro",
    "_member_map_", "_missing_", "_value2member_map_", "name", "value", "SHARD.__class__", "shard", "",
)  # fmt: skip

NO_TEXTS = b"K\x01", b"N", b"]", b"C\x05SHARD"


@pytest.mark.parametrize(
    "content",
    [
        *(pytest.param(pickled_call(ENUM, f"S'{name}'\n".encode()), id=f"enum.{name}") for name in ENUM_ATTRIBUTES),
        pytest.param(pickled_call(CLASS, b"S'__init__'\n"), id="a method of an allowed class"),
        pytest.param(pickled_call(CLASS, b"S'__members__'\n"), id="no enum"),
        pytest.param(pickled_call(b"ctorch\nSize\n", b"S'numel'\n"), id="a type in C"),
        pytest.param(pickled_call(b"ctorch\nfloat32\n", b"S'itemsize'\n"), id="an allowed object"),
        pytest.param(pickled_call(b"ctorch.serialization\n_get_layout\n", b"S'__globals__'\n"), id="a function"),
        pytest.param(pickled_call(b"cbuiltins\ngetattr\n", b"S'__globals__'\n"), id="itself"),
        pytest.param(pickled_call(MEMBER, b"S'__class__'\n"), id="a chain"),
        pytest.param(pickled_call(MEMBER, b"S'FIELDS'\n"), id="a chain of members"),
        pytest.param(pickled_call(b"S'os'\n", b"S'system'\n"), id="a module's name"),
        pytest.param(pickled_call(b"N", b"S'__class__'\n"), id="None"),
        *(pytest.param(pickled_call(ENUM, name), id=f"name {name!r}") for name in NO_TEXTS),
        pytest.param(pickled_call(b"cenum\nEnum\n", b"S'mro'\n"), id="another class"),
        pytest.param(pickled_call(b"\x8c\x02os\x8c\x00\x93", b"S'system'\n"), id="a module"),
        pytest.param(b"c__builtin__\ngetattr\n" + ENUM + b"S'SHARD'\n\x86R", id="Python 2's name"),
        pytest.param(b"\x80\x04\x8c\x08builtins\x8c\x10getattr.__call__\x93" + ENUM + b"S'SHARD'\n\x86R", id="dotted"),
        pytest.param(b"(ibuiltins\nsetattr\n", id="setattr"),
    ],
)
def test_getattr_returns_only_enum_members(content: bytes) -> None:
    with pytest.raises(pickle.UnpicklingError, match="refused"):
        MetadataUnpickler(io.BytesIO(content + b".")).load()


def test_getattr_returns_enum_members() -> None:
    """The valid call that the calls above modify."""
    assert MetadataUnpickler(io.BytesIO(MEMBER + b".")).load() is WriteItemType.SHARD


@pytest.fixture
def newer_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python that pickles enum members in a form that the reader does not know."""
    monkeypatch.setattr(enum.Enum, "__reduce_ex__", lambda self, _: (operator.attrgetter(self._name_), (type(self),)))


REFUSED = r"cannot be read with Python .*constraints\.txt.*operator.attrgetter, which is refused"


def test_a_save_whose_metadata_cannot_be_read_fails(tmp_path: Path, newer_python: None) -> None:
    """As with any failed save: nothing of it is left, so a run can continue or save again."""
    with pytest.raises(RankFailed, match=f"step {STEP} cannot be saved to .*{REFUSED}") as failed:
        save_initial(tmp_path, configure(FLAGS))
    assert isinstance(failed.value.__cause__, CheckpointError)
    assert list(tmp_path.iterdir()) == []


def test_weights_whose_metadata_cannot_be_read_are_not_saved(tmp_path: Path, newer_python: None) -> None:
    source = LazyTensor((2, 2), torch.float32, lambda: torch.ones(2, 2))
    with pytest.raises(CheckpointError, match=REFUSED):
        save_weights(tmp_path, configure(FLAGS), {"decoder.final_layernorm.weight": source})
    assert complete_steps(tmp_path) == []


def test_a_save_whose_plain_values_cannot_be_read_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = save.build_state_dict
    monkeypatch.setattr(save, "build_state_dict", lambda *args: plain(*args) | {"step": Fraction(1)})
    with pytest.raises(RankFailed, match="(?s)cannot be read.*fractions.Fraction"):
        save_initial(tmp_path, configure(FLAGS))
    assert list(tmp_path.iterdir()) == []
