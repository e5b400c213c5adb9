"""A kernel of torch in place of Transformer Engine's for packed documents, and models that attend by it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Optional
from unittest.mock import patch

import torch
from torch import Tensor

from megafp8.models.attention import CausalAttention, explicit_attention
from megafp8.te.packed_sequences import Borders, attend_exchanged, attend_gathered, attend_packed


def each_document(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    of_queries: Borders,
    of_keys: Borders,
    scale: Optional[float] = None,
    window: Optional[int] = None,
) -> Tensor:
    """One document at a time (`packed_sequences.Kernel`). Gradients of keys without queries are NaN."""
    queries, keys = of_queries.ends.tolist(), of_keys.ends.tolist()
    assert (queries[0], queries[-1], keys[0], keys[-1]) == (0, len(query), 0, len(key)) and len(queries) == len(keys)
    assert of_queries.ends.dtype == of_keys.ends.dtype == torch.int32
    is_unread = torch.zeros(len(key), 1, 1, dtype=torch.bool, device=key.device)
    key, value = key.clone(), value.clone()
    for tensor in (key, value):
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: gradient.masked_fill(is_unread, float("nan")))
    parts = []
    for first, last, first_key, last_key in zip(queries, queries[1:], keys, keys[1:], strict=False):
        num_queries, num_keys = last - first, last_key - first_key
        assert num_queries <= min(num_keys, of_queries.longest) and num_keys <= of_keys.longest
        is_unread[first_key:last_key] = num_queries == 0
        if num_queries:
            positions = torch.arange(num_keys, device=key.device)
            distance = positions[num_keys - num_queries :, None] - positions
            mask = (distance >= 0) & (distance <= (num_keys if window is None else window))
            document = (query[first:last], key[first_key:last_key], value[first_key:last_key])
            tensors = (x.transpose(0, 1)[None] for x in document)
            output = explicit_attention(*tensors, mask, query.shape[-1] ** -0.5 if scale is None else scale)
            parts.append(output[0].transpose(0, 1).flatten(1))
    return torch.cat(parts)


@contextmanager
def packed_attention(comm_type: str) -> Iterator[None]:
    """Context in which models attend as `te.attention.DocumentAttention` does, by `each_document`."""

    def forward(self: Any, query: Tensor, key: Tensor, value: Tensor, ends: Tensor, *_: Any, **__: Any) -> Tensor:
        def attend(*arguments: Any) -> Tensor:
            return each_document(*arguments, scale=self.softmax_scale, window=self.window)

        if self.context_group.size() == 1:
            return attend_packed(attend, query, key, value, ends)
        attend_split: Callable[..., Tensor] = attend_exchanged if comm_type == "a2a" else attend_gathered
        return attend_split(attend, query, key, value, ends, self.context_group)

    with patch.object(CausalAttention, "forward", forward):
        yield
