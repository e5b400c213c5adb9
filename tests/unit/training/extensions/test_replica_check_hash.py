"""The hash of bits compared with the same sum in Python's integers, and the changes that it must detect."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megafp8.training.extensions import replica_check
from megafp8.training.extensions.replica_check import BitHash, words

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks in a small tensor."""
    monkeypatch.setattr(replica_check, "BLOCK", 16)
    monkeypatch.setattr(replica_check, "MAX_BLOCKS", 16)


def slow_hash(tensor: Tensor) -> int:
    """The definition, in integers of unlimited size."""
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    data += bytes(-len(data) % 4)
    numbers = [int.from_bytes(data[offset : offset + 4], "little", signed=True) for offset in range(0, len(data), 4)]
    of_words, of_blocks, _ = (part.tolist() for part in BitHash(CPU).multipliers)
    blocks = [
        sum(m * w for m, w in zip(of_words, numbers[offset : offset + 16], strict=False))
        for offset in range(0, len(numbers), 16)
    ]
    total = sum(m * block for m, block in zip(of_blocks, blocks, strict=False))
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float8_e4m3fn])
@pytest.mark.parametrize("size", [1, 7, 8, 63, 64, 65, 200])
def test_hash_equals_its_definition(dtype: torch.dtype, size: int) -> None:
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(size)).mul(50).abs().to(dtype)
    assert BitHash(CPU).of(tensor).item() == slow_hash(tensor)


def test_every_bit_changes_the_hash() -> None:
    """No two changes are equal, so that no two of them cancel."""
    tensor = torch.randn(40, generator=torch.Generator().manual_seed(1)).bfloat16()
    seen = {BitHash(CPU).of(tensor).item()}
    for offset in range(tensor.numel()):
        for bit in range(16):
            changed = tensor.clone()
            changed.view(torch.int16)[offset] ^= -(1 << 15) if bit == 15 else 1 << bit
            seen.add(BitHash(CPU).of(changed).item())
    assert len(seen) == 1 + 40 * 16


def test_positions_and_signed_zeros_change_the_hash() -> None:
    hasher = BitHash(CPU)
    tensor = torch.arange(200, dtype=torch.float32)
    swapped, turned = tensor.clone(), tensor.clone()
    swapped[[3, 150]] = tensor[[150, 3]]
    turned[[3, 150]] *= -1
    assert hasher.of(tensor) != hasher.of(turned)
    assert hasher.of(tensor) != hasher.of(swapped)
    assert hasher.of(torch.zeros(8)) != hasher.of(-torch.zeros(8))
    assert hasher.of(torch.tensor(1.0)) != hasher.of(torch.tensor(1.0).nextafter(torch.tensor(2.0)))


def test_memory_that_does_not_divide_is_copied_and_other_memory_is_not() -> None:
    whole = torch.arange(100, dtype=torch.uint8)
    odd = whole[3:51]
    assert BitHash(CPU).of(odd) == BitHash(CPU).of(odd.clone())
    assert words(whole[8:48]).data_ptr() == whole.data_ptr() + 8


def test_combined_hashes() -> None:
    hasher = BitHash(CPU)
    tensors = [torch.ones(3), torch.zeros(5), torch.ones(4)]
    hashes = hasher.of_all(tensors)
    assert hashes.tolist() == [hasher.of(tensor).item() for tensor in tensors]
    assert hasher.combined(hashes) != hasher.combined(hashes.flip(0))
    assert hasher.of_all([]).tolist() == [] and hasher.combined(hasher.of_all([])) == 0


def test_every_process_has_the_same_multipliers_all_odd() -> None:
    multipliers = torch.cat(BitHash(CPU).multipliers)
    assert (multipliers & 1).all()
    assert torch.equal(multipliers, torch.cat(BitHash(CPU).multipliers))
    assert len(multipliers.unique()) == len(multipliers)
