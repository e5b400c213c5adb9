"""What each recipe does to a given tensor: quantized as the emulated layers do it, then compared with the original.

Tensors to look at: from files of other programs, or made up.
"""

from __future__ import annotations

import dataclasses
import math
import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from megafp8.errors import CapabilityError, DataError
from megafp8.metrics.quantization_error import QuantizationStats, quantization_stats
from megafp8.quantization import nvfp4
from megafp8.quantization.delayed_scaling import DelayedScale
from megafp8.quantization.quantize import Quantized, dequantize, quantize
from megafp8.quantization.rounding import cast
from megafp8.quantization.scaling import amax, quant_scale_of
from megafp8.recipes import registry
from megafp8.recipes.base import Gemm, Operand, OperandRule, ScaleRule
from megafp8.recipes.formats import Format

FORMATS = ("e4m3", "e5m2")
BOTH = "row, column"
# The GEMM that sums over the columns of an operand, and so quantizes along its rows; and the one that sums over rows.
GEMMS = {
    Operand.INPUT: {"row": Gemm.FPROP, "column": Gemm.WGRAD},
    Operand.WEIGHT: {"row": Gemm.FPROP, "column": Gemm.DGRAD},
    Operand.GRAD_OUTPUT: {"row": Gemm.DGRAD, "column": Gemm.WGRAD},
}


@dataclass(frozen=True, kw_only=True)
class QuantizationResult:
    """One tensor under one rule.

    Attributes:
        tensor: its name.
        recipe, format: what it was quantized by.
        orientation: `row`, `column`, or both where they share their codes.
        granularity: what shares a scale, in words.
        scale_rule: where scales come from, in words.
        extras: what else is done, in words: a transform, after which the error is measured, or stochastic rounding.
    """

    tensor: str
    recipe: str
    format: str
    orientation: str
    granularity: str
    scale_rule: str
    extras: str
    stats: QuantizationStats


def inspect_tensor(
    name: str,
    tensor: Tensor,
    operand: Operand,
    recipes: Sequence[str],
    formats: Sequence[str],
    delayed_amax_ratio: float = 1.0,
) -> list[QuantizationResult]:
    """Every recipe in every format, along rows and columns.

    Args:
        tensor: FP32, BF16 or FP16, not empty; all dims but the last are rows.
        operand: what it is in a linear; weights have blocks of their own.
        recipes: of the registry.
        formats: of FORMATS; FP4 has one of its own.
        delayed_amax_ratio: delayed scaling knows only what was: the amax that its history holds, relative to the
            tensor's own. Below 1 the tensor has grown since, and saturates.

    Raises:
        DataError: a recipe cannot take the tensor's shape.
    """
    rows = tensor.detach().reshape(-1, tensor.shape[-1] if tensor.ndim else 1)
    for recipe in (recipe for recipe in recipes if registry.get(recipe).code_bytes < 1):
        if rows.shape[0] % nvfp4.SIZE or rows.shape[1] % 2:
            raise DataError(
                f"{name} has {rows.shape[0]} rows and {rows.shape[1]} columns: {recipe} takes rows in groups of "
                f"{nvfp4.SIZE} and columns in pairs; leave it out of --recipes"
            )
    findings = []
    for recipe in recipes:
        for fmt in formats_for(recipe, formats):
            for orientation, rule in recipe_rules(recipe, fmt, operand).items():
                findings.append(
                    QuantizationResult(
                        tensor=name,
                        recipe=recipe,
                        format=rule.format.name,
                        orientation=orientation,
                        granularity=rule.granularity,
                        scale_rule=rule.scale_rule.value,
                        extras=rule.extras,
                        stats=stats_under(rows, rule, delayed_amax_ratio),
                    )
                )
    return findings


def stats_under(rows: Tensor, rule: OperandRule, delayed_amax_ratio: float = 1.0) -> QuantizationStats:
    """Quantize [rows, columns] by a rule and compare."""
    scale = _scale_from_before(rows, rule, delayed_amax_ratio)
    generator = torch.Generator(rows.device).manual_seed(0) if rule.is_stochastic else None
    quantized = quantize(rows, rule, delayed=scale, generator=generator)
    values = nvfp4.transform_columns(rows) if rule.is_transformed else rows
    return quantization_stats(values, dequantize(quantized), element_scales(quantized), rule.format.max)


def element_scales(quantized: Quantized) -> Tensor:
    """The dequantization scale of each value, FP32 in the shape of the tensor: what a code of 1 would stand for."""
    ones = dataclasses.replace(quantized, codes=_code_of_one(quantized.rule.format).expand_as(quantized.codes))
    return dequantize(ones)


def _code_of_one(fmt: Format) -> Tensor:
    """Codes of 1.0, as many as share a byte."""
    return cast(torch.ones(1, fmt.codes_per_byte), fmt)


def formats_for(recipe: str, formats: Sequence[str]) -> Sequence[str]:
    """Those of the formats that a recipe has, or its own where it has none of them."""
    known = registry.get(recipe)
    return [fmt for fmt in formats if fmt in known.formats] or [known.default_format]


def recipe_rules(recipe: str, fmt: str, operand: Operand) -> dict[str, OperandRule]:
    """The rules of an operand by orientation; one entry where both are the same."""
    built = registry.get(recipe).rules(fmt)
    rules = {orientation: built.rule(operand, gemm) for orientation, gemm in GEMMS[operand].items()}
    if rules["row"] == rules["column"]:
        return {BOTH: rules["row"]}
    return rules


def _scale_from_before(rows: Tensor, rule: OperandRule, amax_ratio: float) -> DelayedScale | None:
    """The scale of delayed scaling whose history has this multiple of the tensor's amax; None for other rules."""
    if rule.scale_rule is not ScaleRule.DELAYED:
        return None
    return DelayedScale(quant_scale_of(amax(rows) * amax_ratio, rule.format, rule.scale_rule), amax=None)


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
