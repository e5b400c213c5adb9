"""What one layer saves for the backward pass."""

from __future__ import annotations

from dataclasses import dataclass

from megafp8.config import activations, dimensions, latent_attention
from megafp8.config.saved_activations import ACTIVATION, PACKED_BYTES
from megafp8.config.schema import PrecisionConfig, RunConfig


@dataclass(frozen=True)
class LayerActivations:
    """Bytes that one layer saves for the backward pass of one microbatch, by what recomputation can drop.

    Attributes:
        residual_stream: inputs of the two norms, and dropout masks. No selective recompute drops them.
        norm_outputs: inputs of linear_qkv and linear_fc1.
        attention: queries, keys, values, and the attention output where a linear or the kernel needs it.
        core_attention: softmax matrices, or flash attention's log-sum-exp.
        mlp: inputs of the activation and of linear_fc2, and permuted inputs of experts.
        layer_input: input of the layer, the only tensor that full recompute saves.
    """

    residual_stream: int
    norm_outputs: int
    attention: int
    core_attention: int
    mlp: int
    layer_input: int

    @property
    def total(self) -> int:
        return self.residual_stream + self.norm_outputs + self.attention + self.core_attention + self.mlp

    def after_selective_recompute(self, modules: tuple[str, ...]) -> int:
        """Bytes left when `modules` are recomputed in the backward pass."""
        recomputed = {
            "core_attn": self.core_attention,
            "layernorm": self.norm_outputs,
            "mlp": self.mlp,
            "moe": self.mlp,
        }
        return self.total - sum(num_bytes for module, num_bytes in recomputed.items() if module in modules)


def latent_attention_bytes(config: RunConfig, tokens: int, act_bytes: int, input_bytes: float) -> int:
    """Bytes of multi-latent attention of one layer: compressed tensors, queries, keys, values, and the output.

    Args:
        tokens: of a microbatch on a context-parallel rank.
        act_bytes, input_bytes: of one element of an activation, and of a linear's input.
    """
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    assert model.num_attention_heads is not None
    heads, channels = model.num_attention_heads // tp, latent_attention.query_key_channels(model)
    compressed = tokens // tp * latent_attention.num_norm_channels(model)
    expanded = tokens * heads * (2 * channels + model.v_head_dim)
    norm_inputs = act_bytes * compressed if model.qk_layernorm else 0
    output = tokens * heads * model.v_head_dim
    return int(act_bytes * expanded + norm_inputs + input_bytes * (compressed + output))


def saved_itemsize(precision: PrecisionConfig, part: str, act_bytes: int) -> float:
    """Bytes of a saved element of a part of --fp8-saved-activations.

    Args:
        act_bytes: of one element of an activation.
    """
    return PACKED_BYTES if part in precision.fp8_saved_activations else act_bytes


def backward_bytes(config: RunConfig, tokens: int, act_bytes: int) -> int:
    """Bytes that exist at once in an MLP's backward pass: gradients of its linears' inputs and outputs, and an input of
    the activation function that was unpacked.

    Args:
        tokens, act_bytes: as for `latent_attention_bytes`.
    """
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    assert model.hidden_size is not None
    num_fc1_outputs = 2 if activations.is_gated(model) else 1
    is_unpacked = ACTIVATION in config.precision.fp8_saved_activations
    num_ffn = num_fc1_outputs + 1 + num_fc1_outputs * is_unpacked
    return act_bytes * tokens * (2 * model.hidden_size + num_ffn * dimensions.ffn_hidden_size(model) // tp)
