"""The facts of the layers of `--transformer-impl`."""

import pickle
from dataclasses import replace
from typing import Any

import pytest

from megafp8.config import flags
from megafp8.config.layer_backends import (
    EMULATED,
    LAYER_BACKENDS,
    LOCAL,
    TRANSFORMER_ENGINE,
    LayerBackend,
    requested_backend,
)
from megafp8.config.schema import PrecisionConfig


@pytest.mark.parametrize("name", [*LAYER_BACKENDS, "auto"])
def test_the_setting_selects_a_backend(name: str) -> None:
    found = requested_backend(replace(PrecisionConfig(), transformer_impl=name))
    assert (found and found.name) == (None if name == "auto" else name)
    assert found is LAYER_BACKENDS.get(name) and str(found) == (name if found else "None")


@pytest.mark.parametrize("backend", LAYER_BACKENDS.values(), ids=str)
def test_facts_agree_with_each_other(backend: LayerBackend) -> None:
    assert not (backend.emulates and backend.has_native_gemms)
    assert backend.quantizes == (backend.emulates or backend.has_native_gemms)
    assert ("sdpa" in backend.attention_backends) == backend.has_torch_attention
    assert backend.needs_transformer_engine == backend.has_fused_kernels != backend.has_torch_attention
    assert type(pickle.loads(pickle.dumps(backend))) is type(backend)  # it goes to other processes


@pytest.mark.parametrize(
    ("backend", "text", "has_te", "parts"),
    [
        (LOCAL, "", True, ["have not been captured"]),
        (EMULATED, "", True, []),
        (EMULATED, "", False, ["one-pass optimizer"]),
        (EMULATED, "--tensor-model-parallel-size 2 --num-experts 4", True, ["of one GPU", "with experts"]),
        (TRANSFORMER_ENGINE, "--tensor-model-parallel-size 2 --num-experts 4", True, []),
        (TRANSFORMER_ENGINE, "--fp4-format e2m1 --fp4-recipe nvfp4", True, ["stochastic rounding"]),
    ],
)
def test_what_a_cuda_graph_cannot_have(backend: LayerBackend, text: str, has_te: bool, parts: list[str]) -> None:
    found = list(backend.graph_limits(flags.parse(text.split()).config, has_te))
    assert len(found) == len(parts) and all(part in reason for part, (_, reason) in zip(parts, found, strict=True))
    assert all(flag.startswith("--") for flag, _ in found)


@pytest.mark.parametrize(
    ("backend", "world_size", "num"), [(EMULATED, 1, 1), (EMULATED, 2, 2), (LOCAL, 2, 0), (TRANSFORMER_ENGINE, 2, 0)]
)
def test_graphs_of_untested_settings(backend: LayerBackend, world_size: int, num: Any) -> None:
    config = flags.parse(["--multi-latent-attention", "--attention-dropout", "0.1"]).config
    assert len(list(backend.untested_graphs(config, world_size))) == num
