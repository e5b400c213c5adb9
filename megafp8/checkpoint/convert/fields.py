"""Fields of `config.json` and the settings that they are: what tables of families are made of.

A field reads settings, by `section.field`, from a config.json, and writes its fields from those of a model. What
it reads from its own output are the settings that it can express, so a family needs no list of what it cannot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional, Protocol

from megafp8.checkpoint.convert.hf_config import HFConfig
from megafp8.config import attention_layers
from megafp8.config.schema import ModelConfig
from megafp8.config.settings import settings_by_name

EXACT_GELU = "gelu"


class Field(Protocol):
    """One or more fields of config.json."""

    def read(self, hf_config: HFConfig) -> dict[str, Any]:
        """Return settings by `section.field`. What cannot be expressed becomes a problem of `hf_config`."""
        ...

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Return fields of config.json for a model whose settings have explicit values."""
        ...


@dataclass(frozen=True)
class Value:
    """A field that is one setting of the model.

    Attributes:
        field: in config.json.
        setting: in the section `model`.
        default: where config.json lacks the field, in transformers; None if it has to be there.
        other: name of the field in some files; not written.
        is_optional: its null is none; otherwise null counts as absent.
        is_inverse: the setting is on where the field is false.
        neutral: the value that is no setting.
    """

    field: str
    setting: str
    default: Any = None
    other: Optional[str] = None
    is_optional: bool = False
    is_inverse: bool = False
    neutral: Any = None

    def read(self, hf_config: HFConfig) -> dict[str, Any]:
        field = self.other if self.other and self.field not in hf_config.fields else self.field
        name = f"model.{self.setting}"
        if self.is_optional and hf_config.fields.get(field, self.default) is None:
            return {name: None}
        readers = {int: hf_config.positive_int, float: hf_config.number, bool: hf_config.flag}
        value = readers[settings_by_name()[name].type](field, self.default)  # type: ignore[operator]
        if self.is_inverse:
            value = not value
        return {name: None if value == self.neutral else value}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        value = getattr(model, self.setting)
        if self.is_inverse:
            value = not value
        return {self.field: self.neutral if value is None else value}


@dataclass(frozen=True)
class Fixed:
    """A field that all models here have with the same value.

    Attributes:
        values: that mean the same; the first is written.
        is_written: write the field; False for one that older versions of transformers do not know.
        is_read: refuse other values; False for one of parts that weights show.
    """

    field: str
    values: tuple[Any, ...]
    is_written: bool = True
    is_read: bool = True

    def read(self, hf_config: HFConfig) -> dict[str, Any]:
        if not self.is_read:
            return {}
        hf_config.require(self.field, *self.values, default=self.values[0])
        return {}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {self.field: self.values[0]} if self.is_written else {}


@dataclass(frozen=True)
class Heads:
    """Query heads, key/value heads and, where the family has it, the width of a head.

    Attributes:
        groups: key/value heads where config.json has none; None is one for each query head.
        width: of a head where config.json has none; None is hidden size / heads.
        has_width: whether the family has the field head_dim.
        has_groups: whether the family has the field num_key_value_heads.
    """

    groups: Optional[int] = None
    width: Optional[int] = None
    has_width: bool = True
    has_groups: bool = True

    def read(self, hf_config: HFConfig) -> dict[str, Any]:
        hidden, heads = hf_config.positive_int("hidden_size"), hf_config.positive_int("num_attention_heads")
        groups = hf_config.positive_int("num_key_value_heads", self.groups or heads) if self.has_groups else heads
        width = self.width or max(1, hidden // heads)
        width = hf_config.positive_int("head_dim", width) if self.has_width else width
        if heads % groups:
            hf_config.problems.append(f"config.json: {heads} heads cannot share {groups} key/value heads evenly")
        if not self.has_width and hidden % heads:
            hf_config.problems.append(f"config.json: hidden_size {hidden} is not a multiple of {heads} heads")
        return {
            "model.num_attention_heads": heads,
            "model.kv_channels": None if width * heads == hidden else width,
            "model.group_query_attention": groups != heads,
            "model.num_query_groups": 1 if groups == heads else groups,
        }

    def write(self, model: ModelConfig) -> dict[str, Any]:
        fields = {"num_attention_heads": model.num_attention_heads}
        fields |= {"num_key_value_heads": model.num_query_groups} if self.has_groups else {}
        return fields | ({"head_dim": model.kv_channels} if self.has_width else {})


@dataclass(frozen=True)
class SameBiases:
    """Fields that give biases to different linears, which are the same here: all linears have biases or none has."""

    def read(self, hf_config: HFConfig) -> dict[str, Any]:
        attention, mlp = hf_config.flag("attention_bias", False), hf_config.flag("mlp_bias", False)
        if attention != mlp:
            hf_config.problems.append(
                f"config.json: attention_bias {attention} and mlp_bias {mlp}; here all linears have biases or none has"
            )
        return {"model.add_bias_linear": attention}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return dict.fromkeys(("attention_bias", "mlp_bias"), model.add_bias_linear)


@dataclass(frozen=True)
class SameDropout:
    """Dropout of hidden states, which is the same in the embedding and in the layers here."""

    fields: tuple[str, ...]
    default: float = 0.0

    def read(self, hf_config: HFConfig) -> dict[str, Any]:
        dropout = hf_config.number(self.fields[0], self.default)
        for field in self.fields[1:]:
            hf_config.require(field, dropout, default=self.default)
        return {"model.hidden_dropout": dropout}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return dict.fromkeys(self.fields, model.hidden_dropout)


@dataclass(frozen=True)
class Gelu:
    """The GELU of an MLP with biases. GELU fused with its bias is the tanh approximation, and written as `openai_gelu`.

    Attributes:
        tanh: names of the approximation; the first is written.
        default: where config.json lacks the field.
    """

    field: str
    tanh: tuple[str, ...]
    default: str

    def read(self, hf_config: HFConfig) -> dict[str, Any]:
        name = hf_config.require(self.field, *self.tanh, EXACT_GELU, default=self.default)
        return {"precision.bias_gelu_fusion": name != EXACT_GELU}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {self.field: self.tanh[0] if model.openai_gelu else EXACT_GELU}


# Constants of megatron-core's RoPE scaling; no flag changes them.
LLAMA3_SCALING: Mapping[str, Any] = {
    "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192
}  # fmt: skip
ROPE_KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Rotary:
    """Rotary position embeddings, with scaled frequencies. transformers 5 has `rope_parameters` for all of it.

    Attributes:
        base: where config.json has none.
        base_field, percent_field: names in files of transformers 4.
        percent: rotated fraction of a head's channels where config.json has none.
        is_partial: whether the family can rotate a part of the channels.
        kinds: of scaling that the family has.
    """

    base: int = 10_000
    base_field: str = "rope_theta"
    percent_field: str = "partial_rotary_factor"
    percent: float = 1
    is_partial: bool = False
    kinds: tuple[str, ...] = ROPE_KINDS

    def read(self, hf_config: HFConfig) -> dict[str, Any]:
        parameters = hf_config.section("rope_parameters")
        scaling = hf_config.section("rope_scaling") if hf_config.fields.get("rope_scaling") else parameters
        holder = parameters if "rope_theta" in parameters.fields else hf_config
        field = "rope_theta" if holder is parameters else self.base_field
        values: dict[str, Any] = {"model.rotary_base": holder.base(field, self.base)}
        if self.is_partial:
            in_parameters = "partial_rotary_factor" in parameters.fields
            holder, field = (parameters, "partial_rotary_factor") if in_parameters else (hf_config, self.percent_field)
            values["model.rotary_percent"] = holder.number(field, self.percent)
        else:
            hf_config.require("partial_rotary_factor", 1, default=1)
            parameters.require("partial_rotary_factor", 1, default=1)
        spelling = "rope_type" if "rope_type" in scaling.fields else "type"
        kind = scaling.require(spelling, *self.kinds, default="default")
        if kind == "linear":
            values["model.rotary_seq_len_interpolation_factor"] = scaling.positive_int("factor")
        if kind == "llama3":
            values |= {"model.use_rope_scaling": True, "model.rope_scaling_factor": scaling.number("factor")}
            for name, value in LLAMA3_SCALING.items():
                scaling.require(name, value, default=None)
        return values | (yarn_settings(scaling) if kind == "yarn" else {})

    def write(self, model: ModelConfig) -> dict[str, Any]:
        fields: dict[str, Any] = {self.base_field: float(model.rotary_base), "rope_scaling": None}
        if self.is_partial:
            fields[self.percent_field] = model.rotary_percent
        if model.use_rope_scaling and "llama3" in self.kinds:
            fields["rope_scaling"] = {"rope_type": "llama3", "factor": model.rope_scaling_factor, **LLAMA3_SCALING}
        elif model.rotary_seq_len_interpolation_factor is not None and "linear" in self.kinds:
            fields["rope_scaling"] = {
                "rope_type": "linear", "factor": float(model.rotary_seq_len_interpolation_factor)
            }  # fmt: skip
        elif model.position_embedding_type == "yarn" and "yarn" in self.kinds:
            fields["rope_scaling"] = {"rope_type": "yarn"} | {
                field: getattr(model, name) for field, (name, _) in YARN.items()
            }
        return fields


# Fields of YaRN, their settings, and what transformers takes where they are absent; None if they have to be there.
YARN: Mapping[str, tuple[str, Any]] = {
    "factor": ("rotary_scaling_factor", None),
    "original_max_position_embeddings": ("yarn_original_max_position_embeddings", None),
    "beta_fast": ("yarn_beta_fast", 32.0),
    "beta_slow": ("yarn_beta_slow", 1.0),
    "mscale": ("mscale", 1.0),
    "mscale_all_dim": ("mscale_all_dim", 0.0),
    "truncate": ("yarn_correction_range_round_to_int", True),
}


def yarn_settings(scaling: HFConfig) -> dict[str, Any]:
    """Return settings of YaRN (Peng et al. 2023).

    Args:
        scaling: the section of config.json.
    """
    scaling.require("attention_factor", None, default=None)
    values: dict[str, Any] = {"model.position_embedding_type": "yarn"}
    for field, (name, default) in YARN.items():
        values |= Value(field, name, default).read(scaling)
    mscale, all_dim = values["model.mscale"], values["model.mscale_all_dim"]
    if not (mscale and all_dim) and (mscale, all_dim) != (1, 0):
        scaling.problems.append(
            f"{scaling.name}: mscale is {mscale:g} and mscale_all_dim {all_dim:g}; transformers takes 1 and 0 unless "
            "both are above 0, and here they are taken as given"
        )
    return values


def shape_fields(
    activation: Field, norm: Field, *, positions: int, is_tied: bool = False, init_std: float = 0.02
) -> tuple[Field, ...]:
    """Return the fields that have the same names in most families.

    Args:
        activation, norm: activation function of the MLP and epsilon of norms.
        positions, is_tied, init_std: defaults of transformers that differ.
    """
    return (
        Value("hidden_size", "hidden_size"),
        Value("intermediate_size", "ffn_hidden_size"),
        Value("num_hidden_layers", "num_layers"),
        activation,
        Value("max_position_embeddings", "max_position_embeddings", positions),
        Value("initializer_range", "init_method_std", init_std),
        norm,
        Value("tie_word_embeddings", "share_embeddings_and_output_weights", is_tied),
        Value("attention_dropout", "attention_dropout", 0.0),
    )


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

    def write(self, model: ModelConfig) -> dict[str, Any]:
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

    def write(self, model: ModelConfig) -> dict[str, Any]:
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
