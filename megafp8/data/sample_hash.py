"""Which samples a run has read, in one hash: the proof that a resumed run goes on where it stopped.

The hash of the first n samples covers what each of them is: its shard's content, and the document and the offset that
it starts at. It is a chain over blocks of samples,

    chain(0)     = SHA-256(sequence length, keys of the shards' contents)
    chain(b + 1) = SHA-256(chain(b), ids of the samples of block b)
    hash(n)      = SHA-256(chain(n // BLOCK), ids of the samples after the last whole block)

so it knows nothing of ranks, microbatches or steps, and following a run costs what its new samples cost. It depends on
everything that decides the order (data, split, blend, seed, sequence length), and not on how long the run will be.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

from megafp8.data.gpt_dataset import ShardSource

BLOCK = 1 << 10
# Samples whose ids are looked up at once when many are hashed: 24 MiB of ids.
LOOKUP = 1 << 20


class Ordered(Protocol):
    """A dataset that can say what its samples are."""

    def __len__(self) -> int:
        """Samples that there are."""
        ...

    @property
    def sources(self) -> Sequence[ShardSource]:
        """Where the samples come from."""
        ...

    def sample_ids(self, indices: np.ndarray) -> np.ndarray:
        """What samples are, int64 [samples, 3]: number of the source, document in it, offset in that."""
        ...


@dataclass(frozen=True)
class SampleMark:
    """What a checkpoint keeps of the samples that the run has read.

    Attributes:
        num_samples: how many.
        sha256: `SampleChain.hash` of them.
        seq_length: tokens in each.
        seed: of the order.
        sources: where they come from. With the length and the seed they serve to say what differs.
    """

    num_samples: int
    sha256: str
    seq_length: int
    seed: int
    sources: tuple[ShardSource, ...]

    def plain(self) -> dict[str, Any]:
        """The mark as plain values, which `from_plain` takes."""
        return asdict(self)

    @classmethod
    def from_plain(cls, values: dict[str, Any]) -> SampleMark:
        """The mark again."""
        return cls(**{**values, "sources": tuple(ShardSource(**source) for source in values["sources"])})

    def differences(self, other: SampleMark) -> list[str]:
        """What the samples of another mark come from that these do not, a line each; empty if only the order differs.

        Two shards of one content are one, wherever they lie.
        """
        lines = []
        if self.seq_length != other.seq_length:
            lines.append(f"--seq-length: {self.seq_length} -> {other.seq_length}")
        if self.seed != other.seed:
            lines.append(f"--seed: {self.seed} -> {other.seed}")
        if len(self.sources) != len(other.sources):
            names = (" ".join(source.shard for source in mark.sources) for mark in (self, other))
            return [*lines, f"shards: {' -> '.join(names)}"]
        for old, new in zip(self.sources, other.sources, strict=True):
            name = new.shard if new.shard == old.shard else f"{old.shard} -> {new.shard}"
            if old.content != new.content:
                lines.append(f"shard {name}: other content")
            if old.weight != new.weight:
                lines.append(f"shard {name}: weight {old.weight} -> {new.weight}")
            if old.documents != new.documents:
                spans = (f"{first} to {end - 1}" for first, end in (old.documents, new.documents))
                lines.append(f"shard {name}: documents {' -> '.join(spans)}")
        return lines


class SampleChain:
    """The hashes of a dataset's first samples.

    Args:
        dataset: in the order in which the run reads it.
        seq_length: tokens in a sample.
        seed: that the order was made with.
    """

    def __init__(self, dataset: Ordered, seq_length: int, seed: int):
        self._dataset, self._seq_length, self._seed = dataset, seq_length, seed
        start = json.dumps([seq_length, *(source.content for source in dataset.sources)])
        self._start = hashlib.sha256(start.encode()).digest()
        self._num_blocks, self._digest = 0, self._start

    def __len__(self) -> int:
        """Samples that there are."""
        return len(self._dataset)

    def hash(self, num_samples: int) -> str:
        """SHA-256 of the first samples, in hexadecimal; fast for numbers that do not fall."""
        num_blocks = num_samples // BLOCK
        if num_blocks < self._num_blocks:
            self._num_blocks, self._digest = 0, self._start
        while self._num_blocks < num_blocks:
            stop = min(num_blocks, self._num_blocks + LOOKUP // BLOCK)
            ids = self._ids(self._num_blocks * BLOCK, stop * BLOCK)
            for block in ids.reshape(stop - self._num_blocks, -1):
                self._digest = hashlib.sha256(self._digest + block.tobytes()).digest()
            self._num_blocks = stop
        rest = self._ids(num_blocks * BLOCK, num_samples)
        return hashlib.sha256(self._digest + rest.tobytes()).hexdigest()

    def mark(self, num_samples: int) -> SampleMark:
        """What a checkpoint keeps after so many samples."""
        sources = tuple(self._dataset.sources)
        return SampleMark(num_samples, self.hash(num_samples), self._seq_length, self._seed, sources)

    def _ids(self, start: int, stop: int) -> np.ndarray:
        return np.ascontiguousarray(self._dataset.sample_ids(np.arange(start, stop)), dtype="<i8")
