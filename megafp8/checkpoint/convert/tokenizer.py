"""A run's tokenizer as the files that transformers reads, and the other way round."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from megafp8.checkpoint.convert.safetensors_files import write_json
from megafp8.config import derived
from megafp8.config.schema import DataConfig
from megafp8.data.tokenizers.build import SENTENCEPIECE_TYPES, Tokenizer, build_tokenizer
from megafp8.errors import CapabilityError, DataError

SETTINGS, VOCABULARY, MERGES, SENTENCEPIECE = "tokenizer_config.json", "vocab.json", "merges.txt", "tokenizer.model"
OF_TOKENIZERS = "tokenizer.json"
# What may lie beside tokenizer.json and says more about it.
COMPANIONS = (SETTINGS, "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")


def open_tokenizer(data: DataConfig, vocab_size: Optional[int]) -> Optional[Tokenizer]:
    """The run's tokenizer; None where its settings name none.

    Raises:
        DataError: its files are not where they were.
    """
    if derived.tokenizer_type(data) is None:
        return None
    try:
        return build_tokenizer(data, vocab_size)
    except DataError as error:
        flags = "--vocab-file and --merge-file" if data.vocab_file else "--tokenizer-model"
        raise DataError(f"{error} The run was trained with it; {flags} says where it is now.") from error


def notes_on_tokenizer(data: DataConfig) -> list[str]:
    """What transformers does not make of the tokenizer's files, in words."""
    kind = derived.tokenizer_type(data)
    if kind is None:
        return ["the run has no tokenizer"]
    if kind in SENTENCEPIECE_TYPES:
        return [
            f"{SENTENCEPIECE} is written, but transformers' tokenizer of Llama makes other ids of it: {reason}"
            for reason in foreign_to_llama(Path(data.tokenizer_model or ""))
        ]
    is_known = kind in ("HuggingFaceTokenizer", "GPT2BPETokenizer")
    return [] if is_known else [f"no tokenizer's files: transformers has no {kind}"]


def write_tokenizer(data: DataConfig, folder: Path) -> None:
    """Put a tokenizer's files into a model's folder, if transformers reads them.

    Args:
        data: with the files' places.
    """
    kind = derived.tokenizer_type(data)
    if kind == "HuggingFaceTokenizer":
        source = Path(data.tokenizer_model or "")
        file = source / OF_TOKENIZERS if source.is_dir() else source
        shutil.copyfile(file, folder / OF_TOKENIZERS)
        for name in COMPANIONS:
            if (file.parent / name).is_file():
                shutil.copyfile(file.parent / name, folder / name)
    elif kind == "GPT2BPETokenizer":
        shutil.copyfile(data.vocab_file or "", folder / VOCABULARY)
        shutil.copyfile(data.merge_file or "", folder / MERGES)
        write_json(folder / SETTINGS, {"tokenizer_class": "GPT2Tokenizer"})
    elif kind in SENTENCEPIECE_TYPES:
        shutil.copyfile(data.tokenizer_model or "", folder / SENTENCEPIECE)
        write_json(folder / SETTINGS, sentencepiece_settings(folder / SENTENCEPIECE))


def sentencepiece_settings(path: Path) -> dict[str, Any]:
    """Settings by which transformers' tokenizer of Llama makes of a text what the model makes of it, and adds nothing.

    (A text that spells a special token is that token there, as in all tokenizers of transformers.)
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


def foreign_to_llama(path: Path) -> list[str]:
    """What of a SentencePiece model transformers' tokenizer of Llama does in another way."""
    model = read_sentencepiece(path)
    normalizer, trainer = model.normalizer_spec, model.trainer_spec
    checks = (
        (trainer.model_type != trainer.BPE, "it is no BPE"),
        (normalizer.name != "identity", f"it normalizes text by {normalizer.name}"),
        (normalizer.remove_extra_whitespaces, "it removes spaces"),
        (not trainer.byte_fallback, "it has no bytes to fall back on"),
    )
    return [text for is_other, text in checks if is_other]


def read_sentencepiece(path: Path) -> Any:
    """The message in a SentencePiece model's file."""
    from sentencepiece.sentencepiece_model_pb2 import ModelProto

    return ModelProto.FromString(path.read_bytes())


@dataclass(frozen=True)
class FoundTokenizer:
    """A tokenizer in a model's folder.

    Attributes:
        settings: of the data section: its type, and its files by name.
        files: all that belong to it.
        tokenizer: itself.
    """

    settings: dict[str, str]
    files: tuple[Path, ...]
    tokenizer: Tokenizer

    def copy(self, folder: Path, final: Path) -> dict[str, str]:
        """Copy the files, and give settings that name them.

        Args:
            folder: where to; made here.
            final: what the folder will be called.
        """
        folder.mkdir()
        for file in self.files:
            shutil.copyfile(file, folder / file.name)
        return {
            field: value if field == "tokenizer_type" else str(final / Path(value).name)
            for field, value in self.settings.items()
        }


def find_tokenizer(folder: Path) -> Optional[FoundTokenizer]:
    """The tokenizer of a model's folder that megafp8 reads, ids and end of document as there; None without one."""
    for settings in candidates(folder):
        paths = [folder / Path(value).name for field, value in settings.items() if field != "tokenizer_type"]
        try:
            tokenizer = build_tokenizer(DataConfig(**settings))
        except (DataError, CapabilityError):
            continue
        beside = [folder / name for name in COMPANIONS] if paths[0].name == OF_TOKENIZERS else []
        return FoundTokenizer(settings, tuple(path for path in (*paths, *beside) if path.is_file()), tokenizer)
    return None


def candidates(folder: Path) -> Iterator[dict[str, str]]:
    """Settings of the tokenizers that a folder has files for."""
    if (folder / OF_TOKENIZERS).is_file():
        yield {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(folder / OF_TOKENIZERS)}
    if (folder / VOCABULARY).is_file() and (folder / MERGES).is_file():
        yield {
            "tokenizer_type": "GPT2BPETokenizer",
            "vocab_file": str(folder / VOCABULARY),
            "merge_file": str(folder / MERGES),
        }
    if (folder / SENTENCEPIECE).is_file():
        yield {"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": str(folder / SENTENCEPIECE)}
