"""Best-fit packing of documents into sequences (`--packing best-fit`).

Every `seq_length` tokens of a document are a sequence of their own. What is left of it, or a whole document that is
shorter, is packed: in the order of falling lengths, each goes into the sequence with the least room that it fits into,
or opens a new one (best-fit decreasing; Ding et al. 2024, "Fewer Truncations Improve Language Modeling"). The room that
remains is padding.

Lengths are integers below `seq_length`, so that sequences with as much room are alike: equal pieces go into a range of
equal sequences in one operation. Their number depends on the lengths that occur, not on the number of documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class DocumentPacking:
    """How documents fill the sequences of an epoch, by their lengths only.

    Attributes:
        seq_length: tokens of a sequence.
        groups: int64 [groups, 4], by falling length: length of the pieces, pieces in each sequence, first sequence, and
            number of sequences, which follow one another.
        num_full: sequences that a part of one document fills; they are not in the groups.
        num_packed: sequences that the groups fill.
        padding: int64 [seq_length], number of packed sequences by tokens of padding.
        num_tokens, num_documents, num_cut: tokens and documents, and those of the latter that are longer than a
            sequence.
    """

    seq_length: int
    groups: np.ndarray
    num_full: int
    num_packed: int
    padding: np.ndarray
    num_tokens: int
    num_documents: int
    num_cut: int

    @property
    def num_sequences(self) -> int:
        """Sequences of an epoch."""
        return self.num_full + self.num_packed

    @property
    def num_padding_tokens(self) -> int:
        return self.num_sequences * self.seq_length - self.num_tokens

    @property
    def squares(self) -> float:
        """Sum of the squared lengths of the pieces in all sequences; the padding of a sequence is a piece, too."""
        length, pieces, _, sequences = self.groups.astype(np.float64).T
        rooms = np.arange(self.seq_length, dtype=np.float64)
        squares = (length**2 * pieces * sequences).sum() + (rooms**2 * self.padding).sum()
        return float(squares + float(self.num_full) * self.seq_length**2)

    def sequence_of_pieces(self) -> np.ndarray:
        """The packed sequence of each piece, int32 or int64 [pieces], by falling length of the pieces."""
        dtype = np.int32 if self.num_packed <= np.iinfo(np.int32).max else np.int64
        _, pieces, _, sequences = self.groups.T
        ends = np.cumsum(pieces * sequences)
        numbers = np.empty(ends[-1] if len(ends) else 0, dtype)
        for (_, per_sequence, first, count), end in zip(self.groups.tolist(), ends.tolist(), strict=True):
            rows = numbers[end - per_sequence * count : end].reshape(per_sequence, count)
            rows[:] = np.arange(first, first + count, dtype=dtype)
        return numbers


def pack_lengths(lengths: np.ndarray, seq_length: int) -> DocumentPacking:
    """Pack documents of these lengths, int32 [documents]; those without tokens have no piece."""
    full, rest = np.divmod(lengths, seq_length)
    counts = np.bincount(rest, minlength=seq_length)
    counts[0] = 0
    groups, num_packed, padding = _fit_best(counts)
    return DocumentPacking(
        seq_length=seq_length,
        groups=np.array(groups, np.int64).reshape(-1, 4),
        num_full=int(full.sum(dtype=np.int64)),
        num_packed=num_packed,
        padding=padding,
        num_tokens=int(lengths.sum(dtype=np.int64)),
        num_documents=len(lengths),
        num_cut=int(np.count_nonzero(lengths > seq_length)),
    )


def _fit_best(counts: np.ndarray) -> tuple[list[tuple[int, int, int, int]], int, np.ndarray]:
    """Pack pieces that are shorter than a sequence.

    Args:
        counts: number of pieces by length, [seq_length].

    Returns:
        The groups, the number of sequences and their padding, as in `DocumentPacking`.
    """
    seq_length = len(counts)
    groups: list[tuple[int, int, int, int]] = []
    ranges: dict[int, list[tuple[int, int]]] = {}  # by room: first sequence and number of sequences
    rooms = 0  # the bits of the rooms that some sequence has: the next one is found without a search
    num_sequences = 0

    def give_room(room: int, first: int, count: int) -> None:
        nonlocal rooms
        ranges.setdefault(room, []).append((first, count))
        rooms |= 1 << room

    for length in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[length])
        while left:
            fitting = rooms >> length
            if not fitting:
                count = -(-left // (seq_length // length))
                give_room(seq_length, num_sequences, count)
                num_sequences += count
                continue
            room = length + (fitting & -fitting).bit_length() - 1
            first, count = ranges[room].pop()
            if not ranges[room]:
                rooms ^= 1 << room
            # A sequence takes equal pieces until none fits: after each it has the least room of all that fit.
            pieces = room // length
            filled = min(count, left // pieces)
            if filled:
                groups.append((length, pieces, first, filled))
                give_room(room - pieces * length, first, filled)
                left -= filled * pieces
            if filled < count and left:  # less than `pieces`
                groups.append((length, left, first + filled, 1))
                give_room(room - left * length, first + filled, 1)
                filled, left = filled + 1, 0
            if filled < count:
                give_room(room, first + filled, count - filled)
    padding = np.zeros(seq_length, np.int64)
    for room, parts in ranges.items():
        for _, count in parts:
            padding[room] += count
    return groups, num_sequences, padding


def build_packed_epochs(
    lengths: np.ndarray, documents: np.ndarray, packing: DocumentPacking, generators: Sequence[np.random.RandomState]
) -> dict[str, np.ndarray]:
    """Build the order of the sequences of some epochs. Each epoch has sequences of other documents of the same lengths.

    Args:
        lengths: of the documents, int32.
        documents: their numbers in the shard, int32.
        packing: of them.
        generators: of each epoch.

    Returns:
        document_index, int32: the document of each piece, sequence after sequence; sample_index, [sequences + 1, 2]:
        first piece of each sequence, and its offset in the document; shuffle_index: the sequences in their order.
    """
    length, num_epochs = packing.seq_length, len(generators)
    full, rest = np.divmod(lengths, length)
    # Sorts by falling length, with documents that have no rest at the end; 16 bits have a faster sort.
    order = np.where(rest, length - rest, length).astype(np.min_scalar_type(length))
    sequences = packing.sequence_of_pieces()
    ends = np.cumsum(np.bincount(sequences, minlength=packing.num_packed))
    num_pieces, num_full, num_samples = packing.num_full + len(sequences), packing.num_full, packing.num_sequences
    document_index = np.empty((num_epochs, num_pieces), np.int32)
    sample_index = np.empty(
        (num_epochs * num_samples + 1, 2), np.min_scalar_type(-max(num_epochs * num_pieces, 1 << 16))
    )
    shuffled = np.arange(num_epochs * num_samples, dtype=np.min_scalar_type(max(num_epochs * num_samples, 1 << 16)))
    for epoch, generator in enumerate(generators):
        mixed = generator.permutation(len(lengths))
        by_length = mixed[np.argsort(order[mixed], kind="stable")[: len(sequences)]]
        # Pieces of a sequence are in random order: where a document is says nothing about its length.
        pieces = generator.permutation(len(sequences))
        packed = by_length[pieces[np.argsort(sequences[pieces], kind="stable")]]
        longer = mixed[full[mixed] > 0]
        document_index[epoch, :num_full] = documents[np.repeat(longer, full[longer])]
        document_index[epoch, num_full:] = documents[packed]
        rows = sample_index[epoch * num_samples : (epoch + 1) * num_samples]
        rows[:num_full, 0] = np.arange(num_full)
        parts = full[longer]
        rows[:num_full, 1] = (np.arange(num_full) - np.repeat(np.cumsum(parts) - parts, parts)) * length
        firsts = np.concatenate([[0], ends[:-1]]) if len(ends) else ends
        rows[num_full:, 0] = num_full + firsts
        rows[num_full:, 1] = full[packed[firsts]] * length
        rows[:, 0] += epoch * num_pieces
        generator.shuffle(shuffled[epoch * num_samples : (epoch + 1) * num_samples])
    sample_index[-1] = num_epochs * num_pieces, 0
    return {"document_index": document_index.reshape(-1), "sample_index": sample_index, "shuffle_index": shuffled}
