"""Logits of converted models: of transformers and of this package."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from ranks import run_ranks
from torch import Tensor

from megafp8.mcore import cpu_patches

cpu_patches.install()

from megafp8.checkpoint.directory import find_checkpoint
from megafp8.checkpoint.load import load_weights
from megafp8.checkpoint.metadata import embedding_rows, read_config
from megafp8.device import capability
from megafp8.device.platform import detect_platform
from megafp8.training.generation_precision import without_quantization
from megafp8.training.key_value_cache import KeyValueCache
from megafp8.training.language_model import build_module, single_device_config

TOKENS = torch.randint(0, 128, (2, 40), generator=torch.Generator().manual_seed(1))


def their_logits(transformers: ModuleType, folder: Path, dtype: torch.dtype = torch.float32) -> Tensor:
    """Logits of the model that transformers loads from a folder. Shape: (batch, length, tokens)."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    with torch.no_grad():
        return model(TOKENS).logits


def our_module(folder: Path) -> torch.nn.Module:
    """The model in a run's checkpoint, in high precision."""
    _, path = find_checkpoint(folder) or (0, folder)
    config, implementation = single_device_config(without_quantization(read_config(path)), capability.detect_target())
    module = build_module(config, implementation, embedding_rows(path), detect_platform())
    load_weights(path, [module])
    return module


def our_logits(folder: Path) -> Tensor:
    """Logits of the model in a run's checkpoint, in high precision, including padding."""
    with torch.no_grad():
        return our_module(folder)(TOKENS, torch.arange(TOKENS.shape[1]).expand_as(TOKENS), None)


def cached_logits(folder: Path) -> Tensor:
    """The same for the first sequence, token by token with a key-value cache. Shape: (length, padded tokens)."""
    ids = TOKENS[0].tolist()
    cache = KeyValueCache(our_module(folder), torch.device("cpu"), len(ids))
    with torch.no_grad():
        return torch.stack([cache.append([token]) for token in ids])


def in_a_rank(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a function in a forked rank, since it may start threads."""
    return run_ranks(1, function, *arguments)[0]
