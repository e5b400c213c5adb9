"""Fields of `config.json` that differ between the layers of a model: sliding windows and rotary embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

from megafp8.checkpoint.convert.hf_config import HFConfig
from megafp8.config import attention_layers
from megafp8.config.schema import RunConfig
from megafp8.config.settings import settings_by_name

SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class Window:
    """Sliding windows, in all layers or some. A window of W tokens includes the query's own; here it is W-1 before.

    Attributes:
        width: where config.json has no `sliding_window`; its null is no window.
        switch: field without which there are no windows.
        every: N where every N-th layer has full attention without `layer_types`; None where no layer has.
        every_field: name of N in config.json.
        first_field: name of the number of layers before the first with a window.
        has_layer_types: whether the family has `layer_types`.
    """

    width: Optional[int] = None
    switch: Optional[str] = None
    every: Optional[int] = None
    every_field: Optional[str] = None
    first_field: Optional[str] = None
    has_layer_types: bool = False

    def read(self, hf_config: HFConfig) -> dict[str, Any]:
        width = hf_config.fields.get("sliding_window", self.width)
        if width is None or (self.switch is not None and not hf_config.flag(self.switch, False)):
            return {"model.window_size": None, "model.window_attn_skip_freq": None}
        width = hf_config.positive_int("sliding_window", self.width)
        windowed = self._windowed_layers(hf_config)
        if not any(windowed):
            return {"model.window_size": None, "model.window_attn_skip_freq": None}
        return {
            "model.window_size": f"{width - 1},0",
            "model.window_attn_skip_freq": pattern_text([not each for each in windowed], inverse=True),
        }

    def _windowed_layers(self, hf_config: HFConfig) -> list[bool]:
        """Return whether each layer has the window."""
        num_layers = read_num_layers(hf_config)
        kinds = hf_config.fields.get("layer_types") if self.has_layer_types else None
        if kinds is None:
            every = self.every
            if self.every_field is not None:
                every = hf_config.positive_int(self.every_field, self.every)
            first = 0 if self.first_field is None else hf_config.count(self.first_field, 28)
            return [layer >= first and (every is None or (layer + 1) % every != 0) for layer in range(num_layers)]
        if not isinstance(kinds, list) or len(kinds) != num_layers or not set(map(str, kinds)) <= {SLIDING, FULL}:
            hf_config.problems.append(
                f"config.json: layer_types is {kinds!r}; it has to be {SLIDING!r} or {FULL!r} for each of {num_layers} "
                "layers"
            )
            return [False] * num_layers
        return [kind == SLIDING for kind in kinds]

    def write(self, config: RunConfig) -> dict[str, Any]:
        model = config.model
        windowed = attention_layers.windowed_layers(model)
        window = attention_layers.window_size(model) if any(windowed) else None
        fields: dict[str, Any] = {"sliding_window": None if window is None else window[0] + 1}
        if self.switch is not None:
            fields[self.switch] = window is not None
        if self.has_layer_types:
            fields["layer_types"] = [SLIDING if each else FULL for each in windowed]
        if self.first_field is not None:
            fields[self.first_field] = windowed.index(True) if window is not None else len(windowed)
        return fields


@dataclass(frozen=True)
class LayersWithoutRope:
    """Layers without rotary embedding (SmolLM3). `no_rope_layers` has 1 for a layer that has one."""

    def read(self, hf_config: HFConfig) -> dict[str, Any]:
        num_layers = read_num_layers(hf_config)
        flags = hf_config.fields.get("no_rope_layers")
        if flags is None:
            every = hf_config.positive_int("no_rope_layer_interval", 4)
            flags = [int((layer + 1) % every != 0) for layer in range(num_layers)]
        if not isinstance(flags, list) or len(flags) != num_layers or not all(each in (0, 1) for each in flags):
            hf_config.problems.append(
                f"config.json: no_rope_layers is {flags!r}; it has to be 0 or 1 for each of {num_layers} layers"
            )
            flags = [1] * num_layers
        return {"model.no_rope_freq": pattern_text([not each for each in flags])}

    def write(self, config: RunConfig) -> dict[str, Any]:
        model = config.model
        assert model.num_layers is not None
        without = attention_layers.layers_without_rope(model) or (False,) * model.num_layers
        return {"no_rope_layers": [int(not each) for each in without]}


def read_num_layers(hf_config: HFConfig) -> int:
    """Return the number of layers, at most as many as a model may have; more are a problem of their own."""
    return min(hf_config.positive_int("num_hidden_layers"), settings_by_name()["model.num_layers"].maximum)


def pattern_text(chosen: Sequence[bool], inverse: bool = False) -> Optional[str]:
    """Return the shortest text of a pattern of layers; None if no layer is chosen.

    Args:
        chosen: the layers that a number N chooses, every N-th one.
        inverse: whether a list has 0 for them in place of 1.
    """
    if not any(chosen):
        return None
    every = list(chosen).index(True) + 1
    is_regular = all(each == ((layer + 1) % every == 0) for layer, each in enumerate(chosen))
    if is_regular and len(chosen) % every == 0:
        return str(every)
    return str([int(each != inverse) for each in chosen])
