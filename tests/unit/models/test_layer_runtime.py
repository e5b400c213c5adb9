"""The choice of what layers do with torch, and that both kinds have the same interface."""

import inspect
import sys
from types import ModuleType
from typing import Any

import pytest

import megafp8.te
from megafp8.config.layer_backends import EMULATED, LOCAL, TRANSFORMER_ENGINE, LayerBackend
from megafp8.mcore.layer_runtime import LayerRuntime
from megafp8.models.layer_runtime import EmulatedRuntime, layer_runtime


@pytest.fixture
def te_layers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in for the module that imports Transformer Engine."""
    layers: Any = ModuleType("megafp8.te.layers")
    monkeypatch.setitem(sys.modules, "megafp8.te.layers", layers)
    monkeypatch.setattr(megafp8.te, "layers", layers, raising=False)  # where another test has imported it
    monkeypatch.setitem(sys.modules, "megafp8.te.runtime", layers)
    del sys.modules["megafp8.te.runtime"]  # imported with the stand-in, and forgotten afterwards
    return layers


@pytest.mark.parametrize("backend", [EMULATED, LOCAL], ids=str)
def test_layers_without_transformer_engine_do_not_import_it(backend: LayerBackend) -> None:
    runtime = layer_runtime(backend)
    assert isinstance(runtime, EmulatedRuntime) and runtime.attention_kernel() is None
    assert not (runtime.delayed_state(None) or runtime.delayed_scales(None) or runtime.lacks_scales_of_attention([]))
    assert runtime.weights_with_fused_gradients([]) == []


def test_both_runtimes_have_the_signatures_of_the_interface(te_layers: Any) -> None:
    interface = {name: value for name, value in vars(LayerRuntime).items() if not name.startswith("_")}
    for runtime in (layer_runtime(EMULATED), layer_runtime(TRANSFORMER_ENGINE)):
        own = {name: value for name, value in vars(type(runtime)).items() if inspect.isfunction(value)}
        assert own.keys() - {"__init__"} <= interface.keys()
        for name, method in own.items():
            if name in interface:
                assert inspect.signature(method) == inspect.signature(interface[name]), name


def test_transformer_engine_is_asked_for_its_state(te_layers: Any) -> None:
    te_layers.delayed_state = lambda chunk: [f"state of {chunk}"]
    te_layers.delayed_scales = lambda chunk: [f"scales of {chunk}"]
    te_layers.lacks_scales_of_attention = lambda chunk: chunk == "b"
    te_layers.selected_attention_backend = lambda: "unfused"
    te_layers.weights_with_fused_gradients = lambda chunks: [f"weights of {chunk}" for chunk in chunks]
    runtime = layer_runtime(TRANSFORMER_ENGINE)
    assert runtime.delayed_state("a") == ["state of a"] and runtime.delayed_scales("a") == ["scales of a"]
    assert runtime.lacks_scales_of_attention(["a", "b"]) and not runtime.lacks_scales_of_attention(["a"])
    assert runtime.attention_kernel() == "unfused"
    assert runtime.weights_with_fused_gradients(["a"]) == ["weights of a"]  # type: ignore[comparison-overlap]
