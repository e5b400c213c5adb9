"""Master weights as BF16 weights and remainders."""

from __future__ import annotations

import torch

from megafp8.checkpoint.optimizer_state import join_master_weight, split_master_weight


def test_split_weights_are_joined_bitwise() -> None:
    """Every lower 16 bits with several upper 16 bits: signs, denormals, powers of two, the largest numbers."""
    high = torch.tensor([0x0000, 0x0001, 0x3F80, 0x3FFF, 0x7F7E, 0xBF80, 0x8000, 0xFF00], dtype=torch.int64)
    bits = ((high[:, None] << 16) + torch.arange(2**16)).to(torch.int32)
    master = bits.view(torch.float32)
    rounded, remainder = split_master_weight(master)
    assert (rounded.dtype, remainder.dtype) == (torch.bfloat16, torch.int16)
    assert torch.equal(join_master_weight(rounded, remainder).view(torch.int32), bits)
    is_tie = (bits & 0xFFFF) == 0x8000
    assert torch.equal(rounded[~is_tie], master.bfloat16()[~is_tie])
    assert (rounded.float().abs() > master.abs())[is_tie].all()
