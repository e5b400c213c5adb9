"""The tokenizer interface, and the construction of a tokenizer from the settings.

Names of tokenizer types and the choice of the end-of-document token are Megatron's. In contrast to the older Megatron
tokenizers, and like megatron-core's newer ones, no type prepends a beginning-of-sentence token, and no SentencePiece
type adds symbols to those of the model.

A tokenizer has no `pad`: megatron-core's datasets would replace every such token of the text by token 0.

This module imports neither numpy nor a tokenizer library, so that the tools' `--help` is fast.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Optional, Protocol

from megafp8.config import derived
from megafp8.config.schema import DataConfig
from megafp8.data.tokenizers.libraries import (
    ByteLevelTokenizer,
    GPT2BPETokenizer,
    HuggingFaceTokenizer,
    NullTokenizer,
    SentencePieceTokenizer,
    TikTokenizer,
)
from megafp8.errors import ConfigError, DataError

# Values of --encoder.
AUTO, GIGATOKEN, LIBRARY = "auto", "gigatoken", "library"
ENCODERS = (AUTO, GIGATOKEN, LIBRARY)

# Settings of the data section that define a tokenizer.
TOKENIZER_PATHS = ("tokenizer_model", "vocab_file", "merge_file")
TOKENIZER_SETTINGS = ("tokenizer_type", *TOKENIZER_PATHS, "tiktoken_pattern", "tiktoken_num_special_tokens")

SENTENCEPIECE_TYPES = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")


class Tokenizer(Protocol):
    """Text to token ids and back.

    Attributes:
        vocab_size: ids are in [0, vocab_size), without the padding of the model's embedding.
        eod: id that ends a document.
        unique_identifiers: everything that decides the ids: class, SHA-256 of the files, vocabulary size, eod. Dataset
            caches and shard manifests compare it, so that a tokenizer retrained under the same path is noticed.
        unknown_id: id of text that the vocabulary lacks, if there is one.
        warnings: what was turned off, for the user.
    """

    vocab_size: int
    eod: int
    unique_identifiers: OrderedDict[str, Any]
    unknown_id: Optional[int]
    warnings: tuple[str, ...]

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of `text`, without added special tokens."""

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return what `tokenize` returns for each text, in one call of the library where it has one."""

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`."""


def build_tokenizer(data: DataConfig, vocab_size: Optional[int] = None) -> Tokenizer:
    """Build the tokenizer of the data section.

    Args:
        data: see TOKENIZER_SETTINGS.
        vocab_size: --vocab-size; required by NullTokenizer, used by TikTokenizer.

    Raises:
        ConfigError: no type, or a flag that the type needs is missing.
        CapabilityError: the library of the type is not installed.
        DataError: a file is missing or is not such a tokenizer.
    """
    kind = derived.tokenizer_type(data)
    if kind is None:
        raise ConfigError(
            "--tokenizer-type is missing: give SentencePieceTokenizer and --tokenizer-model FILE, or another type; "
            "NullTokenizer with --mock-data"
        )

    def required(flag: str, value: Any) -> Any:
        if value is None:
            raise ConfigError(f"--tokenizer-type {kind} needs {flag}.")
        return value

    if kind in SENTENCEPIECE_TYPES:
        return SentencePieceTokenizer(required("--tokenizer-model", data.tokenizer_model))
    if kind == "HuggingFaceTokenizer":
        return HuggingFaceTokenizer(required("--tokenizer-model", data.tokenizer_model))
    if kind == "GPT2BPETokenizer":
        return GPT2BPETokenizer(required("--vocab-file", data.vocab_file), required("--merge-file", data.merge_file))
    if kind == "TikTokenizer":
        model = required("--tokenizer-model", data.tokenizer_model)
        return TikTokenizer(model, data.tiktoken_pattern, data.tiktoken_num_special_tokens, vocab_size)
    if kind == "ByteLevelTokenizer":
        return ByteLevelTokenizer()
    if kind == "NullTokenizer":
        return NullTokenizer(required("--vocab-size", vocab_size))
    raise ConfigError(f"--tokenizer-type {kind} is unknown.")


def build_trained_tokenizer(data: DataConfig, vocab_size: Optional[int]) -> Tokenizer:
    """`build_tokenizer` by the settings of an earlier run, whose files may have moved.

    Raises:
        DataError: also says which flags name the present paths.
    """
    try:
        return build_tokenizer(data, vocab_size)
    except DataError as error:
        flags = "--vocab-file and --merge-file" if data.vocab_file else "--tokenizer-model"
        raise DataError(f"{error} The run was trained with it; {flags} says where it is now.") from error


def tokenizer_settings(data: DataConfig, vocab_size: Optional[int] = None) -> dict[str, Any]:
    """Return the settings from which `tokenizer_from_settings` rebuilds the tokenizer in any working directory."""
    settings = {name: getattr(data, name) for name in TOKENIZER_SETTINGS}
    for name in TOKENIZER_PATHS:
        if settings[name] is not None and Path(settings[name]).exists():
            settings[name] = str(Path(settings[name]).resolve())
    return {name: value for name, value in (*settings.items(), ("vocab_size", vocab_size)) if value is not None}


def tokenizer_from_settings(settings: Mapping[str, Any]) -> Tokenizer:
    """Build the tokenizer of `tokenizer_settings`.

    Raises:
        ConfigError, CapabilityError, DataError: as `build_tokenizer`; its files may have moved or changed.
    """
    data = DataConfig(**{name: value for name, value in settings.items() if name in TOKENIZER_SETTINGS})
    return build_tokenizer(data, settings.get("vocab_size"))


def describe_tokenizer(identifiers: Mapping[str, Any]) -> str:
    """Format the `unique_identifiers` of a tokenizer for messages, with the first digits of each hash."""
    shown = {**identifiers, "sha256": " ".join(digest[:12] for digest in identifiers.get("sha256", [])) or "-"}
    name = shown.pop("class", "unknown kind")
    return ", ".join([name, *(f"{key} {value}" for key, value in shown.items())])
