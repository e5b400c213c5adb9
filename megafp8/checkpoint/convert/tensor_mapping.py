"""Mapping between megatron-core's tensors and those of Hugging Face model families.

A family is a table of tensor names, shapes and layouts, and a conversion of `config.json`. A layout converts between
one megatron-core tensor and its Hugging Face tensors: it only moves elements, and adds or drops vocabulary padding.
Layouts accept weights (rows, columns) and biases (rows,) on any device; on the `meta` device they compute shapes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Optional, Protocol

import torch
from torch import Tensor

from megafp8.config.schema import ModelConfig, RunConfig


@dataclass(frozen=True)
class HFFamily:
    """A family of Hugging Face models.

    Attributes:
        model_type: in config.json.
        architecture: class of its causal language model.
        unsupported_features: returns the features of a run's model that the family does not support, as text.
        to_hf_config: returns the fields of config.json for a run, except for the vocabulary.
        from_hf_config: returns settings by `section.field`. Fields that it cannot convert become problems.
        tensor_table: returns the tensors, given the number of tokens and the padded number of embedding rows.
        buffers: names of Hugging Face tensors that are not weights.
        prefix: of the Hugging Face names; some files omit it.
    """

    model_type: str
    architecture: str
    unsupported_features: Callable[[RunConfig], list[str]]
    to_hf_config: Callable[[RunConfig], dict[str, Any]]
    from_hf_config: Callable[[HFConfig], dict[str, Any]]
    tensor_table: Callable[[ModelConfig, int, int], list[TensorMapping]]
    buffers: re.Pattern[str]
    prefix: str


def unsupported_of(config: RunConfig, family_checks: Sequence[tuple[bool, str]]) -> list[str]:
    """Return the features of a run's model that a family does not support, and those that no family does, as text."""
    model = config.model
    checks = (
        *family_checks,
        (model.apply_layernorm_1p, "--apply-layernorm-1p: norm weights there are not stored - 1"),
        (model.qk_layernorm, "--qk-layernorm: queries and keys are not normalized there"),
        (model.squared_relu, "--squared-relu: not an activation there"),
        (model.window_size is not None, f"--window-size {model.window_size}: attention sees all tokens there"),
    )
    return [text for is_unsupported, text in checks if is_unsupported]


@dataclass(frozen=True)
class TensorMapping:
    """One megatron-core tensor and the Hugging Face tensors that it corresponds to.

    Attributes:
        name: in a checkpoint.
        shape: of the checkpoint's tensor.
        layout: converts between the two.
        hf_names: names of the Hugging Face tensors.
        is_linear: weight of a linear in a layer, which FP8 recipes quantize.
    """

    name: str
    shape: tuple[int, ...]
    layout: TensorLayout
    hf_names: tuple[str, ...]
    is_linear: bool = False

    def hf_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the Hugging Face tensors by name."""
        parts = self.layout.split(torch.empty(self.shape, device="meta"))
        return {name: tuple(part.shape) for name, part in zip(self.hf_names, parts, strict=True)}

    def bias(self) -> TensorMapping:
        """Return the mapping of the bias that belongs to a weight."""
        name, *hf_names = (name.removesuffix("weight") + "bias" for name in (self.name, *self.hf_names))
        return replace(self, name=name, shape=self.shape[:1], hf_names=tuple(hf_names), is_linear=False)


def repeat_per_layer(
    layer_table: Sequence[TensorMapping], num_layers: int, prefix: str, hf_prefix: str
) -> Iterator[TensorMapping]:
    """Yield the table of one layer for each layer; `{}` in the prefixes is the layer's index."""
    for layer in range(num_layers):
        for row in layer_table:
            hf_names = tuple(hf_prefix.format(layer) + name for name in row.hf_names)
            yield replace(row, name=prefix.format(layer) + row.name, hf_names=hf_names)


class TensorLayout(Protocol):
    """Conversion between one megatron-core tensor and its Hugging Face tensors."""

    def split(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return the Hugging Face tensors; views where possible."""
        ...

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the megatron-core tensor; the inverse of `split`."""
        ...


class Identity:
    """One tensor that is the same on both sides."""

    def split(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return (tensor,)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        return parts[0]


class Transposed:
    """Weight of GPT-2's `Conv1D`, of shape (inputs, outputs)."""

    def split(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return (tensor.t(),)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        return parts[0].t()


class GatedPair:
    """Gate and up projection of a gated MLP, concatenated along dim 0."""

    def split(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return tensor.chunk(2)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(tuple(parts))


@dataclass(frozen=True)
class GroupedQKV:
    """megatron-core's QKV rows [groups, (queries of a group, key, value), channels] and three separate matrices.

    Attributes:
        num_groups: key/value heads.
        channels: per head.
    """

    num_groups: int
    channels: int

    def split(self, tensor: Tensor) -> tuple[Tensor, ...]:
        grouped = tensor.unflatten(0, (self.num_groups, -1, self.channels))
        queries = grouped.shape[1] - 2
        return tuple(part.flatten(0, 2) for part in grouped.split((queries, 1, 1), dim=1))

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        grouped = [part.unflatten(0, (self.num_groups, -1, self.channels)) for part in parts]
        return torch.cat(grouped, dim=1).flatten(0, 2)


@dataclass(frozen=True)
class FusedTransposedQKV:
    """megatron-core's QKV rows and one transposed matrix (GPT-2's `c_attn`), with as many keys as queries."""

    groups: GroupedQKV

    def split(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return (torch.cat(self.groups.split(tensor)).t(),)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        return self.groups.join(parts[0].t().chunk(3))


@dataclass(frozen=True)
class PaddedVocab:
    """An embedding with one row per token; megatron-core's has padding rows at the end.

    Padding rows are set to the mean row. Their logit is then the mean logit for any hidden state and, as exp is convex,
    their probability at most 1 / tokens. Rows of zeros would have logit 0 and, with GPT-2, whose logits are far below
    zero, take all of the probability.

    Attributes:
        num_tokens: rows of the Hugging Face tensor.
        num_rows: rows of the megatron-core tensor.
    """

    num_tokens: int
    num_rows: int

    def split(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return (tensor[: self.num_tokens],)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        rows = parts[0]
        if self.num_rows == self.num_tokens:
            return rows
        mean = rows.mean(dim=0, dtype=torch.float32).to(rows.dtype)
        return torch.cat((rows, mean.expand(self.num_rows - self.num_tokens, -1)))


class HFConfig:
    """Typed access to the fields of a `config.json`, which collects all problems.

    Args:
        fields: content of the file.
        name: of the file or section, for problems.

    Attributes:
        problems: found so far. An invalid field reads as a placeholder of its type.
    """

    def __init__(self, fields: Mapping[str, Any], name: str = "config.json"):
        self.fields, self.name = fields, name
        self.problems: list[str] = []

    def positive_int(self, field: str, default: Optional[int] = None) -> int:
        """Return a positive integer; 10000.0 is accepted."""
        value = self.number(field, default)
        if value != int(value) or value < 1:
            self.problems.append(f"{self.name}: {field} is {value}, and has to be a whole number above 0")
            return 1
        return int(value)

    def number(self, field: str, default: Optional[float] = None) -> float:
        """Return a finite number."""
        value = self._get(field, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            self.problems.append(f"{self.name}: {field} is {value!r} and no number")
            return 1
        return value

    def flag(self, field: str, default: bool) -> bool:
        """Return a boolean."""
        value = self._get(field, default)
        if not isinstance(value, bool):
            self.problems.append(f"{self.name}: {field} is {value!r}, and has to be true or false")
        return bool(value)

    def section(self, field: str) -> HFConfig:
        """Return a nested object, empty if it is absent. It shares the problems."""
        value = self.fields.get(field) or {}
        if not isinstance(value, Mapping):
            self.problems.append(f"{self.name}: {field} is {value!r} and no object")
            value = {}
        section = HFConfig(value, f"{self.name}: {field}")
        section.problems = self.problems
        return section

    def require(self, field: str, *allowed: Any, default: Any) -> Any:
        """Return a field's value, which must be one of `allowed`."""
        value = self._get(field, default)
        if value not in allowed:
            self.problems.append(
                f"{self.name}: {field} is {value!r}; megafp8's models have {' or '.join(map(repr, allowed))}"
            )
            return allowed[0]
        return value

    def _get(self, field: str, default: Any) -> Any:
        """Return a field's value; null counts as absent."""
        value = self.fields.get(field)
        return default if value is None else value
