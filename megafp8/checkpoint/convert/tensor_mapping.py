"""Mapping between megatron-core's tensors and those of Hugging Face models.

A layout converts between one megatron-core tensor and its Hugging Face tensors: it only moves elements, and adds or
drops vocabulary padding. Layouts accept weights (rows, columns) and biases (rows,) on any device; on the `meta` device
they compute shapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Optional, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class TensorMapping:
    """One megatron-core tensor and the Hugging Face tensors that it corresponds to.

    Attributes:
        name: in a checkpoint.
        shape: of the checkpoint's tensor.
        layout: converts between the two.
        hf_names: names of the Hugging Face tensors.
        is_linear: weight of a linear in a layer.
        dtype: of both tensors where it is not that of the weights.
    """

    name: str
    shape: tuple[int, ...]
    layout: TensorLayout
    hf_names: tuple[str, ...]
    is_linear: bool = False
    dtype: Optional[torch.dtype] = None

    def hf_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the Hugging Face tensors by name."""
        parts = self.layout.split(torch.empty(self.shape, device="meta"))
        return {name: tuple(part.shape) for name, part in zip(self.hf_names, parts, strict=True)}

    def matrices(self) -> list[TensorMapping]:
        """Return a mapping for each matrix of a stack of experts, or only this one."""
        if not isinstance(self.layout, StackedExperts):
            return [self]
        count = self.layout.num_parts
        names = (self.hf_names[first : first + count] for first in range(0, len(self.hf_names), count))
        return [TensorMapping(self.name, self.shape[1:], self.layout.each, each, self.is_linear) for each in names]


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
class StackedExperts:
    """Weights of experts along dim 0, and the matrices of each expert.

    Attributes:
        num_experts: along dim 0.
        each: layout of one expert.
        num_parts: Hugging Face matrices of one expert.
    """

    num_experts: int
    each: TensorLayout
    num_parts: int

    def split(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return tuple(part for expert in tensor for part in self.each.split(expert))

    def join(self, parts: Iterable[Tensor]) -> Tensor:
        """Return the stack. It is filled expert by expert, so that memory holds few parts besides it."""
        parts, stack = iter(parts), None
        for index in range(self.num_experts):
            expert = self.each.join(tuple(islice(parts, self.num_parts)))
            stack = expert.new_empty(self.num_experts, *expert.shape) if stack is None else stack
            stack[index] = expert
        assert stack is not None
        return stack


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
class FusedQKV:
    """megatron-core's QKV rows and one matrix with all queries, then all keys, then all values (Phi-3)."""

    groups: GroupedQKV

    def split(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return (torch.cat(self.groups.split(tensor)),)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        num_rows = parts[0].shape[0]
        key_rows = self.groups.num_groups * self.groups.channels
        return self.groups.join(parts[0].split((num_rows - 2 * key_rows, key_rows, key_rows)))


class FusedTransposedQKV(FusedQKV):
    """megatron-core's QKV rows and one transposed matrix with all queries, keys and values (GPT-2's `c_attn`)."""

    def split(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return (super().split(tensor)[0].t(),)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        return super().join([parts[0].t()])


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
