"""Layers of multi-token prediction in Hugging Face files: they follow the last layer, and are not converted."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from megafp8.checkpoint.convert.family import HFFamily


def prediction_weights(stored: Mapping[str, Any], family: HFFamily, num_layers: int) -> list[str]:
    """Return the names of tensors of multi-token prediction, which are layers after the last one."""
    if not family.has_prediction_layers:
        return []
    layer = re.compile(re.escape(family.prefix) + r"layers\.(\d+)\.")
    found = {name: layer.match(name) for name in stored}
    return sorted(name for name, each in found.items() if each is not None and int(each[1]) >= num_layers)


def prediction_problems(names: list[str], drops_prediction_layers: bool) -> list[str]:
    """Return a problem unless layers of multi-token prediction are there and dropped, or neither."""
    if names and not drops_prediction_layers:
        return [
            f"num_nextn_predict_layers: {len(names)} tensors of multi-token prediction ({names[0]}), which are "
            "not converted; --drop-mtp-layers leaves them out"
        ]
    if drops_prediction_layers and not names:
        return ["--drop-mtp-layers: there are no layers of multi-token prediction; remove it"]
    return []
