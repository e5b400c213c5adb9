"""Texts to arrays of token ids: through the tokenizer's own library, or through gigatoken (`gigatoken_encoder`)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Protocol

import numpy as np

from megafp8.data.tokenizer import Tokenizer
from megafp8.errors import DataError


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
