"""FP8 weights that Adam writes: all ranks get the scales, and master weights start from the initial weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from megafp8.mcore import patches
from megafp8.te import adam_weights


@pytest.mark.parametrize(("file", "text"), adam_weights.EVIDENCE)
def test_the_faults_are_still_there(file: str, text: str) -> None:
    assert text in (patches.core_folder() / file).read_text(encoding="utf-8")


class Weight:
    """What a Float8Tensor of Transformer Engine has."""

    def __init__(self, scale: float, amax: float, initial: Any = None):
        self._quantizer = SimpleNamespace(scale=torch.tensor([scale]), amax=torch.tensor([amax]))
        self._scale_inv = torch.ones(1)
        if initial is not None:
            self._high_precision_init_val = initial

    def clear_high_precision_init_val(self) -> None:
        if hasattr(self, "_high_precision_init_val"):
            del self._high_precision_init_val


class Adam:
    """Records what is stored."""

    def __init__(self) -> None:
        self.stored: dict[str, torch.Tensor] = {}

    def initialize_state(self, shard: torch.Tensor, remainders: bool) -> None:
        self.stored["initialized"] = shard

    def set_scaled_state(self, shard: torch.Tensor, name: str, values: torch.Tensor) -> None:
        self.stored[name] = values


def optimizer_of(weights: list[Weight], owned: list[Weight], adam: Any = None, is_adams: bool = True) -> Any:
    """What a distributed optimizer of megatron-core has. Owned weights have the middle two elements on this rank."""
    span = {"param": SimpleNamespace(start=1, end=3)}
    return SimpleNamespace(
        config=SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=is_adams),
        is_stub_optimizer=False,
        buffers=[SimpleNamespace(params=[*weights, "a BF16 weight"])],
        model_float16_groups=[owned],
        shard_float16_groups=[[torch.zeros(2) for _ in owned]],
        optimizer=adam or Adam(),
        data_parallel_group=dist.group.WORLD if dist.is_initialized() else None,
        _get_model_param_range_map=lambda weight: span,
        _copy_main_params_to_model_params=lambda: None,
    )


@pytest.fixture(autouse=True)
def fakes_are_fp8_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adam_weights, "is_float8tensor", lambda weight: isinstance(weight, Weight))


def update_on_a_rank() -> list[tuple[float, float]]:
    """Each of two ranks has measured another weight; the scales are equal."""
    adam_weights.is_float8tensor = lambda weight: isinstance(weight, Weight)
    amaxes = [(3.0, 0.0), (0.0, 5.0)][dist.get_rank()]
    weights = [Weight(scale, amax) for scale, amax in zip((8.0, 3.0), amaxes, strict=True)]
    part = optimizer_of(weights, [])
    adam_weights.complete_fp8_updates([part])
    part._copy_main_params_to_model_params()
    return [(weight._scale_inv.item(), weight._quantizer.amax.item()) for weight in weights]


def test_ranks_without_a_shard_get_scales_and_amaxes() -> None:
    third = (1 / torch.tensor(3.0)).item()
    for found in run_ranks(2, update_on_a_rank):
        assert found == [(0.125, 3.0), (third, 5.0)]


def test_master_weights_start_from_the_initial_weights() -> None:
    initial = torch.tensor([1.0, 2.3, 3.7, 4.0], dtype=torch.bfloat16)
    owned, other, adam = Weight(1.0, 0.0, initial), Weight(1.0, 0.0, initial), Adam()
    adam_weights.complete_fp8_updates([optimizer_of([owned, other], [owned], adam)])
    assert torch.equal(adam.stored["master_param"], initial[1:3].float())
    assert not any(hasattr(weight, "_high_precision_init_val") for weight in (owned, other))


def test_optimizers_that_quantize_weights_themselves_stay() -> None:
    weight, adam = Weight(1.0, 0.0, torch.ones(4)), Adam()
    part = optimizer_of([weight], [weight], adam, is_adams=False)
    before = part._copy_main_params_to_model_params
    adam_weights.complete_fp8_updates([part])
    assert part._copy_main_params_to_model_params is before and not adam.stored
