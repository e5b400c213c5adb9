"""A workaround: the distributed optimizer's checkpoint with more than one gradient bucket.

To save its state in a form that every layout can load, megatron-core 0.16 gathers each bucket, drops the padding at its
end and lays the buckets end to end; then it looks up each parameter at its place in the *padded* buffer. From the first
padded bucket on, every weight and moment in the checkpoint is another's, and nothing says so. Buckets are padded to a
multiple of 128 and of the data-parallel size, and there is more than one as soon as gradients are reduced while the
backward pass runs. (Mended upstream after 0.16; a test fails when the installed version is.)

Here each parameter's place is given without the padding, for as long as the state dictionary is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any


@contextmanager
def places_without_padding(optimizer: Any) -> Iterator[None]:
    """Within, gradient buffers of the optimizer tell the places of parameters in buckets laid end to end."""
    buffers = [buffer for part in parts_of(optimizer) for buffer in getattr(part, "buffers", ())]
    padded = [buffer.param_index_map for buffer in buffers]
    for buffer in buffers:
        buffer.param_index_map = end_to_end(buffer)
    try:
        yield
    finally:
        for buffer, places in zip(buffers, padded, strict=True):
            buffer.param_index_map = places


def parts_of(optimizer: Any) -> list[Any]:
    """The optimizers behind megatron-core's chain of them."""
    return list(getattr(optimizer, "chained_optimizers", (optimizer,)))


def end_to_end(buffer: Any) -> dict[Any, tuple[int, int, int]]:
    """Parameter -> (first element, element after the last, bucket), not counting the padding of earlier buckets."""
    lengths = [bucket.numel_unpadded for bucket in buffer.buckets]
    starts = [0, *accumulate(lengths)]
    padding = [bucket.offset - start for bucket, start in zip(buffer.buckets, starts, strict=False)]
    return {
        parameter: (first - padding[bucket], last - padding[bucket], bucket)
        for parameter, (first, last, bucket) in buffer.param_index_map.items()
    }
