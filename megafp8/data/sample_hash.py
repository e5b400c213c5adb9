"""Hash of the samples that a run has read. It proves that a resumed run continues with the right samples.

The hash of the first n samples covers what identifies each of them: the content of its shard, and the document and
offset at which it starts. It is a chain over blocks of samples,

    chain(0)     = SHA-256(sequence length, packing unless `cut`, keys of the contents of the first phase's shards)
    chain(b + 1) = SHA-256(chain(b), ids of the samples of block b)
    hash(n)      = SHA-256(chain(n // BLOCK_SAMPLES), ids of the samples after the last complete block)

so it is independent of ranks, microbatches and steps, and updating it costs only the new samples. It depends on
everything that decides the order (data, split, blend, seed, sequence length), but not on the length of the run. Shards
of later phases (`--data-phases`) are in the ids of their samples, so phases that follow may change.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

from megafp8.config.schema.io import CUT
from megafp8.data.gpt_dataset import ShardSource

BLOCK_SAMPLES = 1 << 10
# Samples whose ids are looked up at once, which take 24 MiB.
LOOKUP_SAMPLES = 1 << 20


class IdentifiableDataset(Protocol):
    """A dataset that can identify its samples."""

    def __len__(self) -> int:
        """Number of samples."""

    @property
    def sources(self) -> Sequence[ShardSource]:
        """The shards that the samples come from."""

    def sample_ids(self, indices: np.ndarray) -> np.ndarray:
        """Ids of samples, int64 [samples, 3]: number of the source, document in it, offset in the document."""


@dataclass(frozen=True)
class SampleHash:
    """The hash of the samples that the run has read, as a checkpoint keeps it.

    Attributes:
        num_samples: number of samples.
        sha256: `SampleHashChain.hash` of them.
        seq_length: tokens per sample.
        seed: seed of the order.
        sources: the shards. With `seq_length`, `seed` and `packing` they explain why hashes differ.
        packing: of documents in the samples.
    """

    num_samples: int
    sha256: str
    seq_length: int
    seed: int
    sources: tuple[ShardSource, ...]
    packing: str = CUT

    def plain(self) -> dict[str, Any]:
        """Return plain values, which `utils.plain_data.from_plain` takes.

        Without phases and packing they are those of versions without them.
        """
        values = asdict(self)
        if self.packing == CUT:
            del values["packing"]
        for source in values["sources"]:
            if not source["first_sample"]:
                del source["first_sample"]
        return values

    def differences(self, other: SampleHash) -> list[str]:
        """Describe how the origin of the other samples differs, one line each; empty if only the order differs.

        Shards with the same content are equal, whatever their paths.
        """
        lines = []
        if self.seq_length != other.seq_length:
            lines.append(f"--seq-length: {self.seq_length} -> {other.seq_length}")
        if self.seed != other.seed:
            lines.append(f"--seed: {self.seed} -> {other.seed}")
        if self.packing != other.packing:
            lines.append(f"--packing: {self.packing} -> {other.packing}")
        if len(self.sources) != len(other.sources):
            names = (" ".join(map(_name, each.sources)) for each in (self, other))
            return [*lines, f"shards: {' -> '.join(names)}"]
        for old, new in zip(self.sources, other.sources, strict=True):
            name = new.shard if new.shard == old.shard else f"{old.shard} -> {new.shard}"
            if old.first_sample != new.first_sample:
                lines.append(f"shard {name}: from sample {old.first_sample} -> {new.first_sample}")
            if old.content != new.content:
                lines.append(f"shard {name}: different content")
            if old.weight != new.weight:
                lines.append(f"shard {name}: weight {old.weight} -> {new.weight}")
            if old.documents != new.documents:
                spans = (f"{first} to {end - 1}" for first, end in (old.documents, new.documents))
                lines.append(f"shard {name}: documents {' -> '.join(spans)}")
        return lines


def _name(source: ShardSource) -> str:
    return f"{source.shard} (from sample {source.first_sample})" if source.first_sample else source.shard


class SampleHashChain:
    """The hashes of the first samples of a dataset.

    Args:
        dataset: dataset in the order in which the run reads it.
        seq_length: tokens per sample.
        seed: seed of the order.
        packing: of documents in the samples.
    """

    def __init__(self, dataset: IdentifiableDataset, seq_length: int, seed: int, packing: str = CUT):
        self._dataset, self._seq_length, self._seed, self._packing = dataset, seq_length, seed, packing
        first_phase = [source.content for source in dataset.sources if not source.first_sample]
        # A sample's id names only its first document, so the hash of no sample may be that of another packing.
        start = json.dumps([seq_length, *([] if packing == CUT else [packing]), *first_phase])
        self._start = hashlib.sha256(start.encode()).digest()
        self._num_blocks, self._digest = 0, self._start

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._dataset)

    def hash(self, num_samples: int) -> str:
        """SHA-256 of the first samples, in hexadecimal. It is fast if `num_samples` does not decrease between calls."""
        num_blocks = num_samples // BLOCK_SAMPLES
        if num_blocks < self._num_blocks:
            self._num_blocks, self._digest = 0, self._start
        while self._num_blocks < num_blocks:
            stop = min(num_blocks, self._num_blocks + LOOKUP_SAMPLES // BLOCK_SAMPLES)
            ids = self._ids(self._num_blocks * BLOCK_SAMPLES, stop * BLOCK_SAMPLES)
            for block in ids.reshape(stop - self._num_blocks, -1):
                self._digest = hashlib.sha256(self._digest + block.tobytes()).digest()
            self._num_blocks = stop
        rest = self._ids(num_blocks * BLOCK_SAMPLES, num_samples)
        return hashlib.sha256(self._digest + rest.tobytes()).hexdigest()

    def record(self, num_samples: int) -> SampleHash:
        """Return what a checkpoint keeps after so many samples."""
        read = (source for source in self._dataset.sources if source.first_sample < max(1, num_samples))
        sources = tuple(read)
        return SampleHash(num_samples, self.hash(num_samples), self._seq_length, self._seed, sources, self._packing)

    def _ids(self, start: int, stop: int) -> np.ndarray:
        return np.ascontiguousarray(self._dataset.sample_ids(np.arange(start, stop)), dtype="<i8")
