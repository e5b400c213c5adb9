"""FP8 weights with master weights in Adam: all are cast from these, which start from the initial weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megafp8.mcore import patches
from megafp8.te import adam_weights

INITIAL = torch.tensor([1.0, 2.3, 3.7, 4.0], dtype=torch.bfloat16)


@pytest.mark.parametrize(("file", "text"), adam_weights.EVIDENCE)
def test_the_faults_are_still_there(file: str, text: str) -> None:
    assert text in (patches.core_folder() / file).read_text(encoding="utf-8")


class Weight:
    """What is read of a Float8Tensor of Transformer Engine."""

    def __init__(self) -> None:
        self._high_precision_init_val = INITIAL

    def clear_high_precision_init_val(self) -> None:
        del self._high_precision_init_val


class Adam:
    """Stores master weights as FP16 with the scale 4."""

    def __init__(self) -> None:
        self.state: dict[Any, dict[str, torch.Tensor]] = {}

    def initialize_state(self, shard: torch.Tensor, has_remainders: bool) -> None:
        assert not has_remainders
        self.state[shard] = {"master_param": torch.zeros(2, dtype=torch.float16)}

    def set_scaled_state(self, shard: torch.Tensor, name: str, values: torch.Tensor) -> None:
        self.state[shard][name] = (values / 4).half()

    def get_unscaled_state(self, shard: torch.Tensor, name: str) -> torch.Tensor:
        return self.state[shard][name].float() * 4


def optimizer_of(weights: list[Weight], owned: list[Weight], is_adams: bool = True) -> Any:
    """What a distributed optimizer of megatron-core has. Owned weights have the middle two elements on this rank."""
    span = {"param": SimpleNamespace(start=1, end=3)}
    return SimpleNamespace(
        config=SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=is_adams),
        is_stub_optimizer=False,
        buffers=[SimpleNamespace(params=[*weights, "a BF16 weight"])],
        model_float16_groups=[["a BF16 weight", *owned]],
        shard_float16_groups=[[torch.zeros(2) for _ in ("a BF16 weight", *owned)]],
        optimizer=Adam(),
        data_parallel_group="the group",
        _get_model_param_range_map=lambda weight: span,
        _copy_main_params_to_model_params=lambda: None,
    )


@pytest.fixture
def casts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The arguments of megatron-core's cast."""
    found: list[Any] = []
    monkeypatch.setattr(adam_weights, "is_float8tensor", lambda weight: isinstance(weight, Weight))
    monkeypatch.setattr(adam_weights, "quantize_param_shard", lambda *arguments: found.append(arguments))
    return found


def test_weights_are_cast_from_master_weights_that_start_as_initialized(casts: list[Any]) -> None:
    other, owned = Weight(), Weight()
    part = optimizer_of([other, owned], [owned])
    adam_weights.cast_weights_of_adam([part])
    assert not any(hasattr(weight, "_high_precision_init_val") for weight in (owned, other))
    part._copy_main_params_to_model_params()
    ((weights, masters, starts, group),) = casts
    assert weights == [other, owned] and starts == [None, 1] and group == "the group"
    assert masters[0] is None
    torch.testing.assert_close(masters[1], INITIAL[1:3].float(), rtol=2**-11, atol=0)


def test_optimizers_with_master_weights_of_their_own_stay(casts: list[Any]) -> None:
    weight = Weight()
    part = optimizer_of([weight], [weight], is_adams=False)
    before = part._copy_main_params_to_model_params
    adam_weights.cast_weights_of_adam([part])
    assert part._copy_main_params_to_model_params is before and not part.optimizer.state
