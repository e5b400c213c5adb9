"""The state of grouped linears under delayed scaling, as tensors.

megatron-core divides the state of Transformer Engine's grouped linears into those of single experts when it saves, and
joins them when it loads. It expects pickles, and megafp8 saves tensors (`te/patches.py`). With other recipes there is
no state, which megatron-core before 0.19 divides all the same, and fails.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Optional

import torch
from megatron.core.fp8_utils import get_fp8_recipe
from torch import Tensor

from megafp8.mcore.patches import import_core

EVIDENCE = (
    ("extensions/transformer_engine.py", "state_serialized = bytearray(pickle.dumps(state))"),
    ("extensions/transformer_engine.py", 'extra_fp8_variables = state["extra_fp8_variables"]'),
)


@functools.cache
def divide_and_join_tensors(
    serialize: Callable[[dict[str, Tensor]], Tensor], deserialize: Callable[[Tensor], Optional[dict[str, Tensor]]]
) -> None:
    """Patch megatron-core's grouped linear, with Transformer Engine installed; a second call does nothing.

    Args:
        serialize: makes one uint8 tensor of tensors.
        deserialize: its inverse; None for other states.
    """
    TEGroupedLinear = import_core("extensions.transformer_engine").TEGroupedLinear
    plain_decode, plain_split = TEGroupedLinear._decode_extra_state, TEGroupedLinear._split_extra_state

    def encode(self: Any, state: dict[str, Any]) -> Tensor:
        # Cloned: a slice would be saved with the tensors of all experts.
        tensors = {name: value.clone() for name, value in state.items() if isinstance(value, Tensor)}
        return serialize(tensors) if tensors else torch.empty(0, dtype=torch.uint8)

    @functools.wraps(plain_decode)
    def decode(self: Any, state: Tensor) -> Optional[dict[str, Any]]:
        tensors = deserialize(state)
        if tensors is None:
            return plain_decode(self, state)
        if not self.config.fp8:
            return None
        return {**tensors, "recipe": get_fp8_recipe(self.config), "extra_fp8_variables": {}}

    @functools.wraps(plain_split)
    def split(self: Any, state: Tensor) -> list[Tensor]:
        return plain_split(self, state) if state.numel() else [state] * self.num_gemms

    TEGroupedLinear._encode_extra_state = encode
    TEGroupedLinear._decode_extra_state = decode
    TEGroupedLinear._split_extra_state = split
