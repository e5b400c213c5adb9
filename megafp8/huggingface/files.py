"""Files of transformers' models: safetensors read a tensor at a time and written a file at a time, and JSON.

Nothing here is pickle. Only one file's tensors are in memory when files are written.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megafp8.checkpoint.folder import SPARE_BYTES, UNFINISHED
from megafp8.data.atomic import sync_file, sync_folder
from megafp8.errors import CapabilityError, CheckpointError
from megafp8.utils import strict_json
from megafp8.utils.small_files import LIST_BYTES, UnreadableFile, open_regular

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("pytorch_model*.bin", "*.pth", "*.pt")
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F8_E4M3": torch.float8_e4m3fn}


def safetensors() -> Any:
    """The library.

    Raises:
        CapabilityError: it is not installed.
    """
    try:
        import safetensors.torch
    except ImportError as error:
        raise CapabilityError("files of transformers need a library: pip install safetensors") from error
    return safetensors


# --- reading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TheirTensor:
    """What a file says about a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class TheirFiles:
    """The tensors of a model's folder.

    Attributes:
        folder: of the model.
        tensors: by name.

    Raises:
        CheckpointError: there are no safetensors, or they are damaged.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._open: dict[str, Any] = {}
        self.tensors: dict[str, TheirTensor] = {}
        for file in weight_files(folder):
            for name, tensor in self._read_header(folder / file):
                if name in self.tensors:
                    raise CheckpointError(f"{folder} holds {name} twice")
                self.tensors[name] = tensor

    def _read_header(self, path: Path) -> Iterator[tuple[str, TheirTensor]]:
        library = safetensors()
        try:
            open_regular(path).close()  # the library would wait for the writer of a named pipe
            file = library.safe_open(path, framework="pt")
        except (UnreadableFile, OSError, library.SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error
        for name in file.keys():  # noqa: SIM118 (no dictionary)
            part = file.get_slice(name)
            if part.get_dtype() not in DTYPES:
                raise CheckpointError(f"{path}: {name} is {part.get_dtype()}; weights are {', '.join(DTYPES)}")
            self._open[name] = file
            yield name, TheirTensor(tuple(part.get_shape()), DTYPES[part.get_dtype()])

    def load(self, name: str) -> Tensor:
        """One tensor, on the CPU."""
        return self._open[name].get_tensor(name)


def weight_files(folder: Path) -> list[str]:
    """Names of the files with weights.

    Raises:
        CheckpointError: there are none, only pickles, or the index names others than its own folder's.
    """
    if not (folder / INDEX).is_file():
        if (folder / SINGLE).is_file():
            return [SINGLE]
        if pickles := sorted(path.name for pattern in PICKLES for path in folder.glob(pattern)):
            raise CheckpointError(
                f"{folder} has its weights in {pickles[0]}, a pickle, which could run code: convert it where you trust "
                "it, with from_pretrained(FOLDER).save_pretrained(OTHER), and give that folder"
            )
        raise CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX}: it is no folder of a transformers model")
    places = read_json(folder / INDEX).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise CheckpointError(f"{folder / INDEX} has no weight_map")
    names = sorted({str(name) for name in places.values()})
    if strange := [name for name in names if Path(name).name != name or not name.endswith(".safetensors")]:
        raise CheckpointError(f"{folder / INDEX} names {strange[0]!r}: weights are in safetensors files of that folder")
    return names


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        CheckpointError: there is none.
    """
    try:
        content = strict_json.read_json(path, LIST_BYTES)
    except UnreadableFile as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error.reason}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return content


# --- writing ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """Tensors that are made, and written, together.

    Attributes:
        tensors: what they will be, by name.
        make: gives them, contiguous and without memory in common.
    """

    tensors: dict[str, TheirTensor]
    make: Callable[[], dict[str, Tensor]]

    @property
    def num_bytes(self) -> int:
        """Size of all of them."""
        return sum(torch.Size(each.shape).numel() * each.dtype.itemsize for each in self.tensors.values())


def write_pieces(folder: Path, pieces: Sequence[Piece], max_file_bytes: int, on_bytes: Callable[[int], Any]) -> None:
    """Write safetensors files, with an index where there is more than one.

    Args:
        max_file_bytes: of tensors in a file; a piece that is larger has a file of its own.
        on_bytes: told of bytes that were made.

    Raises:
        CheckpointError: the disk has no room for them, or they cannot be written.
    """
    library, shards = safetensors(), shards_of(pieces, max_file_bytes)
    num_bytes, free = sum(piece.num_bytes for piece in pieces), shutil.disk_usage(folder).free
    if num_bytes + SPARE_BYTES > free:
        raise CheckpointError(f"{folder} has {free / 1e9:.3f} GB free and the files take {num_bytes / 1e9:.3f} GB")
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors: dict[str, Tensor] = {}
        for piece in shard:
            tensors |= piece.make()
            on_bytes(piece.num_bytes)
        try:
            library.torch.save_file(tensors, folder / file, metadata={"format": "pt"})
        except (OSError, library.SafetensorError) as error:
            raise CheckpointError(f"{folder / file} cannot be written: {error}") from error
        places |= dict.fromkeys(tensors, file)
    if len(shards) > 1:
        write_json(folder / INDEX, {"metadata": {"total_size": num_bytes}, "weight_map": dict(sorted(places.items()))})


def shards_of(pieces: Sequence[Piece], max_bytes: int) -> list[list[Piece]]:
    """Divide pieces over files, in their order."""
    shards: list[list[Piece]] = [[]]
    room = max_bytes
    for piece in pieces:
        if shards[-1] and piece.num_bytes > room:
            shards.append([])
            room = max_bytes
        shards[-1].append(piece)
        room -= piece.num_bytes
    return shards


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write an object, indented."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to write to, which gets its name when the block ends well, and is deleted when it does not.

    Raises:
        CheckpointError: the name is taken, or the folder cannot be made.
    """
    unfinished = path.with_name(path.name + UNFINISHED)
    if path.exists():
        raise CheckpointError(f"{path} exists; give a folder that does not")
    try:
        unfinished.mkdir(parents=True)
    except FileExistsError as error:
        raise CheckpointError(
            f"{unfinished} exists: another conversion writes it, or one was killed; delete it in the latter case"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{unfinished} cannot be made: {error}") from error
    try:
        yield unfinished
        for file in unfinished.rglob("*"):
            if file.is_file():
                sync_file(file)
        os.rename(unfinished, path)
        sync_folder(path.parent)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
