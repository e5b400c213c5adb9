"""megatron-core treats our weights as FP8 weights, and other tensors as before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_cpu_patches import core_source

from megafp8.mcore import cpu_patches, patches

cpu_patches.install()

ENTERED = {
    "fp8_utils": (
        "FP8_TENSOR_CLASS", "HAVE_TE_FP8_TENSOR_CLASS", "_modify_underlying_storage_impl", "_quantize_param_shard_impl",
        "te_post_all_gather_processing", "dequantize_fp8_tensor",
    ),
    "optimizer.distrib_optimizer": ("dequantize_fp8_tensor",),
}  # fmt: skip


class Codes:
    """Records where it was moved to."""

    def move_to(self, buffer: Any) -> None:
        self.buffer = buffer


class Weight(torch.nn.Parameter):
    """The minimum of a quantized weight."""

    def dequantize(self) -> torch.Tensor:
        return self.data + 1


@pytest.fixture
def quantized(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """`Weight` is registered, and unregistered again; yields the tensors to quantize."""
    for module, names in ENTERED.items():
        for name in names:
            patches.original_attribute(module, name)
            monkeypatch.setattr(patches.import_core(module), name, getattr(patches.import_core(module), name))
    calls: list[Any] = []
    patches.register_fp8_parameter(Weight, lambda *arguments: calls.append(arguments))
    return calls


@pytest.mark.parametrize(("file", "text"), patches.WEIGHT_EVIDENCE)
def test_megatron_core_still_knows_one_kind_only(file: str, text: str) -> None:
    assert text in core_source(file), "megatron-core no longer has this: check for another way to register the type"


def test_our_weights_are_fp8_weights(quantized: list[Any]) -> None:
    fp8_utils, weight = patches.import_core("fp8_utils"), Weight(torch.zeros(2))
    weight.codes = Codes()
    assert fp8_utils.is_float8tensor(weight)
    buffer = torch.zeros(2, dtype=torch.uint8)
    fp8_utils.modify_underlying_storage(weight, buffer)
    assert weight.codes.buffer is buffer
    fp8_utils.quantize_param_shard([weight], [None], [3], "group")
    assert quantized == [([weight], [None], [3], "group")]
    fp8_utils.post_all_gather_processing([weight])
    for module in ENTERED:
        assert patches.import_core(module).dequantize_fp8_tensor(weight).tolist() == [1.0, 1.0]


def test_other_tensors_are_unchanged(quantized: list[Any]) -> None:
    fp8_utils, plain = patches.import_core("fp8_utils"), torch.nn.Parameter(torch.zeros(2))
    assert not fp8_utils.is_float8tensor(plain)
    fp8_utils.quantize_param_shard([], [], [], "group")
    with pytest.raises(RuntimeError, match="Transformer Engine"):
        fp8_utils.modify_underlying_storage(plain, torch.zeros(2, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match="Transformer Engine"):
        fp8_utils.quantize_param_shard([plain], [None], [None], "group")
    assert quantized == []


def test_the_last_registered_type_is_asked_first(quantized: list[Any]) -> None:
    later: list[Any] = []
    patches.register_fp8_parameter(Weight, lambda *arguments: later.append(arguments))
    patches.import_core("fp8_utils").quantize_param_shard([Weight(torch.zeros(2))], [None], [None], "group")
    assert len(later) == 1
    assert quantized == []
