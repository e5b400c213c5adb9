"""What a family of transformers' models is to a conversion.

Which tensors of a model are which ones there: a table of names, shapes and layouts.

How a matrix here lies in the matrices there. Every layout only moves elements, or drops and adds padding rows.

Layouts take weights (rows, columns) and biases (rows,) alike, on any device; on the `meta` device they tell shapes.

Reading a `config.json` of transformers: values of the right type, and everything that is wrong with them at once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Optional, Protocol

import torch
from torch import Tensor

from megafp8.config.schema import ModelConfig, RunConfig


@dataclass(frozen=True)
class Family:
    """One family.

    Attributes:
        model_type: as config.json has it.
        architecture: its causal language model's class.
        inexpressible: what of a run's model the family does not have, in words.
        to_theirs: a run's model as fields of config.json, but for the vocabulary.
        from_theirs: fields of config.json as settings by `section.field`; what it cannot take over is a problem there.
        rows: the tensors, given tokens and rows of our embedding.
        buffers: names of theirs that are no weights, and are made anew there.
        prefix: of their names; some files leave it out.
    """

    model_type: str
    architecture: str
    inexpressible: Callable[[RunConfig], list[str]]
    to_theirs: Callable[[RunConfig], dict[str, Any]]
    from_theirs: Callable[[TheirConfig], dict[str, Any]]
    rows: Callable[[ModelConfig, int, int], list[TensorMapping]]
    buffers: re.Pattern[str]
    prefix: str


def named(is_wrong: bool, text: str) -> list[str]:
    """A problem or none."""
    return [text] if is_wrong else []


def foreign_to_all(config: RunConfig) -> list[str]:
    """What no family has."""
    model = config.model
    return [
        *named(model.apply_layernorm_1p, "--apply-layernorm-1p: norm weights there are not stored - 1"),
        *named(model.qk_layernorm, "--qk-layernorm: queries and keys are not normalized there"),
        *named(model.squared_relu, "--squared-relu: not an activation there"),
        *named(model.window_size is not None, f"--window-size {model.window_size}: attention sees all tokens there"),
    ]


@dataclass(frozen=True)
class TensorMapping:
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
    layout: TensorLayout
    theirs: tuple[str, ...]
    is_linear: bool = False

    def their_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes by their names."""
        parts = self.layout.split(torch.empty(self.shape, device="meta"))
        return {name: tuple(part.shape) for name, part in zip(self.theirs, parts, strict=True)}

    def bias(self) -> TensorMapping:
        """The bias beside a weight: its rows, by the same layout."""
        theirs = tuple(name.removesuffix("weight") + "bias" for name in self.theirs)
        ours = self.ours.removesuffix("weight") + "bias"
        return replace(self, ours=ours, shape=self.shape[:1], theirs=theirs, is_linear=False)


def in_layers(rows: Iterable[TensorMapping], num_layers: int, ours: str, theirs: str) -> Iterator[TensorMapping]:
    """The rows of one layer for each layer, with the layer's prefix before all names; `{}` in it is the layer."""
    rows = list(rows)
    for layer in range(num_layers):
        for row in rows:
            names = tuple(theirs.format(layer) + name for name in row.theirs)
            yield replace(row, ours=ours.format(layer) + row.ours, theirs=names)


class TensorLayout(Protocol):
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


class TheirConfig:
    """The fields of a model's configuration.

    Args:
        fields: what the file holds.
        name: how problems name the file, or the part of it.

    Attributes:
        problems: what was found wrong so far. A field that is wrong reads as a stand-in of its type.
    """

    def __init__(self, fields: Mapping[str, Any], name: str = "config.json"):
        self.fields, self.name = fields, name
        self.problems: list[str] = []

    def whole(self, field: str, default: Optional[int] = None) -> int:
        """A whole number above 0; 10000.0 is one."""
        value = self.number(field, default)
        if value != int(value) or value < 1:
            self.problems.append(f"{self.name}: {field} is {value}, and has to be a whole number above 0")
            return 1
        return int(value)

    def number(self, field: str, default: Optional[float] = None) -> float:
        """A number."""
        value = self._given(field, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            self.problems.append(f"{self.name}: {field} is {value!r} and no number")
            return 1
        return value

    def flag(self, field: str, default: bool) -> bool:
        """True or false."""
        value = self._given(field, default)
        if not isinstance(value, bool):
            self.problems.append(f"{self.name}: {field} is {value!r}, and has to be true or false")
        return bool(value)

    def part(self, field: str) -> TheirConfig:
        """An object inside; empty where it is left out. It shares the problems."""
        value = self.fields.get(field) or {}
        if not isinstance(value, Mapping):
            self.problems.append(f"{self.name}: {field} is {value!r} and no object")
            value = {}
        inner = TheirConfig(value, f"{self.name}: {field}")
        inner.problems = self.problems
        return inner

    def demand(self, field: str, *allowed: Any, default: Any) -> Any:
        """The value of a field of which only these can be expressed here."""
        value = self._given(field, default)
        if value not in allowed:
            self.problems.append(
                f"{self.name}: {field} is {value!r}; megafp8's models have {' or '.join(map(repr, allowed))}"
            )
            return allowed[0]
        return value

    def _given(self, field: str, default: Any) -> Any:
        """null is as good as absent."""
        value = self.fields.get(field)
        return default if value is None else value
