"""Tensors to look at: from files of other programs, or made up."""

from __future__ import annotations

import math
import re
import zipfile
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from megafp8.errors import CapabilityError, DataError

SUFFIXES = (".npy", ".pt", ".pth", ".safetensors")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
DISTRIBUTION = re.compile(r"(normal|outliers):(\d+)x(\d+)(?::([0-9.e+]+))?")
CHANNELS_PER_OUTLIER = 512
OUTLIER_FACTOR = 10_000.0


def is_distribution(source: str) -> bool:
    """Is it `normal:...` or `outliers:...`?"""
    return source.startswith(("normal:", "outliers:"))


def sample_distribution(source: str, seed: int = 0) -> Tensor:
    """A BF16 tensor of normally distributed numbers.

    Args:
        source: `normal:ROWSxCOLUMNS[:DEVIATION]`, or `outliers:ROWSxCOLUMNS[:FACTOR]`, in which every 512th column, at
            least one, is so many times larger (default 10,000), as some channels of activations are.
        seed: of the numbers and of the choice of columns.

    Raises:
        DataError: it is neither, or has no element.
    """
    match = DISTRIBUTION.fullmatch(source)
    factor = _number(match[4]) if match and match[4] else None
    if not match or not int(match[2]) * int(match[3]) or factor == 0 or (match[4] and factor is None):
        raise DataError(
            f"{source!r} is no distribution: give normal:ROWSxCOLUMNS, normal:ROWSxCOLUMNS:DEVIATION, "
            "outliers:ROWSxCOLUMNS or outliers:ROWSxCOLUMNS:FACTOR, for example outliers:4096x4096:1000"
        )
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(int(match[2]), int(match[3]), generator=generator)
    if match[1] == "normal":
        return values.mul_(factor or 1.0).bfloat16()
    num_outliers = max(1, values.shape[1] // CHANNELS_PER_OUTLIER)
    channels = torch.randperm(values.shape[1], generator=generator)[:num_outliers]
    values[:, channels] *= factor or OUTLIER_FACTOR
    return values.bfloat16()


def load_tensor_file(path: Path, pattern: str | None = None) -> dict[str, Tensor]:
    """The tensors of a file, by name; a file of one tensor names it after itself.

    Args:
        path: .npy, .pt or .pth (a tensor, or a dictionary of tensors, as deep as it may be), or .safetensors.
        pattern: names to take, as in a shell. Default all with rows and columns; a lone tensor always counts.

    Returns:
        FP32, BF16 or FP16; FP64 becomes FP32.

    Raises:
        DataError: no such file, not readable as what its name says, or without a floating-point tensor to take.
        CapabilityError: the library for the format is not installed.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    if path.suffix not in SUFFIXES:
        raise DataError(f"{path}: cannot read {path.suffix or 'a file without suffix'}; give {', '.join(SUFFIXES)}")
    found = _flatten(_read(path), "")
    lone = "" in found
    named = {name or path.stem: tensor for name, tensor in found.items()}
    taken = {
        name: tensor.float() if tensor.dtype == torch.float64 else tensor
        for name, tensor in named.items()
        if tensor.dtype in (*FLOATS, torch.float64)
        and tensor.numel()
        and (lone or (tensor.ndim >= 2 if pattern is None else fnmatchcase(name, pattern)))
    }
    if not taken:
        have = ", ".join(f"{name} {list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for name, t in named.items())
        wanted = "with rows and columns" if pattern is None else f"whose name matches {pattern!r}"
        raise DataError(f"{path} has no FP32, BF16, FP16 or FP64 tensor {wanted}; it has {have or 'none at all'}")
    return taken


def _read(path: Path) -> Any:
    """What is in a file: a tensor or a dictionary."""
    try:
        if path.suffix == ".npy":
            import numpy as np

            return torch.from_numpy(np.load(path, allow_pickle=False))
        if path.suffix == ".safetensors":
            return _read_safetensors(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, ValueError, TypeError, RuntimeError, EOFError, UnpicklingError, zipfile.BadZipFile) as error:
        if isinstance(error, CapabilityError):
            raise
        text = str(error).split("\n")[0]
        raise DataError(f"{path} cannot be read as {path.suffix}: {type(error).__name__}: {text}") from error


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        from safetensors.torch import load_file
    except ImportError as error:
        raise CapabilityError(f"{path}: reading .safetensors needs a library: pip install safetensors") from error
    try:
        return load_file(path)
    except Exception as error:  # the library's own exception is not a subclass of any other
        raise ValueError(error) from error


def _flatten(content: Any, prefix: str) -> dict[str, Tensor]:
    """Tensors of nested dictionaries under dotted names; everything else in them is passed over."""
    if isinstance(content, Tensor):
        return {prefix: content}
    if not isinstance(content, Mapping):
        return {}
    found: dict[str, Tensor] = {}
    for name, value in content.items():
        found |= _flatten(value, f"{prefix}.{name}" if prefix else str(name))
    return found


def _number(text: str) -> float | None:
    """A positive finite number, or None."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) and number > 0 else None
