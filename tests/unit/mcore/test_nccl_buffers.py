"""megatron-core allocates with torch's NCCL backend, and the environment stays."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch
from test_cpu_patches import core_source

from megafp8.config.schema import ParallelConfig
from megafp8.mcore import nccl_buffers
from megafp8.mcore.patches import import_core


@pytest.mark.parametrize(("file", "text"), nccl_buffers.BUFFERS_EVIDENCE)
def test_megatron_core_still_needs_the_patch(file: str, text: str) -> None:
    assert text in core_source(file), "megatron-core no longer has this: is the patch still needed?"


def test_nothing_is_compiled_and_multicast_is_not_turned_on(monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_core("nccl_allocator")
    for name in ("_allocator", "init"):
        monkeypatch.setattr(module, name, getattr(module, name))
    world = SimpleNamespace(_get_backend=lambda device: SimpleNamespace(mem_allocator="allocator"))
    monkeypatch.setattr(nccl_buffers, "dist", SimpleNamespace(group=SimpleNamespace(WORLD=world)))
    monkeypatch.setattr(torch.cuda, "MemPool", lambda allocator: f"pool of {allocator}")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    nccl_buffers.provide_allocator(ParallelConfig())
    assert getattr(module, "_allocator", None) != "allocator"
    nccl_buffers.provide_allocator(ParallelConfig(use_nccl_ub=True))
    module.init()
    assert module.create_nccl_mem_pool(symmetric=False) == "pool of allocator"
    assert os.environ["NCCL_NVLS_ENABLE"] == "0"
