"""Which tensors of a model are which ones there: a table of names, shapes and layouts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from megafp8.huggingface.layouts import Layout


@dataclass(frozen=True)
class Row:
    """One tensor of ours.

    Attributes:
        ours: its name in a checkpoint.
        shape: its shape.
        layout: how it lies in theirs.
        theirs: their names.
        is_linear: a weight of a layer's linear, which FP8 recipes quantize.
    """

    ours: str
    shape: tuple[int, ...]
    layout: Layout
    theirs: tuple[str, ...]
    is_linear: bool = False

    def their_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes by their names."""
        parts = self.layout.split(torch.empty(self.shape, device="meta"))
        return {name: tuple(part.shape) for name, part in zip(self.theirs, parts, strict=True)}

    def bias(self) -> Row:
        """The bias beside a weight: its rows, by the same layout."""
        theirs = tuple(name.removesuffix("weight") + "bias" for name in self.theirs)
        ours = self.ours.removesuffix("weight") + "bias"
        return replace(self, ours=ours, shape=self.shape[:1], theirs=theirs, is_linear=False)


def in_layers(rows: Iterable[Row], num_layers: int, ours: str, theirs: str) -> Iterator[Row]:
    """The rows of one layer for each layer, with the layer's prefix before all names; `{}` in it is the layer."""
    rows = list(rows)
    for layer in range(num_layers):
        for row in rows:
            names = tuple(theirs.format(layer) + name for name in row.theirs)
            yield replace(row, ours=ours.format(layer) + row.ours, theirs=names)
