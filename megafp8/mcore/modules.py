"""Modules of megatron-core's layers: the linears by name, and the spec of an MLP."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Optional

from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from megafp8.config import precision_map
from megafp8.config.precision_map import ATTENTION_LINEARS, EXPERTS, OUTPUT_LAYER, SHARED_EXPERTS
from megafp8.config.schema import ModelConfig
from megafp8.mcore.patches import is_installed

ATTENTION = "attention"
"""The name of attention in counts of operands, after that of its layer."""


def named_linears(chunk: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The linears of a chunk's layers, numbered from 0 over all stages, and the output layer if it quantizes."""
    for layer in (module for module in chunk.modules() if isinstance(module, TransformerLayer)):
        prefix = f"layers.{layer.layer_number - 1}."
        attention = layer.self_attention
        for name in ATTENTION_LINEARS:
            if hasattr(attention, name):
                yield prefix + name, getattr(attention, name)
        for kind, mlp in named_mlps(layer.mlp):
            yield prefix + kind + "linear_fc1", mlp.linear_fc1
            yield prefix + kind + "linear_fc2", mlp.linear_fc2
    yield from ((OUTPUT_LAYER, module) for module in chunk.modules() if getattr(module, "is_output", False))


def fused_mlps(chunk: nn.Module) -> dict[nn.Module, Any]:
    """Transformer Engine's fused MLPs by their linears. Unless the MLP is split, operations compute in their place."""
    mlps = [module for module in chunk.modules() if hasattr(module, "_make_fused_impl")]
    return {linear: mlp for mlp in mlps for linear in (mlp.linear_fc1, mlp.linear_fc2)}


def named_attentions(chunk: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The attention between the linears of each layer of a chunk, numbered as the linears are."""
    for layer in (module for module in chunk.modules() if isinstance(module, TransformerLayer)):
        if hasattr(layer.self_attention, "core_attention"):
            yield f"layers.{layer.layer_number - 1}.{ATTENTION}", layer.self_attention.core_attention


def with_attention(model: ModelConfig, linears: Sequence[str]) -> tuple[str, ...]:
    """Add the attention of every layer to names of linears, where the forward pass has it: before `linear_proj`."""
    names: list[str] = []
    chosen = set(linears)
    for name in precision_map.expert_names(model, precision_map.linear_names(model)):
        layer, _, linear = name.rpartition(".")
        if linear == "linear_proj":  # in high precision, too
            names.append(f"{layer}.{ATTENTION}")
        if name in chosen:
            names.append(name)
    return tuple(names)


def named_mlps(mlp: Any) -> Iterator[tuple[str, Any]]:
    """The MLPs of a layer with what precedes the names of their linears: one, or those of experts on this rank.

    A grouped MLP has one pair of linears for all experts of the rank.
    """
    if not isinstance(mlp, MoELayer):
        yield "", mlp
        return
    if isinstance(mlp.experts, SequentialMLP):
        for number, expert in zip(mlp.local_expert_indices, mlp.experts.local_experts, strict=True):
            yield f"{EXPERTS}{number}.", expert
    else:
        yield EXPERTS, mlp.experts
    if mlp.shared_experts is not None:
        yield SHARED_EXPERTS, mlp.shared_experts


EXPERT_RANKS_EVIDENCE = (("tensor_parallel/layers.py", '"allreduce", not (self.is_expert and self.expert_parallel))'),)
"""In 0.16 only expert parallelism, and not another tensor-parallel size, has gradients of experts reduced apart."""


def mark_expert_weights(chunk: GPTModel) -> None:
    """Have the gradients of experts reduced over the ranks that hold the same experts.

    megatron-core 0.16 marks the weights only with expert-parallel ranks. With another tensor-parallel size than that of
    the other layers, copies of an expert on tensor-parallel ranks would otherwise train on different tokens.
    """
    core = chunk.config
    has_own_tensor_ranks = core.expert_tensor_parallel_size != core.tensor_model_parallel_size
    if not (core.expert_model_parallel_size > 1 or has_own_tensor_ranks) or not is_installed("<0.19"):
        return
    for layer in (module for module in chunk.modules() if isinstance(module, MoELayer)):
        for weight in layer.experts.parameters():
            weight.allreduce = False


QUERY_KEY_NORMS_EVIDENCE = (("transformer/attention.py", '"qk_layernorm/qk_l2_norm are disabled"'),)
"""The code of megatron-core 0.19 that makes `NormedSelfAttention` necessary. A test fails when the text is gone."""


class NormedSelfAttention(SelfAttention):
    """megatron-core's attention with norms of queries and keys that tensor-parallel ranks share.

    megatron-core sums the gradients of such norms over the tensor-parallel ranks if `qk_layernorm` is set, and since
    0.19 it refuses norms if it is not. So they are built here.
    """

    def __init__(self, config: Any, submodules: SelfAttentionSubmodules, *args: Any, **options: Any):
        without = dataclasses.replace(submodules, q_layernorm=None, k_layernorm=None)
        super().__init__(config, without, *args, **options)
        for name in ("q_layernorm", "k_layernorm"):
            norm = build_module(
                getattr(submodules, name), hidden_size=self.hidden_size_per_attention_head, config=config,
                eps=config.layernorm_epsilon,
            )  # fmt: skip
            setattr(self, name, norm)


def mlp_spec(module: type[MLP], submodules: MLPSubmodules, **params: Any) -> ModuleSpec | Callable[..., MLP]:
    """The entry `mlp` of a layer's spec: a class of MLP with its linears and further arguments of its constructor.

    Since megatron-core 0.19 a layer calls the entry with all its process groups.
    """
    if is_installed("<0.19"):
        return ModuleSpec(module=module, params=params, submodules=submodules)

    def build_mlp(*, config: Any, pg_collection: Any, is_mtp_layer: bool, name: Optional[str]) -> MLP:
        return module(config=config, submodules=submodules, tp_group=pg_collection.tp, name=name, **params)

    return build_mlp


def mlp_submodules(spec: Any) -> Any:
    """The MLPSubmodules or MoESubmodules of an entry `mlp` that megatron-core made."""
    return spec.submodules if isinstance(spec, ModuleSpec) else spec.keywords["submodules"]
