"""Random states of a checkpoint in the form of Megatron-LM."""

from typing import Any

import pytest

from megafp8.checkpoint.convert.to_megatron import random_states


class SavedStates:
    """The random states of one rank, as `CheckpointTensors` has them."""

    objects = ("random_state/shard_0.0.0_1.1.1",)

    def load_object(self, name: str) -> dict[str, Any]:
        return {"cpu": "cpu", "device": "device", "tracker": {}}


@pytest.mark.parametrize("seed", [1, 2**32 - 1, 2**32, 2**63 - 1])
def test_a_run_with_any_seed_has_random_states(seed: int) -> None:
    (state,) = random_states(SavedStates(), (1, 1, 1), seed)["rng_state/shard_0.0_1.1"]  # type: ignore[arg-type]
    assert state["torch_rng_state"] == "cpu" and state["np_rng_state"][0] == "MT19937"
