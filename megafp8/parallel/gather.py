"""Gathering updated weights at once, where their gathers otherwise overlap with the forward pass."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megatron.core.fp8_utils import is_float8tensor, post_all_gather_processing


def gather_in_next_pass(chunks: Iterable[Any]) -> None:
    """Let the next forward pass gather all weights, where that overlaps, whoever has gathered them before.

    megatron-core notes on the host that weights are gathered, and takes it back when gradients are reduced. A replayed
    graph does neither: captured after a forced gather it would have none, and a pass after it would find an old note.
    """
    for chunk in chunks:
        for group in chunk.bucket_groups:
            group.param_gather_dispatched = False


def gather_weights(chunks: Iterable[Any]) -> None:
    """Bring the parts of all weights together that the data-parallel ranks have updated; all ranks call it.

    A weight that Transformer Engine keeps in FP8 has a second copy for the backward pass, transposed. megatron-core
    0.16 makes it anew after a gather, but not after one that is forced where gathers are overlapped: the next step
    would take gradients by the weights of an earlier one.
    """
    for chunk in chunks:
        chunk.start_param_sync(force_sync=True)
        in_fp8 = [weight for weight in chunk.parameters() if is_float8tensor(weight)]
        if in_fp8 and chunk.ddp_config.overlap_param_gather:
            post_all_gather_processing(in_fp8)
