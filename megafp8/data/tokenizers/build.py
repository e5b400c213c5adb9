"""Tokenizers behind one small interface, each through the library made for it.

Megatron's names of types are kept, and its choice of the end-of-document token. What differs from the older Megatron
tokenizers, and agrees with megatron-core's newer ones: no type prepends a beginning-of-sentence token, and no
SentencePiece type adds symbols of its own to the model's.

A tokenizer has no `pad`: megatron-core's datasets would turn every such token of the text into token 0.
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
from megafp8.errors import ConfigError

# Settings of the data section that say which tokenizer it is.
TOKENIZER_SETTINGS = (
    "tokenizer_type", "tokenizer_model", "vocab_file", "merge_file", "tiktoken_pattern", "tiktoken_num_special_tokens",
)  # fmt: skip
TOKENIZER_PATHS = ("tokenizer_model", "vocab_file", "merge_file")

SENTENCEPIECE_TYPES = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")


class Tokenizer(Protocol):
    """Text to token ids and back.

    Attributes:
        vocab_size: ids are in [0, vocab_size); padding of the embedding is the model's affair.
        eod: id that ends a document.
        unique_identifiers: what decides the ids: class, SHA-256 of the files, vocabulary size, eod. Dataset caches and
            shard manifests compare it, so that a tokenizer retrained under the same path is noticed.
    """

    vocab_size: int
    eod: int
    unique_identifiers: "OrderedDict[str, Any]"

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of `text`, without any that the text does not have."""
        ...

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return what `tokenize` returns for each text, in one call of the library."""
        ...

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`."""
        ...


def build_tokenizer(data: DataConfig, vocab_size: Optional[int] = None) -> Tokenizer:
    """Build the tokenizer that the data section asks for.

    Args:
        data: see TOKENIZER_SETTINGS.
        vocab_size: --vocab-size; needed by NullTokenizer, used by TikTokenizer.

    Raises:
        ConfigError: no type, or a flag that the type needs is missing.
        CapabilityError: the library that the type needs is not installed.
        DataError: a file is missing or is not such a tokenizer.
    """
    kind = derived.tokenizer_type(data)
    if kind is None:
        raise ConfigError("--tokenizer-type is missing. Made-up data (--mock-data) goes with NullTokenizer.")
    if kind in SENTENCEPIECE_TYPES:
        return SentencePieceTokenizer(_required(kind, "--tokenizer-model", data.tokenizer_model))
    if kind == "HuggingFaceTokenizer":
        return HuggingFaceTokenizer(_required(kind, "--tokenizer-model", data.tokenizer_model))
    if kind == "GPT2BPETokenizer":
        return GPT2BPETokenizer(
            _required(kind, "--vocab-file", data.vocab_file), _required(kind, "--merge-file", data.merge_file)
        )
    if kind == "TikTokenizer":
        model = _required(kind, "--tokenizer-model", data.tokenizer_model)
        return TikTokenizer(model, data.tiktoken_pattern, data.tiktoken_num_special_tokens, vocab_size)
    if kind == "ByteLevelTokenizer":
        return ByteLevelTokenizer()
    if kind == "NullTokenizer":
        return NullTokenizer(_required(kind, "--vocab-size", vocab_size))
    raise ConfigError(f"--tokenizer-type {kind} is unknown.")


def tokenizer_settings(data: DataConfig, vocab_size: Optional[int] = None) -> dict[str, Any]:
    """Return with what `build_tokenizer` builds this tokenizer again from any folder, for a shard's manifest."""
    settings = {name: getattr(data, name) for name in TOKENIZER_SETTINGS}
    for name in TOKENIZER_PATHS:
        if settings[name] is not None and Path(settings[name]).exists():
            settings[name] = str(Path(settings[name]).resolve())
    return {name: value for name, value in (*settings.items(), ("vocab_size", vocab_size)) if value is not None}


def tokenizer_from_settings(settings: Mapping[str, Any]) -> Tokenizer:
    """Build the tokenizer of `tokenizer_settings`.

    Raises:
        ConfigError, CapabilityError, DataError: as `build_tokenizer`; its files may have moved, or changed.
    """
    of_data = {name: value for name, value in settings.items() if name in TOKENIZER_SETTINGS}
    return build_tokenizer(DataConfig(**of_data), settings.get("vocab_size"))


def describe_tokenizer(identifiers: Mapping[str, Any]) -> str:
    """Return the `unique_identifiers` of a tokenizer for people, with the first digits of each hash."""
    shown = {**identifiers, "sha256": " ".join(digest[:12] for digest in identifiers.get("sha256", [])) or "-"}
    name = shown.pop("class", "unknown kind")
    return ", ".join([name, *(f"{key} {value}" for key, value in shown.items())])


def _required(kind: str, flag: str, value: Any) -> Any:
    if value is None:
        raise ConfigError(f"--tokenizer-type {kind} needs {flag}.")
    return value
