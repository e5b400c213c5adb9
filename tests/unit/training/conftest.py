"""Fixtures of the tests of CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from simulated_device import Device, Stream

from megafp8.training import cuda_graph


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    device = Device()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Device.Graph)
    monkeypatch.setattr(torch.cuda, "graph", device.capture)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    cuda_graph.capture_stream.cache_clear()
    yield device
    cuda_graph.capture_stream.cache_clear()
