"""How a layer adds the outputs of attention and MLP to the residual stream, where it is not megatron-core's way.

megatron-core's layer calls an entry of its spec for each addition. `ResidualAdd` takes that place, with a norm of the
output and a multiplier. The addition computes the same with every implementation of the linears.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megafp8.config.schema import ModelConfig

# Keys in checkpoints of the norms after attention and MLP.
POST_NORM_KEYS = {
    "self_attn_bda.norm.": "self_attention.post_layernorm.",
    "mlp_bda.norm.": "mlp.post_layernorm.",
}

Add = Callable[[tuple[Tensor, Optional[Tensor]], Tensor, float], Tensor]


class ResidualAdd(torch.nn.Module):
    """residual + dropout(multiplier * norm(output + bias)).

    Args:
        norm: class of the norm; None without one.
        multiplier: of the normalized output.
    """

    def __init__(self, config: TransformerConfig, norm: Optional[type], multiplier: float):
        super().__init__()
        self.multiplier = multiplier
        self.norm = None
        if norm is not None:
            self.norm = norm(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)

    def forward(self, training: bool, is_fused: bool) -> Add:
        """The addition, as megatron-core's layer asks for it. There is no fused kernel of this addition."""

        def add(output_with_bias: tuple[Tensor, Optional[Tensor]], residual: Tensor, dropout: float) -> Tensor:
            output, bias = output_with_bias
            if bias is not None:
                output = output + bias
            if self.norm is not None:
                output = self.norm(output)
            if self.multiplier != 1:
                output = output * self.multiplier
            return residual + F.dropout(output, dropout, training)

        return add


def residual_add(model: ModelConfig, config: TransformerConfig, norm: type) -> Any:
    """The entry of a layer's spec for both additions: megatron-core's, where that is the same."""
    has_norm = model.norm_placement != "pre"
    if not has_norm and model.residual_multiplier == 1:
        return get_bias_dropout_add
    return ModuleSpec(
        ResidualAdd, {"config": config, "norm": norm if has_norm else None, "multiplier": model.residual_multiplier}
    )


class ParallelResidualLayer(TransformerLayer):
    """A layer that adds attention and MLP of the same input: x + attention(norm(x)) + MLP(other norm(x))."""

    def forward(self, hidden_states: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Optional[Tensor]]:
        """megatron-core's forward pass, with the input of the layer as that of the MLP."""
        options.pop("dynamic_inference_decode_only", None)
        with_attention, context = self._forward_attention(hidden_states, *args, **options)
        output = self.mlp(self._forward_pre_mlp_layernorm(hidden_states))
        with self.bias_dropout_add_exec_handler():
            add = self.mlp_bda(self.training, self.config.bias_dropout_fusion)
            return add(output, with_attention, self.hidden_dropout), context
