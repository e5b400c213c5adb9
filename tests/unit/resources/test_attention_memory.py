"""The planned bytes per score are those that autograd saves."""

from typing import Optional

import pytest
import torch

from megafp8.config.layer_backends import EMULATED, TRANSFORMER_ENGINE
from megafp8.config.schema import ModelConfig
from megafp8.mcore import cpu_patches

cpu_patches.install()

from megafp8.models.attention import explicit_attention
from megafp8.resources.memory import explicit_score_bytes

BATCH, HEADS, LENGTH, CHANNELS = 2, 3, 64, 4
NUM_SCORES = BATCH * HEADS * LENGTH * LENGTH


@pytest.mark.parametrize("softcapping", [None, 3.0])
@pytest.mark.parametrize("softmax_type", ["vanilla", "off-by-one"])
def test_bytes_per_score(softcapping: Optional[float], softmax_type: str) -> None:
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and storage.nbytes() >= 4 * NUM_SCORES:
            saved[storage.data_ptr()] = 4 * NUM_SCORES  # without the column of the offset
        return tensor

    query, key, value = (torch.randn(BATCH, HEADS, LENGTH, CHANNELS, requires_grad=True) for _ in range(3))
    offset = torch.zeros(HEADS) if softmax_type == "off-by-one" else None
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = explicit_attention(query, key, value, mask, 0.5, softcapping, offset)
    model = ModelConfig(attention_logit_softcapping=softcapping, softmax_type=softmax_type)
    assert sum(saved.values()) == NUM_SCORES * explicit_score_bytes(model, EMULATED, "unfused")
    is_fused = softcapping is None and offset is None
    assert (explicit_score_bytes(model, EMULATED) == 0) == is_fused
    assert output.requires_grad  # the saved tensors live until here
    is_in_torch = softcapping is not None
    assert bool(explicit_score_bytes(model, TRANSFORMER_ENGINE, "unfused")) == is_in_torch
