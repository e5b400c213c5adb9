"""Conversion of a run's tokenizer to and from the files of transformers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from megafp8.checkpoint.convert.companion_files import read_companion
from megafp8.checkpoint.convert.safetensors_files import write_json
from megafp8.config import derived
from megafp8.config.schema import DataConfig
from megafp8.data.tokenizers.build import SENTENCEPIECE_TYPES, Tokenizer, build_tokenizer
from megafp8.data.tokenizers.library_calls import NoEndOfDocument, library_failures, read_tokenizer_file
from megafp8.errors import CapabilityError, DataError

SETTINGS_FILE, VOCAB_FILE, MERGES_FILE, SENTENCEPIECE_FILE = (
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
TOKENIZERS_FILE = "tokenizer.json"
# Fields of the data section and the files that they name, in order of preference.
FILES_BY_TYPE = {
    "HuggingFaceTokenizer": {"tokenizer_model": TOKENIZERS_FILE},
    "GPT2BPETokenizer": {"vocab_file": VOCAB_FILE, "merge_file": MERGES_FILE},
    "SentencePieceTokenizer": {"tokenizer_model": SENTENCEPIECE_FILE},
}
# Optional files that accompany tokenizer.json.
COMPANION_FILES = (SETTINGS_FILE, "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")


def tokenizer_notes(data: DataConfig) -> list[str]:
    """Return what transformers handles differently in the tokenizer's files, as text."""
    kind = derived.tokenizer_type(data)
    if kind is None:
        return ["the run has no tokenizer"]
    if kind in SENTENCEPIECE_TYPES:
        return [
            f"{SENTENCEPIECE_FILE} is written, but transformers' tokenizer of Llama makes other ids of it: {reason}"
            for reason in differences_from_llama(Path(data.tokenizer_model or ""))
        ]
    is_known = kind in ("HuggingFaceTokenizer", "GPT2BPETokenizer")
    return [] if is_known else [f"no tokenizer's files: transformers has no {kind}"]


def read_file(path: Path) -> Optional[bytes]:
    """Return the content of a tokenizer's file; None if there is none.

    Raises:
        CheckpointError: it is not a regular file of at most 256 MiB, or a companion is a link out of the folder. Other
            files may be such links, because a tokenizer is built from them before they are copied.
    """
    return read_companion(path, follows_links=path.name not in COMPANION_FILES)


def copy_file(source: Path, destination: Path) -> None:
    """Copy a file of a tokenizer if there is one; errors as `read_file`."""
    content = read_file(source)
    if content is not None:
        destination.write_bytes(content)


def files_to_copy(data: DataConfig) -> dict[str, Path]:
    """Return a tokenizer's files by their names in a model's folder, if transformers can read them.

    Args:
        data: settings with the paths of the files.

    Raises:
        CheckpointError: as `read_file`.
    """
    kind, model = derived.tokenizer_type(data), Path(data.tokenizer_model or "")
    files = {}
    if kind == "HuggingFaceTokenizer":
        file = model / TOKENIZERS_FILE if model.is_dir() else model
        files = {TOKENIZERS_FILE: file} | {name: file.parent / name for name in COMPANION_FILES}
    elif kind == "GPT2BPETokenizer":
        files = {VOCAB_FILE: Path(data.vocab_file or ""), MERGES_FILE: Path(data.merge_file or "")}
    elif kind in SENTENCEPIECE_TYPES:
        files = {SENTENCEPIECE_FILE: model}
    return {name: file for name, file in files.items() if read_file(file) is not None}


def write_tokenizer(data: DataConfig, folder: Path) -> None:
    """Write the files of `files_to_copy` and settings for transformers into a model's folder; errors as there."""
    for name, file in files_to_copy(data).items():
        copy_file(file, folder / name)
    kind = derived.tokenizer_type(data)
    if kind == "GPT2BPETokenizer":
        write_json(folder / SETTINGS_FILE, {"tokenizer_class": "GPT2Tokenizer"})
    elif kind in SENTENCEPIECE_TYPES:
        write_json(folder / SETTINGS_FILE, sentencepiece_settings(folder / SENTENCEPIECE_FILE))


def sentencepiece_settings(path: Path) -> dict[str, Any]:
    """Return settings with which transformers' Llama tokenizer encodes like the SentencePiece model.

    No tokens are added. As in all tokenizers of transformers, text that spells a special token becomes that token.
    """
    model = read_sentencepiece(path)
    pieces, ids = model.pieces, model.trainer_spec
    return {
        "tokenizer_class": "LlamaTokenizer",
        "add_bos_token": False,
        "add_eos_token": False,
        "add_prefix_space": model.normalizer_spec.add_dummy_prefix,
        "legacy": False,
        "unk_token": pieces[ids.unk_id].piece,
        "bos_token": pieces[ids.bos_id].piece if ids.bos_id >= 0 else None,
        "eos_token": pieces[ids.eos_id].piece,
    }


def differences_from_llama(path: Path) -> list[str]:
    """Return how transformers' Llama tokenizer would differ from a SentencePiece model, as text."""
    model = read_sentencepiece(path)
    normalizer, trainer = model.normalizer_spec, model.trainer_spec
    checks = (
        (trainer.model_type != trainer.BPE, "it is no BPE"),
        (normalizer.name != "identity", f"it normalizes text by {normalizer.name}"),
        (normalizer.remove_extra_whitespaces, "it removes spaces"),
        (not trainer.byte_fallback, "it has no bytes to fall back on"),
    )
    return [text for is_different, text in checks if is_different]


def read_sentencepiece(path: Path) -> Any:
    """Return the protobuf message of a SentencePiece model.

    Raises:
        DataError: the file is none.
    """
    from sentencepiece import sentencepiece_model_pb2

    # protobuf makes the class at import, so type checkers do not see it.
    with library_failures(f"{path} is not a SentencePiece model"):
        content = read_tokenizer_file(path, "--tokenizer-model")
        return vars(sentencepiece_model_pb2)["ModelProto"].FromString(content)


@dataclass(frozen=True)
class FoundTokenizer:
    """A tokenizer in a model's folder.

    Attributes:
        settings: of the data section: type and files.
        files: all files that belong to it.
        tokenizer: the tokenizer itself.
    """

    settings: dict[str, Any]
    files: tuple[Path, ...]
    tokenizer: Tokenizer

    def copy(self, folder: Path, final: Path) -> dict[str, str]:
        """Copy the files and return settings that refer to the copies.

        Args:
            folder: destination; made here.
            final: path that the destination will be renamed to.
        """
        folder.mkdir()
        for file in self.files:
            copy_file(file, folder / file.name)
        return {
            field: value if field == "tokenizer_type" else str(final / Path(value).name)
            for field, value in self.settings.items()
        }


def find_tokenizer(folder: Path) -> Optional[FoundTokenizer]:
    """Return the folder's tokenizer if megafp8 can read it with the same IDs and end of document; else None.

    Raises:
        CheckpointError: as `read_file`.
        DataError: a file is damaged.
    """
    for settings in candidate_settings(folder):
        paths = [folder / Path(value).name for field, value in settings.items() if field != "tokenizer_type"]
        paths += [folder / name for name in COMPANION_FILES] if paths[0].name == TOKENIZERS_FILE else []
        files = tuple(path for path in paths if read_file(path) is not None)
        try:
            tokenizer = build_tokenizer(DataConfig(**settings))
        except (NoEndOfDocument, CapabilityError):
            continue
        except DataError as error:
            raise DataError(f"{str(error).rstrip('.')}; repair the file, or move it away") from error
        return FoundTokenizer(settings, files, tokenizer)
    return None


def candidate_settings(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield settings of the tokenizers that a folder has files for."""
    for tokenizer_type, files in FILES_BY_TYPE.items():
        if all(os.path.lexists(folder / name) for name in files.values()):
            paths = {field: str(folder / name) for field, name in files.items()}
            yield {"tokenizer_type": tokenizer_type, **paths}
