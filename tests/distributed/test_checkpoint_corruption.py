"""A change of any byte of a checkpoint is detected: it is refused, the file is named, and the previous one is used."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed as dist
from ranks import run_ranks
from saved_run import configure, copy_as_step, save_initial

from megafp8.checkpoint.directory import checkpoint_path
from megafp8.checkpoint.resume_point import choose_checkpoint

FLAGS = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --vocab-size 64 --transformer-impl local"
NEWER, OLDER = 7, 6
FLIPS_A_FILE = 24


@dataclass(frozen=True)
class Mutation:
    """A change to one file of a checkpoint. `make` returns the bytes to write, or None to remove the file."""

    name: str
    kind: str
    make: Callable[[bytes], bytes | None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of two ranks: step 7, and an older one of step 6 with other tensors."""
    base = tmp_path_factory.mktemp("run")
    folder = save_initial(base, configure(f"{FLAGS} --tensor-model-parallel-size 2"), world_size=2)
    other = save_initial(base / "other", configure(f"{FLAGS} --tensor-model-parallel-size 2 --seed 5"), world_size=2)
    copy_as_step(checkpoint_path(other, NEWER), folder, OLDER)
    return folder


def flip(offset: int, bit: int) -> Callable[[bytes], bytes]:
    return lambda content: content[:offset] + bytes([content[offset] ^ 1 << bit]) + content[offset + 1 :]


def cut(length: int) -> Callable[[bytes], bytes]:
    return lambda content: content[:length]


def mutations(newer: Path, older: Path) -> Iterator[Mutation]:
    """Flipped bits, lost starts and ends, and files that are missing, longer, empty, or of another rank or step."""
    generator = random.Random(1)
    contents = {path.name: path.read_bytes() for path in sorted(newer.iterdir())}
    for name, content in contents.items():
        size = len(content)
        offsets = {0, size - 1, *generator.sample(range(size), FLIPS_A_FILE - 2)}
        yield from (Mutation(name, "flip", flip(offset, generator.randrange(8))) for offset in offsets)
        yield from (Mutation(name, "truncate", cut(length)) for length in {0, 1, size // 2, size - 1})
        yield Mutation(name, "remove", lambda content: None)
        yield Mutation(name, "append", lambda content: content + b"\0")
        yield Mutation(name, "zero", lambda content: bytes(len(content)))
        yield Mutation(name, "shift", lambda content: content[1:] + content[:1])
        for sibling, other in contents.items():
            if other != content:
                yield Mutation(name, f"as {sibling}", lambda _, other=other: other)
        if (older / name).read_bytes() != content:
            yield Mutation(name, "older", lambda _, path=older / name: path.read_bytes())


def apply(path: Path, mutation: Mutation) -> bytes:
    """Change a file; returns its previous content."""
    before = (path / mutation.name).read_bytes()
    after = mutation.make(before)
    assert after != before, "a mutation changes something"
    if after is None:
        (path / mutation.name).unlink()
    else:
        (path / mutation.name).write_bytes(after)
    return before


def silent(folder: Path) -> tuple[int, list[str]]:
    """The number of mutations, and those after which the changed checkpoint would be loaded or is not named."""
    newer, missed = checkpoint_path(folder, NEWER), []
    planned = list(mutations(newer, checkpoint_path(folder, OLDER)))
    dist.barrier()  # no rank plans from a file that the writer already changes
    for mutation in planned:
        is_writer = dist.get_rank() == 0
        before = apply(newer, mutation) if is_writer else b""
        dist.barrier()
        choice = choose_checkpoint(folder)
        if choice is None or choice.step != OLDER or mutation.name not in " ".join(choice.notes):
            missed.append(f"{mutation.kind} {mutation.name}")
        if is_writer:
            (newer / mutation.name).write_bytes(before)
        dist.barrier()
    return len(planned), missed


def test_every_changed_byte_of_a_checkpoint_is_detected(folder: Path) -> None:
    assert run_ranks(2, lambda: choose_checkpoint(folder).step) == [NEWER, NEWER], "it is intact initially"
    for count, missed in run_ranks(2, silent, folder):
        assert missed == []
        assert count >= 200
    assert run_ranks(2, lambda: choose_checkpoint(folder).step) == [NEWER, NEWER]
