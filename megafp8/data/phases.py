"""The training data of a run with phases (`--data-phases`): its phases in the order of their samples.

Every shard has one order of samples for the whole run. A phase draws from it where the phase before left it, so that
nothing is read twice before the whole shard was read once. The first phase reads what a run without phases reads, and
a later phase changes no sample of those before it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Optional

import numpy as np
from torch.utils.data import ConcatDataset, Dataset

from megafp8.data.gpt_dataset import EpochsBlend, EpochsConfig, EpochsDataset, ShardSource, ids_of_draws

COUNTED_SAMPLES = 1 << 22
"""Samples that are counted at once, which takes 32 MiB."""


class PhaseSamples(Dataset):
    """The samples of one phase.

    Args:
        first_sample: of the phase in the run.
        datasets: of its shards, over the whole run.
        blend: which of them each sample comes from; None for one shard.
        offsets: samples that earlier phases drew from each.
    """

    def __init__(
        self, name: str, first_sample: int, num_samples: int, datasets: Sequence[EpochsDataset],
        blend: Optional[EpochsBlend], offsets: Sequence[int],
    ):  # fmt: skip
        self.name, self.first_sample, self.datasets, self._blend = name, first_sample, datasets, blend
        self._num_samples, self._offsets = num_samples, np.array(offsets, np.int64)

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        chosen, drawn = self._draws(np.array([index]))
        sample: dict[str, Any] = self.datasets[chosen[0]][drawn[0]]
        return sample

    def _draws(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The dataset of each sample, and its number there."""
        if self._blend is None:
            return np.zeros(len(indices), np.int16), indices + self._offsets[0]
        chosen = self._blend.dataset_index[indices]
        return chosen, self._blend.dataset_sample_index[indices] + self._offsets[chosen]

    @cached_property
    def num_drawn(self) -> tuple[int, ...]:
        """Samples that the phase and those before it draw from each dataset."""
        if self._blend is None:
            return (int(self._offsets[0]) + len(self),)
        counts, chosen = self._offsets.copy(), self._blend.dataset_index
        for start in range(0, len(self), COUNTED_SAMPLES):
            counts += np.bincount(chosen[start : start + COUNTED_SAMPLES], minlength=len(self.datasets))
        return tuple(counts.tolist())

    @property
    def sources(self) -> tuple[ShardSource, ...]:
        """The shards that the samples come from, as those of `EpochsDataset` and `EpochsBlend`."""
        of_blend = self.datasets[0].sources if self._blend is None else self._blend.sources
        return tuple(replace(source, first_sample=self.first_sample) for source in of_blend)

    def sample_ids(self, indices: np.ndarray) -> np.ndarray:
        """As `EpochsDataset.sample_ids`. After the first phase a source is named by its content, not by its number."""
        chosen, drawn = self._draws(indices)
        ids = ids_of_draws(self.datasets, chosen, drawn)
        if self.first_sample:
            ids[:, 0] = np.array([_content_id(source) for source in self.sources])[chosen]
        return ids

    def __str__(self) -> str:
        """The phase with the epochs of each shard that it reads, for the user."""
        shards = []
        for dataset, source, before, after in zip(
            self.datasets, self.sources, self._offsets, self.num_drawn, strict=True
        ):
            first, last = (drawn / dataset.samples_per_epoch for drawn in (before, after))
            weight = "" if source.weight is None else f"{source.weight:.4g} "
            shards.append(f"{weight}{source.shard} (epochs {first:.2f} to {last:.2f})")
        return f"data phase {self.name}, from sample {self.first_sample:,}: {', '.join(shards)}"


def _content_id(source: ShardSource) -> int:
    """A number above all numbers of sources, from the content of a shard."""
    digest = hashlib.sha256(source.content.encode()).digest()
    return int.from_bytes(digest[:7], "little") | 1 << 62


class PhasedDataset(ConcatDataset):
    """The phases in their order; sample i is sample i of the run."""

    datasets: list[PhaseSamples]

    @property
    def config(self) -> EpochsConfig:
        """The configuration of the datasets of all shards."""
        config: EpochsConfig = self.datasets[0].datasets[0].config
        return config

    @property
    def sources(self) -> tuple[ShardSource, ...]:
        """The shards of all phases."""
        return tuple(source for phase in self.datasets for source in phase.sources)

    def sample_ids(self, indices: np.ndarray) -> np.ndarray:
        """As `EpochsDataset.sample_ids`; the numbers of the samples increase."""
        starts = [phase.first_sample for phase in self.datasets[1:]]
        parts = np.split(indices, np.searchsorted(indices, starts))
        return np.concatenate(
            [phase.sample_ids(part - phase.first_sample) for phase, part in zip(self.datasets, parts, strict=True)]
        )


def concatenate_phases(
    names: Sequence[str],
    sizes: Sequence[int],
    parts: Sequence[tuple[Sequence[EpochsDataset], Sequence[float]]],
    config: EpochsConfig,
) -> PhasedDataset:
    """The dataset of a run.

    Args:
        sizes: samples of each phase.
        parts: for each phase the datasets and weights of its shards. Phases share the dataset of a shard.
    """
    drawn: dict[int, int] = {}
    phases = list[PhaseSamples]()
    for name, first, size, (datasets, weights) in zip(names, accumulate([0, *sizes]), sizes, parts, strict=False):
        for phase in phases[-1:]:
            drawn |= zip(map(id, phase.datasets), phase.num_drawn, strict=True)
        blend = EpochsBlend(datasets, weights, size, config) if len(datasets) > 1 else None
        phases.append(PhaseSamples(name, first, size, datasets, blend, [drawn.get(id(each), 0) for each in datasets]))
    return PhasedDataset(phases)
