"""Places of parameters in a buffer whose buckets are padded."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

from megafp8.checkpoint.buckets import end_to_end, parts_of, places_without_padding


def padded_buffer() -> SimpleNamespace:
    """Two parameters, 10 and 20 elements, padded to 32; one of 40 padded to 64; one of 5."""
    buckets = [
        SimpleNamespace(offset=0, numel_unpadded=30),
        SimpleNamespace(offset=32, numel_unpadded=40),
        SimpleNamespace(offset=96, numel_unpadded=5),
    ]
    places = {"a": (0, 10, 0), "b": (10, 30, 0), "c": (32, 72, 1), "d": (96, 101, 2)}
    return SimpleNamespace(buckets=buckets, param_index_map=places)


def test_buckets_are_laid_end_to_end() -> None:
    assert end_to_end(padded_buffer()) == {"a": (0, 10, 0), "b": (10, 30, 0), "c": (30, 70, 1), "d": (70, 75, 2)}


def test_places_come_back() -> None:
    buffer = padded_buffer()
    before = dict(buffer.param_index_map)
    chained = SimpleNamespace(chained_optimizers=[SimpleNamespace(buffers=[buffer]), SimpleNamespace()])
    with places_without_padding(chained):
        assert buffer.param_index_map["c"] == (30, 70, 1)
    assert buffer.param_index_map == before
    with pytest.raises(RuntimeError, match="inside"), places_without_padding(chained):
        raise RuntimeError("inside")
    assert buffer.param_index_map == before


def test_an_optimizer_without_a_chain_is_its_only_part() -> None:
    optimizer = SimpleNamespace(buffers=[])
    assert parts_of(optimizer) == [optimizer]


def test_megatron_core_still_needs_it() -> None:
    """Its buckets are gathered without padding, and sliced at places that count it."""
    core = Path(importlib.util.find_spec("megatron.core").origin).parent
    source = (core / "optimizer/distrib_optimizer.py").read_text(encoding="utf-8")
    assert "world_tensors[state_key][param_world_start:param_world_end]" in source, "checkpoint/buckets.py can go"
