"""How a matrix here lies in the matrices there. Every layout only moves elements, or drops and adds padding rows.

Layouts take weights (rows, columns) and biases (rows,) alike, on any device; on the `meta` device they tell shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Layout(Protocol):
    """A tensor of ours and its tensors there."""

    def split(self, whole: Tensor) -> tuple[Tensor, ...]:
        """Theirs from ours; views where that is possible."""
        ...

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Ours from theirs, the inverse."""
        ...


class Same:
    """One tensor, the same on both sides."""

    def split(self, whole: Tensor) -> tuple[Tensor, ...]:
        return (whole,)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        return parts[0]


class Transposed:
    """GPT-2's `Conv1D` has its weight as (inputs, outputs)."""

    def split(self, whole: Tensor) -> tuple[Tensor, ...]:
        return (whole.t(),)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        return parts[0].t()


class Stacked:
    """Rows of several matrices of one size, one after the other: gate and up projection of a gated MLP."""

    def split(self, whole: Tensor) -> tuple[Tensor, ...]:
        return whole.chunk(2)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(tuple(parts))


@dataclass(frozen=True)
class QueryGroups:
    """megatron-core's QKV rows, [groups, (queries of a group, key, value), channels], and three matrices there.

    Attributes:
        num_groups: key and value heads.
        channels: of a head.
    """

    num_groups: int
    channels: int

    def split(self, whole: Tensor) -> tuple[Tensor, ...]:
        grouped = whole.unflatten(0, (self.num_groups, -1, self.channels))
        queries = grouped.shape[1] - 2
        return tuple(part.flatten(0, 2) for part in grouped.split((queries, 1, 1), dim=1))

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        grouped = [part.unflatten(0, (self.num_groups, -1, self.channels)) for part in parts]
        return torch.cat(grouped, dim=1).flatten(0, 2)


@dataclass(frozen=True)
class FusedQueryGroups:
    """The same with as many keys as queries, in one transposed matrix there (GPT-2's `c_attn`)."""

    groups: QueryGroups

    def split(self, whole: Tensor) -> tuple[Tensor, ...]:
        return (torch.cat(self.groups.split(whole)).t(),)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        return self.groups.join(parts[0].t().chunk(3))


@dataclass(frozen=True)
class Vocabulary:
    """A row a token; ours has padding rows behind them.

    A padding row becomes the mean of all tokens' rows. Then its logit is the mean of theirs, whatever the hidden state,
    and as the exponential is convex, its probability at most 1 / tokens. (Rows of zeros have a logit of 0: with GPT-2,
    whose logits are far below, they would take all of the probability.)

    Attributes:
        num_tokens: rows there.
        num_rows: rows here.
    """

    num_tokens: int
    num_rows: int

    def split(self, whole: Tensor) -> tuple[Tensor, ...]:
        return (whole[: self.num_tokens],)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        rows = parts[0]
        if self.num_rows == self.num_tokens:
            return rows
        mean = rows.mean(dim=0, dtype=torch.float32).to(rows.dtype)
        return torch.cat((rows, mean.expand(self.num_rows - self.num_tokens, -1)))
