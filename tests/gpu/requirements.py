"""What tests on GPUs need, without which a module is skipped."""

from __future__ import annotations

import importlib.util

import pytest
import torch


def require_transformer_engine(num_gpus: int = 1) -> None:
    """Skip the module that calls it unless Transformer Engine is installed and there are as many GPUs."""
    if importlib.util.find_spec("transformer_engine") is None or torch.cuda.device_count() < num_gpus:
        gpus = "a GPU" if num_gpus == 1 else f"{num_gpus} GPUs"
        pytest.skip(f"needs Transformer Engine and {gpus}", allow_module_level=True)
