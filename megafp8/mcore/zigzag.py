"""The order in which context-parallel ranks share a sequence, and the gather of keys and values over them.

Context parallelism splits each sequence of S tokens into 2N pieces. Rank r of N holds pieces r and 2N-1-r, the zigzag
order of megatron-core's `get_batch_on_this_cp_rank`, which balances causal attention over the ranks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from torch import Tensor


def zigzag_positions(rank: int, size: int, local_length: int, device: torch.device) -> Tensor:
    """Sequence positions of context-parallel rank `rank` of `size`. Shape (local_length,), int64."""
    piece_length = local_length // 2
    offsets = torch.arange(piece_length, device=device)
    return torch.cat((rank * piece_length + offsets, (2 * size - 1 - rank) * piece_length + offsets))


def to_sequence(tokens: Tensor, size: int) -> Tensor:
    """Tokens (S, ...) of `size` ranks, one rank after the other, in the order of the sequence."""
    pieces = tokens.chunk(2 * size)
    return torch.cat([*pieces[0::2], *reversed(pieces[1::2])])


def to_ranks(tokens: Tensor, size: int) -> Tensor:
    """The inverse: of tokens (S, ...) in the order of the sequence, those of each rank (size, S / size, ...)."""
    pieces = tokens.chunk(2 * size)
    return torch.cat([pieces[number] for rank in range(size) for number in (rank, -1 - rank)]).unflatten(0, (size, -1))


def gathered(group: dist.ProcessGroup, tensor: Tensor) -> Tensor:
    """Tokens (S / N, ...) of each rank, one rank after the other: (S, ...). Gradients are reduce-scattered."""
    return tensor_parallel.gather_from_sequence_parallel_region(tensor, tensor_parallel_output_grad=True, group=group)
