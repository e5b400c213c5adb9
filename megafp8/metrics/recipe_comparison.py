"""Quantization error of given tensors under each recipe, and sources of such tensors: files and distributions."""

from __future__ import annotations

import math
import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Optional

import numpy as np
import torch
from torch import Tensor

from megafp8.errors import CapabilityError, DataError
from megafp8.metrics.quantization_error import QuantizationStats, quantization_stats
from megafp8.quantization.delayed_scaling import DelayedScale
from megafp8.quantization.nvfp4_variants import transformed
from megafp8.quantization.quantize import dequantize, quantize
from megafp8.quantization.quantized_tensor import Quantized
from megafp8.quantization.rounding import cast
from megafp8.quantization.scaling import compute_amax, quant_scale_of
from megafp8.recipes import registry
from megafp8.recipes.base import Gemm, Operand, OperandRule, ScaleRule

FORMATS = ("e4m3", "e5m2")
BOTH = "row, column"
# The GEMM that sums over the columns of an operand (quantized along rows), and the one that sums over its rows.
GEMMS = {
    Operand.INPUT: {"row": Gemm.FPROP, "column": Gemm.WGRAD},
    Operand.WEIGHT: {"row": Gemm.FPROP, "column": Gemm.DGRAD},
    Operand.GRAD_OUTPUT: {"row": Gemm.DGRAD, "column": Gemm.WGRAD},
}


@dataclass(frozen=True, kw_only=True)
class QuantizationResult:
    """Error of one tensor under one rule.

    Attributes:
        tensor: its name.
        orientation: `row`, `column`, or both if they share their codes.
        granularity: the values that share a scale, in words.
        scale_rule: where the scales come from, in words.
        extras: a transform, after which the error is measured, or stochastic rounding, in words.
    """

    tensor: str
    recipe: str
    format: str
    orientation: str
    granularity: str
    scale_rule: str
    extras: str
    stats: QuantizationStats


def as_rows(tensor: Tensor) -> Tensor:
    """A tensor as a matrix: all dims but the last are rows."""
    return tensor.detach().reshape(-1, tensor.shape[-1] if tensor.ndim else 1)


def shape_problem(tensor: Tensor, recipe: str) -> Optional[str]:
    """What a recipe needs of a tensor's shape that it does not have; None if nothing. FP8 recipes take any shape."""
    if registry.get(recipe).code_bytes >= 1:
        return None
    num_rows, num_columns = as_rows(tensor).shape
    length = registry.get(recipe).gemm_alignment  # at least that of its Hadamard transform
    of_columns = length if registry.get(recipe).rules().is_rotated else 2
    if num_rows % length == num_columns % of_columns == 0:
        return None
    columns = "an even number of" if of_columns == 2 else f"of {length}"
    return f"{recipe} needs a multiple of {length} rows and {columns} columns; FP8 recipes take any shape"


def inspect_tensor(
    name: str,
    tensor: Tensor,
    operand: Operand,
    recipes: Sequence[str],
    formats: Sequence[str],
    delayed_amax_ratio: float = 1.0,
) -> list[QuantizationResult]:
    """Quantize a tensor as the emulated linears do, by every recipe in every format, along rows and columns.

    Args:
        tensor: FP32, BF16 or FP16, not empty; all dims but the last are rows.
        operand: role of the tensor in a linear; weights have other blocks than activations.
        recipes: names in the registry.
        formats: of FORMATS; an FP4 recipe uses its own.
        delayed_amax_ratio: for delayed scaling, the amax in the history relative to the tensor's amax. Below 1 the
            tensor has grown since, and saturates.

    Raises:
        DataError: a recipe does not support the tensor's shape.
    """
    rows = as_rows(tensor)
    for problem in filter(None, (shape_problem(tensor, recipe) for recipe in recipes)):
        raise DataError(f"{name} has {rows.shape[0]} rows and {rows.shape[1]} columns: {problem}")
    return [
        QuantizationResult(
            tensor=name,
            recipe=recipe,
            format=rule.format.name,
            orientation=orientation,
            granularity=rule.granularity,
            scale_rule=rule.scale_rule.value,
            extras=rule.extras,
            stats=_stats_of(rows, rule, delayed_amax_ratio),
        )
        for recipe in recipes
        for fmt in formats_for(recipe, formats)
        for orientation, rule in recipe_rules(recipe, fmt, operand).items()
    ]


def _stats_of(rows: Tensor, rule: OperandRule, delayed_amax_ratio: float) -> QuantizationStats:
    """Quantize [rows, columns] by a rule and measure the error."""
    scale = None
    if rule.scale_rule is ScaleRule.DELAYED:
        amax = compute_amax(rows) * delayed_amax_ratio
        scale = DelayedScale(quant_scale_of(amax, rule.format, rule.scale_rule), amax=None)
    generator = torch.Generator(rows.device).manual_seed(0) if rule.is_stochastic else None
    quantized = quantize(rows, rule, delayed=scale, generator=generator)
    values = transformed(rows, rule, quantized.signs)
    return quantization_stats(values, dequantize(quantized), element_scales(quantized), rule.format.max)


def element_scales(quantized: Quantized) -> Tensor:
    """The dequantization scale of each value, FP32 in the shape of the tensor."""
    fmt = quantized.rule.format
    code_of_one = cast(torch.ones(1, fmt.codes_per_byte), fmt)
    return dequantize(replace(quantized, codes=code_of_one.expand_as(quantized.codes)))


def formats_for(recipe: str, formats: Sequence[str]) -> Sequence[str]:
    """The formats that a recipe supports, or its default if it supports none of them."""
    known = registry.get(recipe)
    return [fmt for fmt in formats if fmt in known.formats] or [known.default_format]


def recipe_rules(recipe: str, fmt: str, operand: Operand) -> dict[str, OperandRule]:
    """The rules of an operand by orientation; one entry if both are the same."""
    linear_recipe = registry.get(recipe).rules(fmt)
    rules: dict[str, OperandRule] = {}
    for orientation, gemm in GEMMS[operand].items():
        rule = linear_recipe.rule(operand, gemm)
        assert rule is not None, f"{recipe} quantizes all GEMMs"
        rules[orientation] = rule
    return {BOTH: rules["row"]} if rules["row"] == rules["column"] else rules


SUFFIXES = (".npy", ".pt", ".pth", ".safetensors")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
DISTRIBUTION = re.compile(r"(normal|outliers):([0-9]{1,18})x([0-9]{1,18})(?::([0-9.e+]+))?")
CHANNELS_PER_OUTLIER = 512
OUTLIER_FACTOR = 10_000.0


def is_distribution(source: str) -> bool:
    """Whether a source is `normal:...` or `outliers:...`."""
    return source.startswith(("normal:", "outliers:"))


def sample_distribution(source: str, seed: int = 0) -> Tensor:
    """A BF16 tensor of normally distributed numbers.

    Args:
        source: `normal:ROWSxCOLUMNS[:DEVIATION]`, or `outliers:ROWSxCOLUMNS[:FACTOR]`. In the latter one column in 512,
            at least one, is multiplied by the factor (default 10,000), like the outlier channels of activations.
        seed: of the numbers and of the choice of columns.

    Raises:
        DataError: the source is neither, or has no element.
    """
    match = DISTRIBUTION.fullmatch(source)
    factor = _number(match[4]) if match and match[4] else None
    if not match or not int(match[2]) * int(match[3]) or factor == 0 or (match[4] and factor is None):
        raise DataError(
            f"{source!r} is not a distribution: use normal:ROWSxCOLUMNS, normal:ROWSxCOLUMNS:DEVIATION, "
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


def load_tensor_file(path: Path, pattern: Optional[str] = None) -> dict[str, Tensor]:
    """The tensors of a file, by name. A single tensor is named after the file.

    Args:
        path: .npy, .pt or .pth (a tensor, or nested dictionaries of tensors), or .safetensors.
        pattern: shell pattern of names; default all tensors with rows and columns. A single tensor is always taken.

    Returns:
        FP32, BF16 or FP16; FP64 becomes FP32.

    Raises:
        DataError: the file does not exist, does not have the format of its suffix, or has no matching tensor.
        CapabilityError: the library for the format is not installed.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    if path.suffix not in SUFFIXES:
        raise DataError(
            f"{path}: unsupported file type {path.suffix or '(no suffix)'}; supported: {', '.join(SUFFIXES)}"
        )
    found = _flatten(_read(path), "")
    is_single = "" in found
    named = {name or path.stem: tensor for name, tensor in found.items()}
    taken = {
        name: tensor.float() if tensor.dtype == torch.float64 else tensor
        for name, tensor in named.items()
        if tensor.dtype in (*FLOATS, torch.float64)
        and tensor.numel()
        and (is_single or (tensor.ndim >= 2 if pattern is None else fnmatchcase(name, pattern)))
    }
    if not taken:
        have = ", ".join(f"{name} {list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for name, t in named.items())
        wanted = "with rows and columns" if pattern is None else f"whose name matches {pattern!r}"
        raise DataError(f"{path} has no FP32, BF16, FP16 or FP64 tensor {wanted}; its tensors: {have or 'none'}")
    return taken


def _read(path: Path) -> Any:
    """The content of a file: a tensor or a dictionary."""
    try:
        if path.suffix == ".npy":
            return torch.from_numpy(np.load(path, allow_pickle=False))
        if path.suffix == ".safetensors":
            return _read_safetensors(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except CapabilityError:
        raise
    except (OSError, ValueError, TypeError, RuntimeError, EOFError, UnpicklingError, zipfile.BadZipFile) as error:
        text = str(error).split("\n")[0]
        raise DataError(f"{path} cannot be read as {path.suffix}: {type(error).__name__}: {text}") from error


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        from safetensors.torch import load_file
    except ImportError as error:
        raise CapabilityError(
            f"{path}: .safetensors files need the package safetensors: pip install safetensors"
        ) from error
    try:
        return load_file(path)
    except Exception as error:  # the library's own exception is not a subclass of any other
        raise ValueError(error) from error


def _flatten(content: Any, prefix: str) -> dict[str, Tensor]:
    """Tensors of nested dictionaries by dotted names; other values are skipped."""
    if isinstance(content, Tensor):
        return {prefix: content}
    if not isinstance(content, Mapping):
        return {}
    found: dict[str, Tensor] = {}
    for name, value in content.items():
        found |= _flatten(value, f"{prefix}.{name}" if prefix else str(name))
    return found


def _number(text: str) -> Optional[float]:
    """A positive finite number, or None."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) and number > 0 else None
