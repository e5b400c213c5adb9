"""The line of chosen settings: what is in it, and why."""

from typing import Any

import pytest

from megafp8.config.layer_backends import EMULATED, LAYER_BACKENDS, TRANSFORMER_ENGINE, LayerBackend
from megafp8.config.model_shapes import PRESETS
from megafp8.config.schema import RunConfig
from megafp8.config.settings import with_values
from megafp8.device.capability import TARGETS, Target
from megafp8.resources.automatic import Choice
from megafp8.training.checks import chosen_settings, format_chosen

LLAMA = PRESETS["llama-1b"] | {"precision.bf16": True, "data.seq_length": 2048, "training.micro_batch_size": 2}
BLOCKWISE = LLAMA | {"precision.fp8_format": "e4m3", "precision.fp8_recipe": "blockwise"}
TENSORWISE = LLAMA | {"precision.fp8_format": "hybrid", "precision.fp8_recipe": "tensorwise"}
FUSER, KERNELS = "--use-transformer-engine-op-fuser", "--quantize-kernels"


def chosen(values: dict[str, Any], target: Target, implementation: LayerBackend) -> dict[str, Choice]:
    found = list(chosen_settings(with_values(RunConfig(), values), target, implementation))
    return {choice.flag: choice for choice in found}


def test_choices_are_one_line() -> None:
    choices = [Choice("--a", "1", "first"), Choice("--b", "on", "second")]
    assert format_chosen(choices) == "chosen: --a 1 (first), --b on (second)"
    assert format_chosen([]) == ""
    choices.append(Choice("--c", "on", "third", is_detail=True))
    assert format_chosen(choices, with_details=False) == "chosen: --a 1 (first), --b on (second); 1 more with --verbose"
    assert format_chosen(choices).endswith(", --c on (third)")


@pytest.mark.parametrize(
    ("target", "implementation", "reason"),
    [
        (TARGETS["cpu"], "emulated", "no GPU"),
        (Target("a GPU", "cuda", (9, 0)), "emulated", "Transformer Engine is not installed"),
        (TARGETS["h100"], "emulated", "Transformer Engine lacks the recipes"),
        (TARGETS["h100"], "transformer_engine", "Transformer Engine has the recipes"),
    ],
)
def test_layers_are_chosen_for_a_reason(target: Target, implementation: str, reason: str) -> None:
    choice = chosen({}, target, LAYER_BACKENDS[implementation])["--transformer-impl"]
    assert (choice.value, choice.reason) == (implementation, reason)


def test_what_was_asked_for_is_no_choice() -> None:
    values = {"precision.transformer_impl": "emulated", "precision.attention_backend": "sdpa"}
    assert chosen(values, TARGETS["cpu"], EMULATED) == {}
    requested = {"precision.use_transformer_engine_op_fuser": True, "precision.quantize_kernels": "te"}
    assert not {FUSER, KERNELS} & set(chosen(BLOCKWISE | requested, TARGETS["h100"], TRANSFORMER_ENGINE))


def test_the_attention_backend_is_known_where_there_is_one() -> None:
    assert chosen({}, TARGETS["cpu"], EMULATED)["--attention-backend"].value == "sdpa"
    assert "--attention-backend" not in chosen({}, TARGETS["h100"], TRANSFORMER_ENGINE)


@pytest.mark.parametrize(
    ("values", "implementation", "fused", "cast"),
    [
        (LLAMA, "transformer_engine", True, False),
        (BLOCKWISE, "transformer_engine", True, True),
        (TENSORWISE | {"precision.precision_map": ("*.linear_qkv=blockwise",)}, "transformer_engine", True, True),
        (TENSORWISE, "transformer_engine", True, False),
        (BLOCKWISE | {"precision.precision_map": ("*.linear_fc2=tensorwise",)}, "transformer_engine", False, True),
        (BLOCKWISE, "emulated", False, False),
    ],
)
def test_kernels_are_chosen(values: dict[str, Any], implementation: str, fused: bool, cast: bool) -> None:
    found = chosen(values, TARGETS["h100"], LAYER_BACKENDS[implementation])
    assert (FUSER in found, KERNELS in found) == (fused, cast)
    assert not cast or "blockwise" in found[KERNELS].reason
