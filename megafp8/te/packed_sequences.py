"""Attention within documents by a kernel for packed sequences (format thd), also over context-parallel ranks.

The kernel gets the sequences of a microbatch one after the other, and the borders of documents as cumulative lengths.
Only attention sees this format, so the shapes of all other layers, and of messages between pipeline stages, stay those
of sequences. Transformer Engine's own context parallelism splits each document over the ranks, which needs padded ones.
Here the ranks split sequences (`mcore/zigzag.py`), and the kernel is that of one rank:

- `attend_exchanged`: an all-to-all gives each rank all tokens of some heads, and another one returns the output.
- `attend_gathered`: keys and values are gathered. The queries of each of the two pieces attend to the keys up to the
  end of the piece: of a document, the last query to all keys, as the kernel aligns them.

Shapes: query (S, B, heads, channels), key and value (S, B, kv-heads, channels), those of the value may be other ones;
output (S, B, heads * channels of the value), where S counts the tokens of this rank.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import all_to_all
from torch import Tensor

from megafp8.mcore.zigzag import gathered, to_ranks, to_sequence
from megafp8.utils.integers import round_up

MAX_LENGTH_MULTIPLE = 64  # cuDNN needs it where queries are fewer than keys


class Borders(NamedTuple):
    """Where documents lie in packed queries or keys.

    Attributes:
        ends: int32 [documents + 1], cumulative lengths, which start at 0.
        longest: a bound of the lengths.
    """

    ends: Tensor
    longest: int


class Kernel(Protocol):
    """Attention of packed documents."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, of_queries: Borders, of_keys: Borders) -> Tensor:
        """Causal attention of (tokens, heads, channels); returns (tokens, heads * channels).

        The last query of a document attends to all of its keys. A document may have keys without queries, whose
        gradients the kernel may leave undefined.
        """


def attend_packed(attend: Kernel, query: Tensor, key: Tensor, value: Tensor, ends: Tensor) -> Tensor:
    """Attention where the rank has complete sequences.

    Args:
        ends: the borders of documents (`models/loss.py`).
    """
    length, batch_size = query.shape[:2]
    borders = Borders(ends, length)  # not the longest document, so that kernels are planned once
    output = attend(packed(query), packed(key), packed(value), borders, borders)
    return packed(output.view(batch_size, length, -1)).view(length, batch_size, -1)


def attend_exchanged(
    attend: Kernel, query: Tensor, key: Tensor, value: Tensor, ends: Tensor, group: dist.ProcessGroup
) -> Tensor:
    """Attention of a part of the heads, all of whose tokens an all-to-all brings here.

    Args:
        ends: the borders of documents in the complete sequences.
    """
    size, (length, batch_size) = group.size(), query.shape[:2]

    def to_heads(tensor: Tensor) -> Tensor:
        heads_of_ranks = swapped(tensor.reshape(length * batch_size, size, -1))
        received = all_to_all(group, heads_of_ranks).view(size * length, batch_size, -1, tensor.shape[-1])
        return to_sequence(received, size)

    output = attend_packed(attend, to_heads(query), to_heads(key), to_heads(value), ends)
    received = all_to_all(group, to_ranks(output, size)).view(size, length * batch_size, -1)
    return swapped(received).view(length, batch_size, -1)


def attend_gathered(
    attend: Kernel, query: Tensor, key: Tensor, value: Tensor, ends: Tensor, group: dist.ProcessGroup
) -> Tensor:
    """Attention of this rank's queries to the keys of all ranks. The gradients of keys and values are reduce-scattered.

    Args:
        ends: the borders of documents in the complete sequences.
    """
    size, (length, batch_size) = group.size(), query.shape[:2]
    key, value = (to_sequence(gathered(group, x), size) for x in (key, value))
    outputs = []
    for piece, queries in zip((group.rank(), 2 * size - 1 - group.rank()), query.chunk(2), strict=True):
        start, end = piece * length // 2, (piece + 1) * length // 2
        unread = packed(keys_without_queries(ends, batch_size, len(key), start)[:end, ..., None, None])
        keys, values = (DefinedGradient.apply(packed(x[:end]), unread) for x in (key, value))
        borders = (cut(ends, len(key), start, end), cut(ends, len(key), 0, end))
        output = attend(packed(queries), keys, values, *borders)
        outputs.append(output.view(batch_size, length // 2, -1).transpose(0, 1))
    return torch.cat(outputs).contiguous()


def packed(tensor: Tensor) -> Tensor:
    """The sequences of (S, B, ...) one after the other, (B * S, ...), or of (B, S, ...) token by token."""
    return swapped(tensor).flatten(0, 1)


def swapped(tensor: Tensor) -> Tensor:
    """(A, B, ...) as a contiguous (B, A, ...), without a copy where it has that order in memory."""
    view = tensor.transpose(0, 1)
    if view.is_contiguous() or not (tensor.is_cuda and tensor.is_floating_point()):
        return view.contiguous()
    from megafp8.kernels.swap import swap  # (needs triton, which machines without a GPU may lack)

    return swap(tensor)


def cut(ends: Tensor, length: int, start: int, end: int) -> Borders:
    """The borders of documents if only the tokens from `start` to `end` of each sequence are there.

    A document that has none of them is there, empty: documents of queries and keys are the same ones.

    Args:
        length: of a sequence.
    """
    sequence = ends // length
    found = sequence * (end - start) + (ends - sequence * length).clamp(start, end) - start
    return Borders(found.to(torch.int32), round_up(end - start, MAX_LENGTH_MULTIPLE))


def keys_without_queries(ends: Tensor, batch_size: int, length: int, start: int) -> Tensor:
    """Whether a token's document ends before token `start` of its sequence. Bool (S, B)."""
    starts = torch.arange(0, batch_size * length, length, dtype=torch.int32, device=ends.device)
    # The document of token `start` is the last one that begins up to it.
    number = torch.searchsorted(ends, starts + start, right=True) - 1
    return torch.arange(length, device=ends.device)[:, None] < ends[number] - starts


class DefinedGradient(torch.autograd.Function):
    """The tensor itself; its gradient is 0 where a kernel leaves it undefined."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, is_undefined: Tensor) -> Tensor:
        ctx.save_for_backward(is_undefined)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].masked_fill(*ctx.saved_tensors, 0), None
