"""Formats of exported FP8 weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ExportForm:
    """Format of exported weights for transformers, vLLM and SGLang: codes and dequant_scales.

    Attributes:
        scale_suffix: replaces `weight` in the name of the tensor of scales.
        quantization_config: entry of config.json, without the list of excluded modules.
        excluded_key: key of that list in `quantization_config`.
    """

    scale_suffix: str
    quantization_config: Mapping[str, Any]
    excluded_key: str


def compressed_tensors(strategy: str) -> Mapping[str, Any]:
    """The quantization_config of compressed-tensors for FP8 weights with one scale per "tensor" or "channel"."""
    numbers = {"num_bits": 8, "type": "float", "symmetric": True}
    activations = numbers | {"strategy": "token" if strategy == "channel" else "tensor", "dynamic": True}
    group = {
        "targets": ["Linear"],
        "weights": numbers | {"strategy": strategy, "dynamic": False},
        "input_activations": activations,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
    }
