"""Texts to arrays of token ids: through the tokenizer's own library, or through gigatoken (`gigatoken_encoder`).

Which encoder runs: gigatoken where it gives the ids of the tokenizer's own library, else the library.

gigatoken: the same ids as the tokenizer's own library, tens of times as fast, for byte-pair encodings.

It knows byte-level BPE with the splitting patterns in common use (a tokenizer.json, GPT-2's files, tiktoken's ranks
with pattern v2) and SentencePiece's BPE with byte fallback. What it does not know, it refuses or, at worst, splits
differently. So it is held to the library: before the job on texts of this very input and on a probe of Unicode
(`encoder_choice`), and during the job on a piece of every batch.
"""

from __future__ import annotations

import base64
import importlib.metadata
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Optional, Protocol

import numpy as np

from megafp8.data.tokenizers.build import Tokenizer
from megafp8.data.tokenizers.encoder_names import GIGATOKEN, LIBRARY
from megafp8.data.tokenizers.libraries import (
    TIKTOKEN_PATTERNS,
    GPT2BPETokenizer,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    TikTokenizer,
)
from megafp8.errors import CapabilityError, DataError


class Encoder(Protocol):
    """Encodes many texts at once.

    Attributes:
        name: for people.
        batch_bytes: of text that is worth giving to one call; what bounds the memory.
        part_bytes: of text that is worth a part file.
    """

    name: str
    batch_bytes: int
    part_bytes: int

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of all texts, of any integer dtype, and int64 [texts], how many each has.

        Raises:
            DataError: a text that the tokenizer refuses; it does not say which.
        """
        ...


class LibraryEncoder:
    """The batch calls of the tokenizer's own library; one thread, since there is a process for each core."""

    batch_bytes = 4 << 20
    part_bytes = 4 << 20

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self.name = f"{type(tokenizer).__name__}'s own library"

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        ids = self._tokenizer.tokenize_batch(texts)
        lengths = np.fromiter(map(len, ids), np.int64, count=len(ids))
        try:
            return np.fromiter(chain.from_iterable(ids), np.int64, count=int(lengths.sum())), lengths
        except OverflowError as error:
            raise DataError("it has a token id of more than 64 bits") from error


def encode_documents(
    encoder: Encoder, texts: Sequence[str], *, vocab_size: int, dtype: np.dtype, eod: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Encode documents for a shard.

    Args:
        encoder: of the tokenizer.
        texts: one a document.
        vocab_size: of the tokenizer.
        dtype: of the shard.
        eod: put after each document that has tokens; None puts nothing.

    Returns:
        The ids of all documents in `dtype`, and int32 [texts], how many each has.

    Raises:
        DataError: a text that the tokenizer refuses, or an id beyond the vocabulary; it does not say which text.
    """
    ids, lengths = encoder.encode(texts)
    if len(ids):
        smallest, largest = int(ids.min()) if ids.dtype.kind == "i" else 0, int(ids.max())
        if smallest < 0 or largest >= vocab_size:
            wrong = smallest if smallest < 0 else largest
            raise DataError(f"it has the token id {wrong}, but the vocabulary has {vocab_size} (0 to {vocab_size - 1})")
    if eod is None:
        return ids.astype(dtype, copy=False), lengths.astype(np.int32)
    holds_tokens = lengths > 0
    ended = lengths + holds_tokens
    tokens = np.empty(int(ended.sum()), dtype)
    is_text = np.ones(len(tokens), bool)
    is_text[np.cumsum(ended)[holds_tokens] - 1] = False
    tokens[is_text] = ids
    tokens[~is_text] = eod
    return tokens, ended.astype(np.int32)


def refused_texts(
    encoder: Encoder, texts: Sequence[str], *, vocab_size: int, dtype: np.dtype, eod: int | None
) -> dict[int, str]:
    """Return number and reason of each text for which `encode_documents` raises DataError."""
    found = {}
    for number, text in enumerate(texts):
        try:
            encode_documents(encoder, [text], vocab_size=vocab_size, dtype=dtype, eod=eod)
        except DataError as error:
            found[number] = str(error)
    return found


# Characters that are put into one text: a call for each would take longer than what it encodes.
PROBE_CHARACTERS = 32
# Marks and shapes of text on which tokenizers differ, beside every kind of character in `probe_texts`.
SHAPES = (
    "",
    " ",
    "  a  b\t\tc\n\n\nd  \r\n\r\n e",
    "I'll don't WE'RE it's ain''t",
    "123456 1,234.5e-6 \u00bd\u00b2 \u0663\u0664",
    "<s> </s> <unk> <pad> (?P<s>x) <0x0A> <|endoftext|> <|im_end|> <SPECIAL_7>",
    "camelCaseWords HTTPServer snake_case __init__ a=b+c;//x",
    "\0\0 \x1b[0m\x7f",
    "e\u0301a\u0308\u0323 \u2581a \u2581\u2581",
    "a\u00a0b\u2003c\u3000d\u200b\u200d",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea",
    "\u4f60\u597d\u4e16\u754c\u3053\u3093 \uac00\ub098 \u0e2a\u0e27\u0e31\u0e2a",
)


@dataclass(frozen=True)
class EncoderChoice:
    """An encoder, its name among ENCODERS, and why it was chosen, for people."""

    encoder: Encoder
    kind: str
    reason: str


def build_encoder(tokenizer: Tokenizer, kind: str) -> Encoder:
    """Build an encoder without any check: GIGATOKEN or LIBRARY.

    Raises:
        UnsupportedTokenizerError: gigatoken is not there, or does not know the tokenizer.
    """
    return GigatokenEncoder(tokenizer) if kind == GIGATOKEN else LibraryEncoder(tokenizer)


def choose_encoder(tokenizer: Tokenizer, asked_for: str, sample: Callable[[], Sequence[str]]) -> EncoderChoice:
    """Choose an encoder.

    Args:
        tokenizer: that of the job.
        asked_for: one of ENCODERS; AUTO takes gigatoken when it passes the check.
        sample: gives texts of the job's input.

    Raises:
        CapabilityError: gigatoken was asked for, and is not there or fails the check.
    """
    if asked_for == LIBRARY:
        return EncoderChoice(LibraryEncoder(tokenizer), LIBRARY, "as asked for")
    try:
        encoder = GigatokenEncoder(tokenizer)
        encoder.check(list(SHAPES))
        encoder.check(probe_texts())
        texts = sample()
        encoder.check(texts)
    except (UnsupportedTokenizerError, EncoderMismatchError) as error:
        if asked_for == GIGATOKEN:
            raise CapabilityError(f"--encoder gigatoken cannot be used: {error}") from error
        return EncoderChoice(LibraryEncoder(tokenizer), LIBRARY, f"gigatoken is not used: {error}")
    reason = f"it gives the ids of the tokenizer's own library on {len(texts)} texts of this input"
    return EncoderChoice(encoder, GIGATOKEN, reason)


def probe_texts() -> list[str]:
    """Return texts with characters of all kinds: Latin's and the punctuation's one by one, of others every 41st."""
    numbers = [*range(0x250), *range(0x2000, 0x2100), *range(0x250, 0xD800, 41), *range(0xE000, 0x20000, 41)]
    around = [f"a{chr(number)}b {chr(number)}1{chr(number)}\n{chr(number)}{chr(number)}" for number in numbers]
    return ["".join(around[first : first + PROBE_CHARACTERS]) for first in range(0, len(around), PROBE_CHARACTERS)]


CHECKED_CHARACTERS = 2000
# Its cache of words grows with every new word. This much more memory than at first, and it starts with an empty one.
MAX_CACHE_BYTES = 256 << 20
# gigatoken's names of the splitting patterns of tiktoken's own encodings.
ENCODING_SCHEMES = {"gpt2": "gpt2", "r50k_base": "gpt2", "cl100k_base": "gpt4", "o200k_base": "o200k"}


class UnsupportedTokenizerError(Exception):
    """gigatoken is not there, or does not know this tokenizer. The text says which."""


class EncoderMismatchError(Exception):
    """gigatoken failed, or gave other ids than the tokenizer's own library. The text says where."""


class GigatokenEncoder:
    """Encodes with gigatoken, on one thread.

    Args:
        tokenizer: the tokenizer whose ids are wanted.

    Raises:
        UnsupportedTokenizerError: gigatoken is not installed, or does not know the tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._build, self._first_id = _builder(tokenizer)
        self._backend = self._build()
        self.name = f"gigatoken {importlib.metadata.version('gigatoken')}"
        # SentencePiece's cache lives for a call, so that calls must be large.
        keeps_cache = not isinstance(tokenizer, SentencePieceTokenizer)
        self.batch_bytes = (4 << 20) if keeps_cache else (64 << 20)
        self.part_bytes = (8 << 20) if keeps_cache else (64 << 20)
        self._memory_limit = (_resident_bytes() or 0) + MAX_CACHE_BYTES

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return uint32 ids of all texts, and int64 [texts], how many each has.

        Raises:
            EncoderMismatchError: it failed, or differs from the library in what was checked.
        """
        if not texts:
            return np.empty(0, np.uint32), np.empty(0, np.int64)
        ids, lengths = self._encode(texts)
        # Letters beyond ASCII are where implementations differ, if anywhere.
        number = next((place for place, text in enumerate(texts) if not text.isascii()), len(texts) // 2)
        self.check([texts[number][:CHECKED_CHARACTERS]])
        return ids, lengths

    def check(self, texts: Sequence[str]) -> None:
        """Compare with the library.

        Raises:
            EncoderMismatchError: ids differ, or gigatoken failed.
        """
        ids, lengths = self._encode(texts)
        place = 0
        for text, length in zip(texts, lengths.tolist(), strict=True):
            found, expected = ids[place : place + length].tolist(), self._tokenizer.tokenize(text)
            place += length
            if found != expected:
                raise EncoderMismatchError(_describe_difference(self._tokenizer, found, expected))

    def _encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        resident_bytes = _resident_bytes()
        if resident_bytes is not None and resident_bytes > self._memory_limit:
            self._backend = None
            self._backend = self._build()
            self._memory_limit = max(self._memory_limit, (_resident_bytes() or 0) + MAX_CACHE_BYTES // 2)
        try:
            rows = self._backend.encode_batch(list(texts), parallel=False).layout
        except BaseException as error:
            # A panic of Rust code is no Exception.
            if isinstance(error, Exception) or type(error).__name__ == "PanicException":
                raise EncoderMismatchError(f"it failed: {error}") from error
            raise
        offsets = np.asarray(rows.offsets.data)
        ids = np.asarray(rows.content.data)[offsets[0] : offsets[-1]]
        return ids + np.uint32(self._first_id) if self._first_id else ids, np.diff(offsets)


def _builder(tokenizer: Tokenizer) -> tuple[Callable[[], Any], int]:
    """How to build gigatoken's form of a tokenizer, and what to add to its ids."""
    try:
        import gigatoken
    except ImportError as error:
        raise UnsupportedTokenizerError(f"it cannot be imported ({error}); pip install 'megafp8[data]'") from error
    if isinstance(tokenizer, (HuggingFaceTokenizer, GPT2BPETokenizer)):
        form = tokenizer.library_object.to_str()
    elif isinstance(tokenizer, SentencePieceTokenizer):
        form = _sentencepiece_form(tokenizer.library_object)
    elif isinstance(tokenizer, TikTokenizer):
        encoding = tokenizer.library_object
        scheme, ranks = _tiktoken_scheme(encoding), _tiktoken_ranks(encoding)
        return lambda: _from_ranks(gigatoken, ranks, scheme), min(encoding._mergeable_ranks.values())
    else:
        raise UnsupportedTokenizerError(f"it has nothing like {type(tokenizer).__name__}")

    def build() -> Any:
        try:
            return gigatoken.Tokenizer.from_json(form)
        except Exception as error:  # of several kinds, for what it does not know
            raise UnsupportedTokenizerError(f"it does not know this tokenizer: {_first_line(error)}") from error

    return build, 0


def _sentencepiece_form(processor: Any) -> str:
    """A SentencePiece model as a tokenizer.json in which text never becomes a control piece, as with the library.

    gigatoken's own form makes control pieces special tokens, which it finds in text: `(?P<s>x)` would hold the
    beginning of a sentence. Pieces of one character that the user defined need no search either, when no other piece
    has that character: nothing merges with them.
    """
    try:
        from gigatoken._load.sentencepiece import sentencepiece_to_tokenizer_json

        form = json.loads(sentencepiece_to_tokenizer_json(processor.serialized_model_proto()))
    except Exception as error:  # ImportError with another version; ValueError for what it does not support
        raise UnsupportedTokenizerError(f"it does not know this SentencePiece model: {_first_line(error)}") from error
    pieces = range(processor.get_piece_size())
    kinds = (processor.is_control, processor.is_unknown, processor.is_byte, processor.is_unused)
    not_text = {processor.id_to_piece(piece) for piece in pieces if any(is_kind(piece) for is_kind in kinds)}
    characters = Counter(chain.from_iterable(processor.id_to_piece(piece) for piece in pieces))
    form["added_tokens"] = [
        token
        for token in form["added_tokens"]
        if not token["special"] and not (len(token["content"]) == 1 and characters[token["content"]] == 1)
    ]
    form["model"]["merges"] = [pair for pair in form["model"]["merges"] if "".join(pair) not in not_text]
    return json.dumps(form)


def _tiktoken_scheme(encoding: Any) -> str:
    scheme = {TIKTOKEN_PATTERNS["v2"]: "nemotron"}.get(encoding._pat_str) or ENCODING_SCHEMES.get(encoding.name)
    if scheme is None:
        raise UnsupportedTokenizerError(f"it has no splitting pattern like {encoding._pat_str[:40]}...")
    return scheme


def _tiktoken_ranks(encoding: Any) -> bytes:
    """The ranks of an encoding, from 0, as a .tiktoken file has them."""
    tokens = sorted(encoding._mergeable_ranks, key=encoding._mergeable_ranks.__getitem__)
    return b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens))


def _from_ranks(gigatoken: Any, ranks: bytes, scheme: str) -> Any:
    with tempfile.NamedTemporaryFile(suffix=".tiktoken") as file:
        file.write(ranks)
        file.flush()
        try:
            return gigatoken.Tokenizer.from_tiktoken(file.name, pretokenizer=scheme, special_tokens={})
        except Exception as error:
            raise UnsupportedTokenizerError(f"it does not know these ranks: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


def _describe_difference(tokenizer: Tokenizer, found: list[int], expected: list[int]) -> str:
    place = next((n for n, (mine, theirs) in enumerate(zip(found, expected, strict=False)) if mine != theirs), None)
    if place is None:
        place = min(len(found), len(expected))
    text = tokenizer.detokenize(expected[max(place - 3, 0) : place + 3])
    return f"near {text!r} it gives the ids {found[place : place + 4]}, the library {expected[place : place + 4]}"


def _resident_bytes() -> Optional[int]:
    """Memory of this process; None where the system does not tell (it is not Linux)."""
    try:
        with open("/proc/self/statm") as stream:
            return int(stream.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None
