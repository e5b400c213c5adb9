"""A family of Hugging Face models as a table: tensor names, fields of config.json, and settings of all its models."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from megafp8.checkpoint.convert.fields import Field
from megafp8.checkpoint.convert.hf_config import HFConfig
from megafp8.checkpoint.convert.model_tensors import EXPERT_BIAS, ModelTensor, model_tensors
from megafp8.checkpoint.convert.tensor_mapping import (
    GatedPair,
    GroupedQKV,
    Identity,
    PaddedVocab,
    StackedExperts,
    TensorLayout,
    TensorMapping,
    Transposed,
)
from megafp8.config import attention_layers, dimensions, latent_attention, mixture
from megafp8.config.mup import without_mup
from megafp8.config.schema import ModelConfig, PrecisionConfig, RunConfig
from megafp8.config.schema.setting import Role
from megafp8.config.settings import Setting, settings_with, with_values

OUTPUT_LAYER = "output_layer"
HF_EXPERT_BIAS = "e_score_correction_bias"


@dataclass(frozen=True, kw_only=True)
class HFFamily:
    """A family of Hugging Face models.

    Attributes:
        model_type: in config.json.
        architecture: class of its causal language model.
        names: Hugging Face modules of each module of megatron-core; `{}` stands for the layer, a second one for the
            expert.
        stacked_names: where they differ in files that have one tensor for all experts.
        fields: of config.json, except for the vocabulary.
        settings: that all models of the family have, by field of the section `model`.
        qkv: layout of the QKV projection, given its groups.
        has_conv1d: whether weights of linears are transposed.
        buffers: names of Hugging Face tensors that are not weights.
        prefix: of the Hugging Face names; some files omit it.
        has_prediction_layers: whether files may have layers of multi-token prediction after the last layer.
    """

    model_type: str
    architecture: str
    names: Mapping[str, tuple[str, ...]]
    fields: tuple[Field, ...]
    settings: Mapping[str, Any]
    qkv: Callable[[GroupedQKV], TensorLayout] = lambda groups: groups
    has_conv1d: bool = False
    stacked_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    buffers: re.Pattern[str] = field(default=re.compile(r".*\.rotary_emb\.inv_freq"))
    prefix: str = "model."
    has_prediction_layers: bool = False

    @property
    def output_weight(self) -> str:
        """Name of the output layer's weight."""
        return f"{self.names[OUTPUT_LAYER][0]}.weight"

    def from_hf_config(self, hf_config: HFConfig) -> dict[str, Any]:
        """Return settings by `section.field`. Fields that cannot be converted become problems."""
        values = {"model.hidden_dropout": 0.0} | {f"model.{name}": value for name, value in self.settings.items()}
        for each in self.fields:
            values |= each.read(hf_config)
        return values | {"data.seq_length": values["model.max_position_embeddings"]}

    def to_hf_config(self, model: ModelConfig, precision: PrecisionConfig) -> dict[str, Any]:
        """Return the fields of config.json for a run, except for the vocabulary.

        Args:
            model: with its number of positions.
        """
        explicit = with_explicit_values(model)
        # GELU fused with its bias is the same approximation.
        is_tanh = precision.bias_gelu_fusion or (model.openai_gelu and model.add_bias_linear)
        explicit = replace(explicit, openai_gelu=is_tanh)
        return {name: value for each in self.fields for name, value in each.write(explicit).items()}

    def unsupported_features(self, model: ModelConfig) -> list[str]:
        """Return the features of a model that the family does not have, as text.

        They are what changes if the settings are written to a config.json and read from it.
        """
        hf_config = HFConfig(self.to_hf_config(model, PrecisionConfig()))
        theirs = comparable(with_values(RunConfig(), self.from_hf_config(hf_config)).model)
        ours = comparable(model)
        # Where only one of them has experts, their number says it.
        no_more = () if mixture.is_mixture(ours) == mixture.is_mixture(theirs) else ("model.moe_",)
        return hf_config.problems + [
            f"{as_text(setting, getattr(ours, setting.field))}: a {self.architecture} has "
            f"{as_text(setting, getattr(theirs, setting.field))}"
            for setting in settings_with(Role.FUNCTION).values()
            if not setting.name.startswith(no_more) and getattr(ours, setting.field) != getattr(theirs, setting.field)
        ]

    def has_stacked_experts(self, names: Iterable[str]) -> bool:
        """Return whether a file has one tensor for all experts, given the names of its tensors."""
        stacked = [each for name, (each, *_) in self.stacked_names.items() if name.endswith(".linear_fc1")]
        return any(name.endswith(each.rpartition("{}")[2]) for name in names for each in stacked)

    def tensor_table(
        self, model: ModelConfig, num_tokens: int, num_rows: int, is_stacked: bool = False
    ) -> list[TensorMapping]:
        """Return the tensors of a model that the family supports.

        Args:
            num_tokens: rows of the Hugging Face embedding.
            num_rows: rows of megatron-core's, with padding.
            is_stacked: whether one Hugging Face tensor holds all experts.
        """
        vocab = PaddedVocab(num_tokens, num_rows)
        names = {**self.names, **self.stacked_names} if is_stacked else self.names
        return [self._mapping(tensor, model, vocab, names) for tensor in model_tensors(model, num_rows)]

    def _mapping(
        self, tensor: ModelTensor, model: ModelConfig, vocab: PaddedVocab, module_names: Mapping[str, tuple[str, ...]]
    ) -> TensorMapping:
        modules = module_names[tensor.module]
        if tensor.num_experts is not None:
            return expert_mapping(tensor, modules, tensor.num_experts)
        if tensor.kind == EXPERT_BIAS:
            name = f"{modules[0].format(tensor.layer)}.{HF_EXPERT_BIAS}"
            return TensorMapping(tensor.name, tensor.shape, Identity(), (name,), dtype=torch.float32)
        names = tuple(f"{name.format(tensor.layer)}.{tensor.kind}" for name in modules)
        layout: TensorLayout = Identity()
        if tensor.module in ("embedding.word_embeddings", OUTPUT_LAYER):
            layout = vocab
        elif tensor.module.endswith(".linear_qkv"):
            layout = self.qkv(GroupedQKV(dimensions.num_query_groups(model), dimensions.kv_channels(model)))
        elif len(names) == 2:
            layout = GatedPair()
        elif self.has_conv1d and tensor.is_linear:
            layout = Transposed()
        return TensorMapping(tensor.name, tensor.shape, layout, names, tensor.is_linear)


def expert_mapping(tensor: ModelTensor, modules: tuple[str, ...], num_experts: int) -> TensorMapping:
    """Return the mapping of a stack of experts.

    Args:
        modules: of one expert; a name without a `{}` for the expert is that of a complete stack.
    """
    if modules[0].count("{}") == 1:
        names = tuple(name.format(tensor.layer) for name in modules)
        return TensorMapping(tensor.name, tensor.shape, Identity(), names, tensor.is_linear)
    names = tuple(
        f"{name.format(tensor.layer, expert)}.{tensor.kind}" for expert in range(num_experts) for name in modules
    )
    each: TensorLayout = GatedPair() if len(modules) == 2 else Identity()
    layout = StackedExperts(num_experts, each, len(modules))
    return TensorMapping(tensor.name, tensor.shape, layout, names, tensor.is_linear)


def with_explicit_values(model: ModelConfig) -> ModelConfig:
    """Return the settings with the values that the defaults of the model, and muP, stand for."""
    model = without_mup(model)
    groups, channels = dimensions.num_query_groups(model), dimensions.kv_channels(model)
    windowed, without_rope = attention_layers.windowed_layers(model), attention_layers.layers_without_rope(model)
    window = attention_layers.window_size(model) if any(windowed) else None
    is_same_base = model.rotary_base_local == model.rotary_base
    return replace(
        model,
        ffn_hidden_size=dimensions.ffn_hidden_size(model),
        kv_channels=channels,
        group_query_attention=groups != model.num_attention_heads,
        num_query_groups=groups,
        softmax_scale=channels**-0.5 if model.softmax_scale is None else model.softmax_scale,
        window_size=None if window is None else f"{window[0]},{window[1]}",
        window_attn_skip_freq=None if all(windowed) or window is None else str([int(each) for each in windowed]),
        no_rope_freq=str([int(each) for each in without_rope]) if any(without_rope) else None,
        rotary_base_local=None if window is None or is_same_base else model.rotary_base_local,
        openai_gelu=model.openai_gelu and not model.add_bias_linear,  # GELU fused with a bias is this approximation
        **explicit_latent_attention(model),
        **explicit_mixture(model),
    )


def explicit_latent_attention(model: ModelConfig) -> dict[str, Any]:
    """Return the settings of multi-latent attention with explicit values."""
    if not latent_attention.is_latent(model):
        return {}
    if not latent_attention.uses_yarn(model):
        return {"rope_type": "rope"}
    original = model.yarn_original_max_position_embeddings or latent_attention.DEFAULT_ORIGINAL_POSITIONS
    return {"rope_type": "yarn", "yarn_original_max_position_embeddings": original}


def explicit_mixture(model: ModelConfig) -> dict[str, Any]:
    """Return the settings of experts with explicit values. Losses that balance the load change no function."""
    if not mixture.is_mixture(model):
        return {"num_experts": None}
    has_sinkhorn = "sinkhorn" in model.moe_router_load_balancing_type
    selects_groups = model.moe_router_group_topk != model.moe_router_num_groups
    factor = model.moe_router_topk_scaling_factor
    return {
        "moe_ffn_hidden_size": mixture.moe_ffn_hidden_size(model),
        "moe_layer_freq": str([int(each) for each in mixture.expert_layers(model)]),
        "moe_router_load_balancing_type": ("sinkhorn",) if has_sinkhorn else ("none",),
        "moe_router_num_groups": model.moe_router_num_groups if selects_groups else None,
        "moe_router_group_topk": model.moe_router_group_topk if selects_groups else None,
        "moe_router_topk_scaling_factor": None if factor == 1 else factor,
    }


def comparable(model: ModelConfig) -> ModelConfig:
    """Return the settings with explicit values, but without those that have no effect.

    These are a scale of Q*K that follows from the width of a head, and the width of dense layers where none is dense.
    """
    explicit = with_explicit_values(model)
    scale = explicit.softmax_scale  # that of muP may be another by its rounding
    if scale is not None and math.isclose(scale, dimensions.kv_channels(model) ** -0.5, rel_tol=1e-12):
        explicit = replace(explicit, softmax_scale=None)
    if all(mixture.expert_layers(model)):
        explicit = replace(explicit, ffn_hidden_size=None)
    return explicit


def as_text(setting: Setting, value: Any) -> str:
    """Return a setting and its value as messages show it: `--window-size 8`, `no --qk-layernorm`."""
    if value is None or (value is False and not setting.off):
        return f"no {setting.flags[0]}"
    if value is True and not setting.flags:
        return f"no {setting.off[0]}"
    if isinstance(value, tuple):
        return f"{setting.flags[0]} {' '.join(map(str, value))}"
    return setting.as_flag(f"{value:g}" if isinstance(value, float) else value)
