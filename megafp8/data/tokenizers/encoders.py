"""Encoders: texts to arrays of token ids, through the tokenizer's own library or through gigatoken.

gigatoken gives the ids of the tokenizer's library, tens of times as fast, for byte-pair encodings. It supports
byte-level BPE with common splitting patterns (a tokenizer.json, GPT-2's files, tiktoken's ranks with pattern v2) and
SentencePiece's BPE with byte fallback. What it does not support, it refuses or, at worst, splits differently. It is
therefore compared with the library: before a job on texts of its input and on a probe of Unicode (`choose_encoder`),
and during the job on an excerpt of every batch. If it differs, the library is used.
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

from megafp8.data.tokenizers.build import GIGATOKEN, LIBRARY, Tokenizer
from megafp8.data.tokenizers.libraries import (
    TIKTOKEN_PATTERNS,
    GPT2BPETokenizer,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    TikTokenizer,
)
from megafp8.data.tokenizers.library_calls import is_library_failure
from megafp8.errors import CapabilityError, DataError
from megafp8.utils.installation import pip_install

# Characters per probe text. One call for each character would cost more than encoding it.
PROBE_CHARACTERS = 32
# Text on which tokenizers differ, in addition to `probe_texts`.
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
CHECKED_CHARACTERS = 2000
# gigatoken's cache of words grows without limit. After this much growth it is rebuilt with an empty cache.
MAX_CACHE_BYTES = 256 << 20
# gigatoken's names for the splitting patterns of tiktoken's own encodings.
ENCODING_SCHEMES = {"gpt2": "gpt2", "r50k_base": "gpt2", "cl100k_base": "gpt4", "o200k_base": "o200k"}


class UnsupportedTokenizerError(Exception):
    """gigatoken is not installed, or does not support this tokenizer. The text has the reason."""


class EncoderMismatchError(Exception):
    """gigatoken failed, or gave other ids than the tokenizer's own library. The text says where."""


class Encoder(Protocol):
    """Encodes many texts at once.

    Attributes:
        name: name for messages.
        batch_bytes: size of the text for one call; bounds the memory.
        part_bytes: size of the text for one part file.
    """

    name: str
    batch_bytes: int
    part_bytes: int

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of all texts, of any integer dtype, and int64 [texts], the number of ids of each.

        Raises:
            DataError: the tokenizer rejects a text; it does not say which.
        """


@dataclass(frozen=True)
class EncoderChoice:
    """An encoder, and the reason for the choice, for messages."""

    encoder: Encoder
    reason: str


def choose_encoder(tokenizer: Tokenizer, requested: str, sample: Sequence[str]) -> EncoderChoice:
    """Choose an encoder.

    Args:
        tokenizer: the job's tokenizer.
        requested: one of ENCODERS; AUTO takes gigatoken if it passes the check.
        sample: texts of the job's input.

    Raises:
        CapabilityError: gigatoken was requested, and is not installed or fails the check.
    """
    if requested == LIBRARY:
        return EncoderChoice(LibraryEncoder(tokenizer), "as asked for")
    try:
        encoder = GigatokenEncoder(tokenizer)
        encoder.check(SHAPES)
        encoder.check(probe_texts())
        encoder.check(sample)
    except (UnsupportedTokenizerError, EncoderMismatchError, DataError) as error:  # DataError: of the library itself
        if requested == GIGATOKEN:
            raise CapabilityError(f"--encoder gigatoken cannot be used: {error}") from error
        return EncoderChoice(LibraryEncoder(tokenizer), f"gigatoken is not used: {error}")
    reason = f"its ids equal those of the tokenizer's own library on {len(sample)} texts of this input"
    return EncoderChoice(encoder, reason)


def lost_fraction(tokenizer: Tokenizer, texts: Sequence[str]) -> float:
    """Return the fraction of the characters of texts, except for spaces, that do not come back from their ids.

    Counts characters, not their order. Texts that the tokenizer rejects are left out.
    """
    num_lost = num_characters = 0
    for text in texts:
        try:
            known = [token for token in tokenizer.tokenize(text) if token != tokenizer.unknown_id]
        except DataError:
            continue
        characters = Counter("".join(text.split()))
        num_characters += sum(characters.values())
        num_lost += sum((characters - Counter(tokenizer.detokenize(known))).values())
    return num_lost / max(num_characters, 1)


def probe_texts() -> list[str]:
    """Return texts with characters of all kinds: every Latin letter and punctuation mark, every 41st of the others."""
    codes = [*range(0x250), *range(0x2000, 0x2100), *range(0x250, 0xD800, 41), *range(0xE000, 0x20000, 41)]
    contexts = [f"a{chr(code)}b {chr(code)}1{chr(code)}\n{chr(code)}{chr(code)}" for code in codes]
    return ["".join(contexts[first : first + PROBE_CHARACTERS]) for first in range(0, len(contexts), PROBE_CHARACTERS)]


def encode_documents(
    encoder: Encoder, texts: Sequence[str], *, vocab_size: int, dtype: np.dtype, eod: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Encode documents for a shard.

    Args:
        encoder: encoder of the tokenizer.
        texts: one per document.
        vocab_size: vocabulary size of the tokenizer.
        dtype: dtype of the shard.
        eod: appended to each document that has tokens; None appends nothing.

    Returns:
        The ids of all documents in `dtype`, and int32 [texts], the number of ids of each.

    Raises:
        DataError: the tokenizer rejects a text, or an id is beyond the vocabulary; it does not say which text.
    """
    ids, lengths = encoder.encode(texts)
    if len(ids):
        smallest, largest = int(ids.min()) if ids.dtype.kind == "i" else 0, int(ids.max())
        if smallest < 0 or largest >= vocab_size:
            wrong = smallest if smallest < 0 else largest
            raise DataError(
                f"it has the token id {wrong}, but the vocabulary size is {vocab_size} (0 to {vocab_size - 1})"
            )
    if eod is None:
        return ids.astype(dtype, copy=False), lengths.astype(np.int32)
    has_tokens = lengths > 0
    lengths_with_eod = lengths + has_tokens
    tokens = np.empty(int(lengths_with_eod.sum()), dtype)
    is_text = np.ones(len(tokens), bool)
    is_text[np.cumsum(lengths_with_eod)[has_tokens] - 1] = False
    tokens[is_text] = ids
    tokens[~is_text] = eod
    return tokens, lengths_with_eod.astype(np.int32)


def rejected_texts(
    encoder: Encoder, texts: Sequence[str], *, vocab_size: int, dtype: np.dtype, eod: int | None
) -> dict[int, str]:
    """Return number and reason of each text for which `encode_documents` raises DataError."""
    reasons = {}
    for number, text in enumerate(texts):
        try:
            encode_documents(encoder, [text], vocab_size=vocab_size, dtype=dtype, eod=eod)
        except DataError as error:
            reasons[number] = str(error)
    return reasons


class LibraryEncoder:
    """Encodes with the tokenizer's own library, on one thread, since there is a process for each core."""

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


class GigatokenEncoder:
    """Encodes with gigatoken, on one thread.

    Args:
        tokenizer: the tokenizer whose ids are wanted.

    Raises:
        UnsupportedTokenizerError: gigatoken is not installed, or does not support the tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._build, self._first_id = _backend_builder(tokenizer)
        self._backend = self._build()
        self.name = f"gigatoken {importlib.metadata.version('gigatoken')}"
        # For SentencePiece the cache lives only for one call, so that calls must be large.
        keeps_cache = not isinstance(tokenizer, SentencePieceTokenizer)
        self.batch_bytes = (4 << 20) if keeps_cache else (64 << 20)
        self.part_bytes = (8 << 20) if keeps_cache else (64 << 20)
        self._memory_limit = (_resident_bytes() or 0) + MAX_CACHE_BYTES

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return uint32 ids of all texts, and int64 [texts], the number of ids of each.

        Raises:
            EncoderMismatchError: it failed, or differs from the library in the excerpt.
        """
        if not texts:
            return np.empty(0, np.uint32), np.empty(0, np.int64)
        ids, lengths = self._encode(texts)
        # Implementations differ in letters beyond ASCII, if anywhere.
        number = next((number for number, text in enumerate(texts) if not text.isascii()), len(texts) // 2)
        self.check([texts[number][:CHECKED_CHARACTERS]])
        return ids, lengths

    def check(self, texts: Sequence[str]) -> None:
        """Compare with the library.

        Raises:
            EncoderMismatchError: ids differ, or gigatoken failed.
        """
        ids, lengths = self._encode(texts)
        for text, found_ids in zip(texts, np.split(ids, np.cumsum(lengths))[:-1], strict=True):
            found, expected = found_ids.tolist(), self._tokenizer.tokenize(text)
            if found != expected:
                raise EncoderMismatchError(_describe_difference(self._tokenizer, found, expected))

    def _encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        resident_bytes = _resident_bytes()
        if resident_bytes is not None and resident_bytes > self._memory_limit:
            self._backend = None  # frees the old cache before the new one is built
            self._backend = self._build()
            self._memory_limit = max(self._memory_limit, (_resident_bytes() or 0) + MAX_CACHE_BYTES // 2)
        try:
            batch = self._backend.encode_batch(list(texts), parallel=False)
            ids, offsets = _join_rows(batch) if isinstance(batch, list) else _rows_of(batch.layout)
        except BaseException as error:
            if is_library_failure(error):
                raise EncoderMismatchError(f"it failed: {error}") from error
            raise
        return ids + np.uint32(self._first_id) if self._first_id else ids, np.diff(offsets)


def _rows_of(layout: Any) -> tuple[np.ndarray, np.ndarray]:
    """The ids of all texts, and where each text begins and the last one ends."""
    offsets = np.asarray(layout.offsets.data)
    return np.asarray(layout.content.data)[offsets[0] : offsets[-1]], offsets


def _join_rows(rows: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The same of a list of arrays, which gigatoken returns where awkward cannot be imported."""
    return np.concatenate(rows), np.cumsum([0, *map(len, rows)])


def _backend_builder(tokenizer: Tokenizer) -> tuple[Callable[[], Any], int]:
    """A function that builds gigatoken's form of a tokenizer, and the offset to add to its ids."""
    try:
        import gigatoken
    except ImportError as error:
        raise UnsupportedTokenizerError(f"it cannot be imported ({error}); {pip_install('data')}") from error
    if isinstance(tokenizer, (HuggingFaceTokenizer, GPT2BPETokenizer)):
        form = tokenizer.library_tokenizer.to_str()
    elif isinstance(tokenizer, SentencePieceTokenizer):
        form = _sentencepiece_form(tokenizer.library_tokenizer)
    elif isinstance(tokenizer, TikTokenizer):
        encoding = tokenizer.library_tokenizer
        scheme, ranks = _tiktoken_form(encoding)
        return lambda: _from_ranks(gigatoken, ranks, scheme), min(encoding._mergeable_ranks.values())
    else:
        raise UnsupportedTokenizerError(f"it does not support {type(tokenizer).__name__}")

    def build() -> Any:
        try:
            return gigatoken.Tokenizer.from_json(form)
        except Exception as error:  # errors of several types, for what it does not support
            raise UnsupportedTokenizerError(f"it does not support this tokenizer: {_first_line(error)}") from error

    return build, 0


def _sentencepiece_form(processor: Any) -> str:
    """A SentencePiece model as a tokenizer.json in which text never becomes a control piece, as with the library.

    gigatoken's own form makes control pieces special tokens, which it finds in text: `(?P<s>x)` would contain a
    beginning of sentence. User-defined pieces of one character need not be special tokens either if no other piece
    has that character: nothing merges with them.
    """
    try:
        from gigatoken._load.sentencepiece import sentencepiece_to_tokenizer_json

        form = json.loads(sentencepiece_to_tokenizer_json(processor.serialized_model_proto()))
    except Exception as error:  # ImportError with another version; ValueError for what it does not support
        raise UnsupportedTokenizerError(
            f"it does not support this SentencePiece model: {_first_line(error)}"
        ) from error
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


def _tiktoken_form(encoding: Any) -> tuple[str, bytes]:
    """gigatoken's splitting scheme for an encoding, and its ranks, from 0, in the format of a .tiktoken file."""
    scheme = "nemotron" if encoding._pat_str == TIKTOKEN_PATTERNS["v2"] else ENCODING_SCHEMES.get(encoding.name)
    if scheme is None:
        raise UnsupportedTokenizerError(f"it does not support the splitting pattern {encoding._pat_str[:40]}...")
    tokens = sorted(encoding._mergeable_ranks, key=encoding._mergeable_ranks.__getitem__)
    return scheme, b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens))


def _from_ranks(gigatoken: Any, ranks: bytes, scheme: str) -> Any:
    with tempfile.NamedTemporaryFile(suffix=".tiktoken") as file:
        file.write(ranks)
        file.flush()
        try:
            return gigatoken.Tokenizer.from_tiktoken(file.name, pretokenizer=scheme, special_tokens={})
        except Exception as error:
            raise UnsupportedTokenizerError(f"it does not support these ranks: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


def _describe_difference(tokenizer: Tokenizer, found: list[int], expected: list[int]) -> str:
    start = len(os.path.commonprefix([found, expected]))
    text = tokenizer.detokenize(expected[max(start - 3, 0) : start + 3])
    return f"near {text!r} its ids are {found[start : start + 4]}, those of the library {expected[start : start + 4]}"


def _resident_bytes() -> Optional[int]:
    """Resident memory of this process; None on systems other than Linux."""
    try:
        with open("/proc/self/statm") as stream:
            return int(stream.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None
