"""State of an optimizer that has made no step."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import torch

from megafp8.checkpoint.state_dict import initialize_optimizer_state


class FusedAdam:
    """The used part of Transformer Engine's Adam."""

    store_param_remainders = True

    def __init__(self) -> None:
        self.weights = [torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2)]
        self.param_groups = [{"params": self.weights}]
        self.state: dict[torch.Tensor, dict[str, bool]] = defaultdict(dict)

    def initialize_state(self, parameter: torch.Tensor, store_param_remainders: bool) -> None:
        assert not self.state[parameter]
        self.state[parameter]["remainders"] = store_param_remainders


def test_fused_adam_initializes_its_master_weight_format() -> None:
    """Remainders are used with BF16 weights. Existing state is kept."""
    optimizer = FusedAdam()
    part = SimpleNamespace(optimizer=optimizer, init_state_fn=None, config=None)
    for _ in range(2):
        initialize_optimizer_state(part)
    assert [optimizer.state[weight] for weight in optimizer.weights] == [{"remainders": True}, {"remainders": False}]
