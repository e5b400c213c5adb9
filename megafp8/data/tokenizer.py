"""Tokenizers behind one small interface, each through the library made for it.

Megatron's names of types are kept, and its choice of the end-of-document token. What differs from the older Megatron
tokenizers, and agrees with megatron-core's newer ones: no type prepends a beginning-of-sentence token, and no
SentencePiece type adds symbols of its own to the model's.

A tokenizer has no `pad`: megatron-core's datasets would turn every such token of the text into token 0.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Optional, Protocol, Union

from megafp8.config import derived
from megafp8.config.schema import DataConfig
from megafp8.errors import CapabilityError, ConfigError, DataError

# Settings of the data section that say which tokenizer it is.
TOKENIZER_SETTINGS = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file", "tiktoken_pattern")
TOKENIZER_PATHS = ("tokenizer_model", "vocab_file", "merge_file")

SENTENCEPIECE_TYPES = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")

# Megatron's splitting patterns for TikTokenizer (--tiktoken-pattern) and its layout of the vocabulary: so many special
# tokens first, the ranks of the file after them.
TIKTOKEN_PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
TIKTOKEN_SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
TIKTOKEN_NUM_SPECIAL_TOKENS = 1000
TIKTOKEN_DEFAULT_VOCAB_SIZE = 2**17


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


class SentencePieceTokenizer:
    """A `.model` file through sentencepiece; the end of a document is the model's end-of-sentence piece."""

    def __init__(self, model_file: str):
        sentencepiece = _library("sentencepiece", "SentencePieceTokenizer")
        path = _existing(model_file, "--tokenizer-model")
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError) as error:
            raise DataError(
                f"--tokenizer-model {path} is not a SentencePiece model ({path.stat().st_size} bytes): {error}"
            ) from error
        self.vocab_size: int = self._processor.get_piece_size()
        self.eod: int = self._processor.eos_id()
        if self.eod < 0:
            raise DataError(
                f"--tokenizer-model {path} has no end-of-sentence piece, which marks the end of a document. "
                "Train it with an eos piece (tools/train_tokenizer.py does)."
            )
        self.unique_identifiers = _identifiers(self, [path])

    def tokenize(self, text: str) -> list[int]:
        return self._processor.encode(text)

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._processor.encode(list(texts), num_threads=1)

    def detokenize(self, ids: Sequence[int]) -> str:
        return self._processor.decode([int(token) for token in ids])


class HuggingFaceTokenizer:
    """A `tokenizer.json`, or a folder with one, through `tokenizers`.

    The end of a document is `eos_token` of `tokenizer_config.json` or `special_tokens_map.json` in the same folder.
    Special tokens of the library's post-processor (a leading <s>) are not added.
    """

    def __init__(self, model: str):
        tokenizers = _library("tokenizers", "HuggingFaceTokenizer")
        path = Path(model)
        if not path.exists():
            raise DataError(
                f"--tokenizer-model {model} is neither a tokenizer.json nor a folder with one. A tokenizer of the "
                f"Hugging Face hub is fetched first: hf download {model} tokenizer.json tokenizer_config.json "
                "--local-dir FOLDER"
            )
        path = _existing(str(path / "tokenizer.json" if path.is_dir() else path), "--tokenizer-model")
        self._tokenizer = _load_tokenizers_file(tokenizers, path)
        self.vocab_size: int = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.eod: int = self._eos_id(path.parent)
        self.unique_identifiers = _identifiers(self, [path])

    def _eos_id(self, folder: Path) -> int:
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            token = _read_json(folder / name).get("eos_token") if (folder / name).is_file() else None
            text = token.get("content") if isinstance(token, dict) else token
            if text is None:
                continue
            token_id = self._tokenizer.token_to_id(text)
            if token_id is None:
                raise DataError(f"{folder / name} names the eos_token {text!r}, which the tokenizer does not have.")
            return token_id
        raise DataError(
            f"No eos_token, which marks the end of a document, for the tokenizer in {folder}: put the model's "
            "tokenizer_config.json beside tokenizer.json."
        )

    def tokenize(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [one.ids for one in self._tokenizer.encode_batch(list(texts), add_special_tokens=False)]

    def detokenize(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=False)


class GPT2BPETokenizer:
    """GPT-2's byte-level BPE from `vocab.json` and `merges.txt`, through `tokenizers`."""

    END_OF_TEXT = "<|endoftext|>"

    def __init__(self, vocab_file: str, merge_file: str):
        tokenizers = _library("tokenizers", "GPT2BPETokenizer")
        vocab_path = _existing(vocab_file, "--vocab-file")
        merge_path = _existing(merge_file, "--merge-file")
        try:
            model = tokenizers.models.BPE.from_file(str(vocab_path), str(merge_path))
        except Exception as error:  # the library raises bare Exception for every malformed file
            raise DataError(
                f"--vocab-file {vocab_path} and --merge-file {merge_path} are not a GPT-2 vocabulary: {error}"
            ) from error
        self._tokenizer = tokenizers.Tokenizer(model)
        self._tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        self._tokenizer.decoder = tokenizers.decoders.ByteLevel()
        self.vocab_size: int = self._tokenizer.get_vocab_size()
        end_of_text = self._tokenizer.token_to_id(self.END_OF_TEXT)
        if end_of_text is None:
            raise DataError(f"--vocab-file {vocab_path} has no {self.END_OF_TEXT}, which marks the end of a document.")
        self.eod: int = end_of_text
        self.unique_identifiers = _identifiers(self, [vocab_path, merge_path])

    def tokenize(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [one.ids for one in self._tokenizer.encode_batch(list(texts), add_special_tokens=False)]

    def detokenize(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=False)


class TikTokenizer:
    """Megatron's JSON of byte-pair ranks (`rank`, `token_bytes` in base64), through tiktoken.

    Ids 0 to 999 are special tokens (`</s>`, id 2, ends a document), rank r is id 1000 + r, and a file with more ranks
    than --vocab-size leaves room for is cut. Text that spells a special token stays text.
    """

    def __init__(self, model_file: str, pattern: Optional[str], vocab_size: Optional[int]):
        tiktoken = _library("tiktoken", "TikTokenizer")
        path = _existing(model_file, "--tokenizer-model")
        pattern = pattern or "v2"
        if pattern not in TIKTOKEN_PATTERNS:
            raise ConfigError(f"--tiktoken-pattern {pattern} is unknown; known are {', '.join(TIKTOKEN_PATTERNS)}.")
        self.vocab_size: int = vocab_size or TIKTOKEN_DEFAULT_VOCAB_SIZE
        num_ranks = self.vocab_size - TIKTOKEN_NUM_SPECIAL_TOKENS
        ranks = _read_json(path)
        if not isinstance(ranks, list) or len(ranks) < num_ranks or num_ranks < 256:
            raise DataError(
                f"--tokenizer-model {path} holds {len(ranks)} ranks, but --vocab-size {self.vocab_size} less "
                f"{TIKTOKEN_NUM_SPECIAL_TOKENS} special tokens needs {num_ranks} (at least 256)."
            )
        special = TIKTOKEN_SPECIAL_TOKENS + tuple(
            f"<SPECIAL_{index}>" for index in range(len(TIKTOKEN_SPECIAL_TOKENS), TIKTOKEN_NUM_SPECIAL_TOKENS)
        )
        self._encoding = tiktoken.Encoding(
            name=path.stem,
            pat_str=TIKTOKEN_PATTERNS[pattern],
            mergeable_ranks={
                base64.b64decode(entry["token_bytes"]): TIKTOKEN_NUM_SPECIAL_TOKENS + entry["rank"]
                for entry in ranks[:num_ranks]
            },
            special_tokens={token: index for index, token in enumerate(special)},
        )
        self.eod: int = special.index("</s>")
        self.unique_identifiers = _identifiers(self, [path], pattern=pattern)

    def tokenize(self, text: str) -> list[int]:
        return self._encoding.encode_ordinary(text)

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._encoding.encode_ordinary_batch(list(texts), num_threads=1)

    def detokenize(self, ids: Sequence[int]) -> str:
        return self._encoding.decode([int(token) for token in ids])


class NullTokenizer:
    """Text that is token ids already, separated by spaces. --vocab-size N: ids 0 to N-1, and N ends a document."""

    def __init__(self, vocab_size: int):
        self.vocab_size: int = vocab_size + 1
        self.eod: int = vocab_size
        self.unique_identifiers = _identifiers(self, [])

    def tokenize(self, text: str) -> list[int]:
        try:
            return [int(word) for word in text.split()]
        except ValueError as error:
            raise DataError(f"NullTokenizer takes text that is token ids separated by spaces: {error}") from error

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.tokenize(text) for text in texts]

    def detokenize(self, ids: Sequence[int]) -> str:
        return " ".join(str(int(token)) for token in ids)


def build_tokenizer(data: DataConfig, vocab_size: Optional[int] = None) -> Tokenizer:
    """Build the tokenizer that the data section asks for.

    Args:
        data: tokenizer_type, tokenizer_model, vocab_file, merge_file, tiktoken_pattern.
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
        return TikTokenizer(model, data.tiktoken_pattern, vocab_size)
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


def describe_tokenizer(identifiers: Mapping[str, Any]) -> str:
    """Return the `unique_identifiers` of a tokenizer for people, with the first digits of each hash."""
    shown = {**identifiers, "sha256": " ".join(digest[:12] for digest in identifiers.get("sha256", [])) or "-"}
    name = shown.pop("class", "unknown kind")
    return ", ".join([name, *(f"{key} {value}" for key, value in shown.items())])


def file_sha256(path: Union[str, Path]) -> str:
    """Return the SHA-256 of a file's bytes in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _identifiers(tokenizer: Tokenizer, files: Sequence[Path], **options: str) -> "OrderedDict[str, Any]":
    """Everything that decides the ids of `tokenizer`; files count by content, not by path."""
    identifiers: OrderedDict[str, Any] = OrderedDict()
    identifiers["class"] = type(tokenizer).__name__
    identifiers["sha256"] = [file_sha256(path) for path in files]
    identifiers["vocab_size"] = tokenizer.vocab_size
    identifiers["eod"] = tokenizer.eod
    identifiers.update(options)
    return identifiers


def _library(name: str, kind: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise CapabilityError(
            f"--tokenizer-type {kind} needs the package {name}, which cannot be imported here ({error}). "
            f"Install it: pip install {name}"
        ) from error


def _required(kind: str, flag: str, value: Any) -> Any:
    if value is None:
        raise ConfigError(f"--tokenizer-type {kind} needs {flag}.")
    return value


def _existing(path: str, flag: str) -> Path:
    if not Path(path).is_file():
        raise DataError(f"{flag} {path}: there is no such file.")
    return Path(path)


def _load_tokenizers_file(tokenizers: ModuleType, path: Path) -> Any:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for every malformed file
        raise DataError(f"--tokenizer-model {path} is not a tokenizer.json: {error}") from error


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}") from error
