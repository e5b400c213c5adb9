"""Fields of `config.json` of mixtures of experts: number, layers and widths of experts, and scores of the router.

Settings of the router's losses, noise and capacities are those of a run: transformers computes without them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megafp8.checkpoint.convert.hf_config import HFConfig
from megafp8.checkpoint.convert.layer_fields import read_num_layers
from megafp8.config import expert_layers
from megafp8.config.schema import RunConfig


@dataclass(frozen=True)
class ExpertCount:
    """Number of experts.

    Attributes:
        field: that is written, as in the files of the hub.
        other: name of the same field in some files of transformers 5.
        default: where config.json has neither.
    """

    field: str
    other: str
    default: int

    def read(self, hf_config: HFConfig) -> dict[str, Any]:
        field = self.other if self.field not in hf_config.fields else self.field
        return {"model.num_experts": hf_config.positive_int(field, self.default)}

    def write(self, config: RunConfig) -> dict[str, Any]:
        return {self.field: config.model.num_experts}


@dataclass(frozen=True)
class ExpertWidth:
    """Hidden size of an expert in the field of an MLP's, in families without dense layers."""

    def read(self, hf_config: HFConfig) -> dict[str, Any]:
        width = hf_config.positive_int("intermediate_size")
        return {"model.ffn_hidden_size": width, "model.moe_ffn_hidden_size": width}

    def write(self, config: RunConfig) -> dict[str, Any]:
        return {"intermediate_size": config.model.moe_ffn_hidden_size}


@dataclass(frozen=True)
class NormalizedScores:
    """Whether the scores of a token's experts have the sum 1.

    transformers divides scores over all experts by the sum of the chosen ones. This is the softmax of the chosen
    experts' logits, megatron-core's default. Without the division it is that of --moe-router-pre-softmax.
    """

    def read(self, hf_config: HFConfig) -> dict[str, Any]:
        return {"model.moe_router_pre_softmax": not hf_config.flag("norm_topk_prob", False)}

    def write(self, config: RunConfig) -> dict[str, Any]:
        return {"norm_topk_prob": not config.model.moe_router_pre_softmax}


@dataclass(frozen=True)
class ExpertLayers:
    """Layers with experts: every N-th one except for a list of dense ones.

    The last of each N layers has experts. With `--moe-layer-freq N` it is the first, so a list is used here.
    """

    def read(self, hf_config: HFConfig) -> dict[str, Any]:
        num_layers, step = read_num_layers(hf_config), hf_config.positive_int("decoder_sparse_step", 1)
        dense = hf_config.fields.get("mlp_only_layers") or []
        if not isinstance(dense, list) or not all(type(each) is int for each in dense):
            hf_config.problems.append(f"config.json: mlp_only_layers is {dense!r} and no list of layers")
            dense = []
        is_dense = set(dense)
        chosen = [int((layer + 1) % step == 0 and layer not in is_dense) for layer in range(num_layers)]
        if not any(chosen):
            hf_config.problems.append(
                f"config.json: decoder_sparse_step {step} and mlp_only_layers {dense!r} leave no layer with experts"
            )
        return {"model.moe_layer_freq": "1" if all(chosen) else str(chosen)}

    def write(self, config: RunConfig) -> dict[str, Any]:
        has_experts = expert_layers.expert_layers(config.model)
        dense = [layer for layer, each in enumerate(has_experts) if not each]
        return {"decoder_sparse_step": 1, "mlp_only_layers": dense}
