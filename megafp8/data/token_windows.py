"""Windows over a data set in its own order: every token but the first is predicted exactly once.

Documents follow one another without a boundary. The windows of S + 1 tokens overlap by one token, so that the last
label of a window is the first input of the next. Training instead shuffles documents and samples.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from megafp8.data.object_tokens import ObjectReader, ObjectTokens
from megafp8.data.shards import bin_path, read_index
from megafp8.data.tokenizers.build import Tokenizer
from megafp8.errors import DataError
from megafp8.utils.object_store import is_url

DOCUMENTS_PER_CALL = 64


def shard_documents(prefixes: Sequence[str]) -> Iterator[np.ndarray]:
    """The token ids of each sequence of token shards, in the order of the files.

    Raises:
        DataError: a file is missing or damaged.
    """
    for prefix in prefixes:
        index = read_index(prefix)
        if is_url(prefix):
            reader = ObjectReader(ObjectTokens(prefix))
            for first, length in zip(index.sequence_pointers, index.sequence_lengths, strict=True):
                yield reader.read(index.dtype, int(length), int(first))
            continue
        tokens = np.memmap(bin_path(prefix), dtype=np.uint8, mode="r") if index.num_tokens else np.empty(0, np.uint8)
        for first, length in zip(index.sequence_pointers, index.sequence_lengths, strict=True):
            stop = int(first) + int(length) * index.dtype.itemsize
            if stop > len(tokens):
                raise DataError(f"{bin_path(prefix)} has {len(tokens)} bytes, but its index needs {stop}")
            yield tokens[int(first) : stop].view(index.dtype)


def text_documents(texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """The token ids of each document, with the end-of-document token after it."""
    remaining = iter(texts)
    while group := list(itertools.islice(remaining, DOCUMENTS_PER_CALL)):
        for ids in tokenizer.tokenize_batch(group):
            yield np.array([*ids, tokenizer.eod], dtype=np.int64)


def windows(documents: Iterable[np.ndarray], length: int, max_tokens: int | None = None) -> Iterator[np.ndarray]:
    """Consecutive windows, int64 [2 to length + 1]: only the last is shorter than `length` + 1.

    Args:
        max_tokens: number of predicted tokens; None: all.
    """
    left = float("inf") if max_tokens is None else max_tokens
    pending: list[np.ndarray] = []
    num_pending = 0
    for document in documents:
        pending.append(document.astype(np.int64))
        num_pending += len(document)
        if num_pending <= length:
            continue
        stream = np.concatenate(pending)
        start = 0
        while len(stream) - start > length and left > 0:
            size = int(min(length, left))
            yield stream[start : start + size + 1]
            start, left = start + size, left - size
        if left <= 0:
            return
        pending, num_pending = [stream[start:]], len(stream) - start
    stream = np.concatenate(pending) if pending else np.empty(0, np.int64)
    if len(stream) > 1 and left > 0:
        yield stream[: int(min(len(stream) - 1, left)) + 1]


def microbatches(
    samples: Iterable[np.ndarray], micro_batch_size: int, length: int, vocab_size: int
) -> Iterator[dict[str, Tensor]]:
    """Batches of windows in the format of the data loader, [up to micro_batch_size, length].

    A short window is padded with its last token. Padding has no weight in `loss_mask`.

    Raises:
        DataError: a token outside of the vocabulary.
    """
    remaining = iter(samples)
    while group := list(itertools.islice(remaining, micro_batch_size)):
        rows = np.stack([np.pad(window, (0, length + 1 - len(window)), mode="edge") for window in group])
        if rows.min() < 0 or rows.max() >= vocab_size:
            strange = rows.max() if rows.max() >= vocab_size else rows.min()
            raise DataError(f"the data has token {strange}; the model has 0 to {vocab_size - 1}: use its own tokenizer")
        tokens, positions = torch.from_numpy(rows), torch.arange(length)
        counts = torch.tensor([len(window) - 1 for window in group])
        yield {
            "tokens": tokens[:, :-1].contiguous(),
            "labels": tokens[:, 1:].contiguous(),
            "loss_mask": (positions < counts[:, None]).float(),
            "position_ids": positions.expand(len(group), length).contiguous(),
        }
