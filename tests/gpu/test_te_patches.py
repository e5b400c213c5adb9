"""The patches of Transformer Engine: each is still needed and does what it documents."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from requirements import require_transformer_engine

require_transformer_engine()

import transformer_engine.pytorch as te
from transformer_engine.pytorch.optimizers import FusedAdam

from megafp8.optimizer.emulated_state import rounded_master
from megafp8.te import patches

pytestmark = pytest.mark.gpu
EVIDENCE = [(patch.name, *evidence) for patch in patches.PATCHES for evidence in patch.evidence]


@pytest.fixture(autouse=True, scope="module")
def _install() -> None:
    patches.install()


@pytest.mark.parametrize(("name", "file", "text"), EVIDENCE)
def test_transformer_engine_still_needs_the_patch(name: str, file: str, text: str) -> None:
    source = (Path(te.__file__).parents[1] / file).read_text(encoding="utf-8")
    assert text in source, f"Transformer Engine no longer has this: see whether the patch {name!r} can go"


@pytest.mark.parametrize("zeros", ["first", "second", "both"])
def test_zero_moments_stay_finite(zeros: str) -> None:
    """A shard without gradients, or with gradients whose squares underflow."""
    size = {"first": 0.0, "second": 1e-30, "both": 0.0}[zeros]
    weight = torch.nn.Parameter(torch.randn(1024, device="cuda", dtype=torch.bfloat16))
    optimizer = FusedAdam(
        [weight], lr=1e-3, master_weights=True, use_decoupled_grad=True,
        exp_avg_dtype=torch.uint8, exp_avg_sq_dtype=torch.uint8,
    )  # fmt: skip
    for _ in range(3):
        weight.decoupled_grad = torch.full_like(weight, size, dtype=torch.float32)
        optimizer.step()
    assert torch.isfinite(weight).all()
    assert torch.isfinite(optimizer.get_unscaled_state(weight, "exp_avg")).all()


def test_moments_are_stored_as_they_were_read() -> None:
    """In FP8 and FP16, after a step. FP8 codes are stored once."""
    weights = [torch.nn.Parameter(torch.randn(1000, device="cuda", dtype=torch.bfloat16)) for _ in range(50)]
    optimizer = FusedAdam(
        weights, lr=1e-3, master_weights=True, use_decoupled_grad=True,
        exp_avg_dtype=torch.uint8, exp_avg_sq_dtype=torch.float16,
    )  # fmt: skip
    for weight in weights:
        weight.decoupled_grad = torch.randn(1000, device="cuda")
    optimizer.step()
    for weight in weights:
        codes, halves = optimizer.state[weight]["exp_avg"], optimizer.state[weight]["exp_avg_sq"]
        assert codes._transpose is None
        before = [codes._data.clone(), codes._scale_inv.clone(), halves.clone()]
        for name in ("exp_avg", "exp_avg_sq"):
            optimizer.set_scaled_state(weight, name, optimizer.get_unscaled_state(weight, name).clone())
        assert all(map(torch.equal, before, (codes._data, codes._scale_inv, halves)))
        assert codes._transpose is None


def test_fp16_masters_are_stored_as_they_were_read() -> None:
    """With a power of two as scale, from which the values of a checkpoint give the same halves."""
    weights = [torch.nn.Parameter(torch.randn(1000, device="cuda", dtype=torch.bfloat16)) for _ in range(50)]
    optimizer = FusedAdam(
        weights, lr=1e-3, master_weights=True, use_decoupled_grad=True, master_weight_dtype=torch.float16,
    )  # fmt: skip
    for weight in weights:
        weight.decoupled_grad = torch.randn(1000, device="cuda")
    optimizer.step()
    for weight in weights:
        values = optimizer.get_unscaled_state(weight, "master_param").clone()
        assert torch.equal(values.cpu(), rounded_master(values.cpu()))
        before = optimizer.state[weight]["master_param"].clone()
        optimizer.set_scaled_state(weight, "master_param", values)
        assert torch.equal(before, optimizer.state[weight]["master_param"])


def test_tensors_survive_being_packed() -> None:
    tensors = {"scale_fwd": torch.rand(3, device="cuda"), "amax_history_fwd": torch.rand(16, 3, device="cuda")}
    unpacked = patches.deserialize_tensors(patches.serialize_tensors(tensors))
    assert all(torch.equal(unpacked[name], tensor.cpu()) for name, tensor in tensors.items())


def test_other_states_use_transformer_engine() -> None:
    assert patches.deserialize_tensors(None) is None
    assert patches.deserialize_tensors(torch.empty(0, dtype=torch.uint8)) is None
    assert patches.deserialize_tensors(torch.frombuffer(bytearray(b"\x80\x04N."), dtype=torch.uint8)) is None


def test_packed_gradients_are_written_once() -> None:
    """Transformer Engine zeroes those of queries, keys and values; with NaN in their place they are the same."""
    zeroed = []

    class Recording(patches.WithoutZeros):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = super().__torch_dispatch__(func, types, args, kwargs)
            if func in (torch.ops.aten.zero_.default, torch.ops.aten.fill_.Scalar) and args[0].dim() == 3:
                zeroed.append(args[0].fill_(float("nan")))
            return result

    attention = te.DotProductAttention(4, 64, attention_dropout=0.0, qkv_format="thd", attn_mask_type="padding_causal")
    ends = torch.tensor([0, 100, 101, 256, 256], dtype=torch.int32, device="cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    *leaves, weights = (torch.randn(256, 4, 64, device="cuda", generator=generator).bfloat16() for _ in range(4))

    def result(mode: type) -> list[torch.Tensor]:
        query, key, value = (leaf.clone().requires_grad_() for leaf in leaves)
        with patch.object(patches, "WithoutZeros", mode):
            output = attention(
                query, key, value, cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=256, max_seqlen_kv=256
            )
            return [output, *torch.autograd.grad(output, (query, key, value), weights.flatten(1))]

    found, expected = result(Recording), result(contextlib.nullcontext)
    assert len(zeroed) == 3, "Transformer Engine writes other zeros: see whether the patch can go"
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)
