"""Model presets, parameter counts, FLOPs per token, and the dimensions of GEMMs.

A preset sets fields of the model section only, never batch, layout or precision. `llama-1b` has 1.439e9 parameters:
1.233e9 in 24 layers of width 2048, and the rest in untied embedding and output matrices of 50,304 tokens, which are
GPT-2's 50,257 padded to a multiple of 128.

Each dimension of a linear (`out_features`, `in_features` and rows) is the contiguous one of an operand in one of fprop,
dgrad and wgrad. cuBLAS reads FP8 operands in units of 16 bytes along it, MXFP8 has blocks of 32 and NVFP4 of 16, so all
three dimensions must be multiples of `derived.gemm_alignment`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from megafp8.config import attention_layers, dimensions, latent_attention, mixture, multi_token
from megafp8.config.activations import is_gated
from megafp8.config.schema import ModelConfig, RunConfig

# ---- Fields of the presets with multi-latent attention, besides those of every Llama --------------------------------

_BOTH: Mapping[str, Any] = MappingProxyType({
    "multi_latent_attention": True, "qk_layernorm": True, "kv_lora_rank": 512, "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64, "v_head_dim": 128, "rotary_scaling_factor": 40.0, "max_position_embeddings": 163_840,
    "norm_epsilon": 1e-6, "moe_router_load_balancing_type": ("seq_aux_loss",),
})  # fmt: skip
DEEPSEEK_V3: Mapping[str, Any] = MappingProxyType({
    **_BOTH,
    "q_lora_rank": 1536, "mscale": 1.0, "mscale_all_dim": 1.0, "vocab_size": 129_280, "num_experts": 256,
    "moe_layer_freq": "([0]*3+[1]*58)", "moe_ffn_hidden_size": 2048, "moe_shared_expert_intermediate_size": 2048,
    "moe_router_topk": 8, "moe_router_num_groups": 8, "moe_router_group_topk": 4,
    "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
    "moe_router_topk_scaling_factor": 2.5, "moe_aux_loss_coeff": (1e-4,),
})  # fmt: skip
"""DeepSeek-V3 (DeepSeek-AI 2024) without its multi-token prediction."""
DEEPSEEK_V2_LITE: Mapping[str, Any] = MappingProxyType({
    **_BOTH,
    "mscale": 0.707, "mscale_all_dim": 0.707, "vocab_size": 102_400, "num_experts": 64,
    "moe_layer_freq": "([0]*1+[1]*26)", "moe_ffn_hidden_size": 1408, "moe_shared_expert_intermediate_size": 2816,
    "moe_router_topk": 6, "moe_router_pre_softmax": True, "moe_aux_loss_coeff": (1e-3,),
})  # fmt: skip
"""DeepSeek-V2-Lite (DeepSeek-AI 2024); its queries are not compressed."""


# ----------------------------------------------------------------------------------------------------------------------


def _gpt2(num_layers: int, hidden_size: int, num_attention_heads: int, **others: Any) -> Mapping[str, Any]:
    """GPT-2 (Radford et al. 2019): learned positions, LayerNorm, GELU, biases, tied embeddings, dropout."""
    fields = {
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "num_attention_heads": num_attention_heads,
        "ffn_hidden_size": 4 * hidden_size,
        "max_position_embeddings": 1024,
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "norm_epsilon": 1e-5,
        "swiglu": False,
        "add_bias_linear": True,
        "share_embeddings_and_output_weights": True,
        "attention_dropout": 0.1,
        "hidden_dropout": 0.1,
    }
    return _model_settings(fields | others)


def _llama(
    num_layers: int, hidden_size: int, num_attention_heads: int, ffn_hidden_size: int, **others: Any
) -> Mapping[str, Any]:
    """Llama (Touvron et al. 2023): rotary positions, RMSNorm, SwiGLU, no biases, untied embeddings, no dropout."""
    fields = {
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "num_attention_heads": num_attention_heads,
        "ffn_hidden_size": ffn_hidden_size,
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "norm_epsilon": 1e-5,
        "swiglu": True,
        "add_bias_linear": False,
        "share_embeddings_and_output_weights": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }
    return _model_settings(fields | others)


def _model_settings(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    return MappingProxyType({f"model.{name}": value for name, value in fields.items()})


_GROUPED = {"group_query_attention": True, "num_query_groups": 8}
_MIXTRAL = _GROUPED | {
    "rotary_base": 1_000_000, "vocab_size": 32_000, "max_position_embeddings": 32_768, "num_experts": 8,
    "moe_ffn_hidden_size": 14_336, "moe_router_topk": 2, "moe_aux_loss_coeff": (1e-2,),
}  # fmt: skip
_QWEN3_MOE = {
    "group_query_attention": True, "num_query_groups": 4, "kv_channels": 128, "qk_layernorm": True,
    "norm_epsilon": 1e-6, "rotary_base": 1_000_000, "vocab_size": 151_936, "max_position_embeddings": 40_960,
    "num_experts": 128, "moe_ffn_hidden_size": 768, "moe_router_topk": 8, "moe_aux_loss_coeff": (1e-3,),
}  # fmt: skip
_OLMOE = {
    "vocab_size": 50_304, "max_position_embeddings": 4096, "qk_layernorm": True, "qk_layernorm_across_heads": True,
    "num_experts": 64, "moe_ffn_hidden_size": 1024, "moe_router_topk": 8, "moe_router_pre_softmax": True,
    "moe_aux_loss_coeff": (1e-2,), "moe_z_loss_coeff": 1e-3,
}  # fmt: skip
_TINY_EXPERTS = {
    "group_query_attention": True, "num_query_groups": 2, "max_position_embeddings": 512, "num_experts": 4,
    "moe_ffn_hidden_size": 128, "moe_router_topk": 2, "moe_aux_loss_coeff": (1e-2,),
}  # fmt: skip
_LLAMA3 = _GROUPED | {"rotary_base": 500_000, "vocab_size": 128_256, "max_position_embeddings": 8192}
_LLAMA32 = _LLAMA3 | {
    "max_position_embeddings": 131_072, "share_embeddings_and_output_weights": True, "use_rope_scaling": True,
    "rope_scaling_factor": 32.0,
}  # fmt: skip
_QWEN3 = _GROUPED | {
    "qk_layernorm": True, "rotary_base": 1_000_000, "norm_epsilon": 1e-6, "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
}  # fmt: skip
PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "tiny": _llama(2, 128, 4, 384, group_query_attention=True, num_query_groups=2, max_position_embeddings=512),
        "tiny-gpt2": _gpt2(2, 128, 4, max_position_embeddings=512),
        "gpt2-124m": _gpt2(12, 768, 12, vocab_size=50_257),
        "gpt2-350m": _gpt2(24, 1024, 16, vocab_size=50_257),
        "llama-1b": _llama(24, 2048, 16, 5632, max_position_embeddings=2048, vocab_size=50_304),
        "llama3.2-1b": _llama(16, 2048, 32, 8192, **_LLAMA32),
        "llama3.2-3b": _llama(28, 3072, 24, 8192, **_LLAMA32),
        "llama3-8b": _llama(32, 4096, 32, 14_336, **_LLAMA3),
        "tiny-moe": _llama(2, 128, 4, 384, **_TINY_EXPERTS),
        "mixtral-8x7b": _llama(32, 4096, 32, 14_336, **_MIXTRAL),
        "qwen3-30b-a3b": _llama(48, 2048, 32, 6144, **_QWEN3_MOE),
        "olmoe-1b-7b": _llama(16, 2048, 16, 1024, **_OLMOE),
        "deepseek-v2-lite": _llama(27, 2048, 16, 10_944, **DEEPSEEK_V2_LITE),
        "deepseek-v3": _llama(61, 7168, 128, 18_432, **DEEPSEEK_V3),
        "llama3-70b": _llama(80, 8192, 64, 28_672, **_LLAMA3),
        "llama3-405b": _llama(126, 16_384, 128, 53_248, **_LLAMA3),
        "qwen3-0.6b": _llama(28, 1024, 16, 3072, **_QWEN3, kv_channels=128, share_embeddings_and_output_weights=True),
        "qwen3-8b": _llama(36, 4096, 32, 12_288, **_QWEN3),
    }
)
"""Preset name -> settings (`section.field` -> value). The tiny presets take the vocabulary size of the tokenizer."""
FORWARD_AND_BACKWARD = 3  # the backward pass has two GEMMs, dgrad and wgrad, for each of the forward pass


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of a model, by part.

    Attributes:
        norms_per_layer: and the offsets of --softmax-type learnable.
        output_layer: 0 if it shares the word embeddings.
        num_expert_layers: layers with experts in place of an MLP.
        experts_per_layer: parameters of the routed experts of such a layer.
        active_experts_per_layer: those that a token passes.
        shared_per_layer: parameters of the router and of the shared experts of such a layer.
        mlp_per_layer: parameters of the MLP of a dense layer, with biases.
        num_depths: modules of multi-token prediction, each of which has a layer of the kind of the last one.
        num_expert_depths: those whose layers have experts.
        projection_per_depth, norms_per_depth: what a module has besides its layer.
    """

    num_layers: int
    word_embeddings: int
    position_embeddings: int
    attention_weights_per_layer: int
    mlp_weights_per_layer: int
    biases_per_layer: int
    norms_per_layer: int
    final_norm: int
    output_layer: int
    num_expert_layers: int = 0
    experts_per_layer: int = 0
    active_experts_per_layer: int = 0
    shared_per_layer: int = 0
    mlp_per_layer: int = 0
    num_depths: int = 0
    num_expert_depths: int = 0
    projection_per_depth: int = 0
    norms_per_depth: int = 0

    @property
    def per_layer(self) -> int:
        return (
            self.attention_weights_per_layer + self.mlp_weights_per_layer + self.biases_per_layer + self.norms_per_layer
        )

    @property
    def embeddings(self) -> int:
        """Word embeddings, position embeddings and an untied output layer."""
        return self.word_embeddings + self.position_embeddings + self.output_layer

    @property
    def total(self) -> int:
        return self._with_experts(self.experts_per_layer)

    @property
    def active(self) -> int:
        """Parameters that a token passes: of the routed experts only its own."""
        return self._with_experts(self.active_experts_per_layer)

    def _with_experts(self, experts_per_layer: int) -> int:
        num_mixtures = self.num_expert_layers + self.num_expert_depths
        mixture = num_mixtures * (experts_per_layer + self.shared_per_layer - self.mlp_per_layer)
        layers = (self.num_layers + self.num_depths) * self.per_layer + mixture
        depths = self.num_depths * (self.projection_per_depth + self.norms_per_depth)
        return layers + depths + self.final_norm + self.embeddings


def count_parameters(model: ModelConfig, padded_vocab: int) -> ParameterCount:
    """Count the parameters of a model.

    Args:
        model: its shape.
        padded_vocab: rows of the embedding.
    """
    assert model.num_layers is not None and model.hidden_size is not None
    hidden, ffn = model.hidden_size, dimensions.ffn_hidden_size(model)
    query, kv = dimensions.query_projection_size(model), dimensions.kv_projection_size(model)
    ffn_in = 2 * ffn if is_gated(model) else ffn
    norm = hidden * (2 if model.normalization == "LayerNorm" else 1)
    qk_widths = query + kv if model.qk_layernorm_across_heads else 2 * dimensions.kv_channels(model)
    attention = hidden * (query + 2 * kv) + query * hidden
    if is_latent := latent_attention.is_latent(model):
        attention, qk_widths = latent_attention.num_weights(model), latent_attention.num_norm_channels(model)
    qk_norms = qk_widths * (norm // hidden) if model.qk_layernorm else 0
    learned = model.position_embedding_type == "learned_absolute"
    word_embeddings = padded_vocab * hidden
    projection, depth_norms = multi_token.own_parameters(model)
    return ParameterCount(
        num_layers=model.num_layers,
        word_embeddings=word_embeddings,
        position_embeddings=(model.max_position_embeddings or 0) * hidden if learned else 0,
        attention_weights_per_layer=attention,
        mlp_weights_per_layer=hidden * ffn_in + ffn * hidden,
        biases_per_layer=_biases_per_layer(model, 0 if is_latent else query + 2 * kv, ffn_in),
        norms_per_layer=(4 if model.norm_placement == "sandwich" else 2) * norm + qk_norms + _softmax_offsets(model),
        final_norm=norm,
        output_layer=0 if model.share_embeddings_and_output_weights else word_embeddings,
        mlp_per_layer=mlp_parameters(model, ffn),
        num_depths=multi_token.num_depths(model),
        num_expert_depths=multi_token.num_depths(model) if multi_token.has_experts(model) else 0,
        projection_per_depth=projection,
        norms_per_depth=depth_norms,
        **_mixture_counts(model),
    )


def mlp_parameters(model: ModelConfig, width: int) -> int:
    """Parameters of an MLP of some hidden size, or of one expert."""
    assert model.hidden_size is not None
    width_in = 2 * width if is_gated(model) else width
    biases = width_in + model.hidden_size if model.add_bias_linear else 0
    return model.hidden_size * width_in + width * model.hidden_size + biases


def _mixture_counts(model: ModelConfig) -> dict[str, int]:
    if not mixture.is_mixture(model):
        return {}
    assert model.num_experts is not None and model.hidden_size is not None
    expert = mlp_parameters(model, mixture.moe_ffn_hidden_size(model))
    shared = model.moe_shared_expert_intermediate_size
    of_all = model.num_experts * model.hidden_size  # router
    if shared is not None:
        of_all += mlp_parameters(model, shared) + (model.hidden_size if model.moe_shared_expert_gate else 0)
    return {
        "num_expert_layers": mixture.num_expert_layers(model),
        "experts_per_layer": model.num_experts * expert,
        "active_experts_per_layer": model.moe_router_topk * expert,
        "shared_per_layer": of_all,
    }


def _softmax_offsets(model: ModelConfig) -> int:
    return (model.num_attention_heads or 0) if model.softmax_type == "learnable" else 0


def _biases_per_layer(model: ModelConfig, qkv_channels: int, ffn_in: int) -> int:
    assert model.hidden_size is not None
    if model.add_bias_linear:
        return qkv_channels + model.hidden_size + ffn_in + model.hidden_size
    return qkv_channels if model.add_qkv_bias else 0


def flops_per_token(model: ModelConfig, padded_vocab: int, seq_length: float) -> float:
    """Model FLOPs per token, forward and backward, without recomputation.

        6 * N  +  6 * L * h * s

    N is the number of parameters that a token passes, including embeddings: 2 FLOPs each in the forward pass and 4 in
    the backward. L is the number of layers, h that of query channels
    (in multi-latent attention the mean of query and value channels), s the sequence length. The second term is Q*K
    and P*V of attention: 2 GEMMs x 2 FLOPs x h x s/2 keys, the mean under the causal mask, times 3 for forward and
    backward. In layers with a sliding window of w tokens, its own included, the mean number of keys is w - w^2 / 2s.
    With multi-token prediction, N and L include its layers, and N the output layer once more for each depth.

    The lookup in an untied embedding counts as a GEMM, to be comparable with the common `6 N`. Megatron-LM does not
    count it: its number is 0.93 of this one for the preset llama-1b.
    """
    assert model.num_layers is not None
    count = count_parameters(model, padded_vocab)
    parameters = count.active + count.num_depths * count.word_embeddings
    keys = attention_layers.mean_keys(model, seq_length)
    is_latent = latent_attention.is_latent(model)
    channels = latent_attention.mean_channels(model) if is_latent else dimensions.query_projection_size(model)
    attention_forward = (model.num_layers + count.num_depths) * 2 * 2 * channels * keys
    return FORWARD_AND_BACKWARD * (2 * parameters + attention_forward)


@dataclass(frozen=True)
class GemmDimensions:
    """Dimensions of one linear on one rank, for one microbatch.

    Attributes:
        rows: tokens of the quantized input, before sequence parallelism gathers them.
    """

    name: str
    out_features: int
    in_features: int
    rows: int


def rows_per_rank(config: RunConfig) -> int:
    """Tokens of one microbatch that one rank quantizes.

    This is sequence length x micro-batch size, divided by the context-parallel size and, with sequence parallelism, by
    the tensor-parallel size.
    """
    assert config.data.seq_length is not None and config.training.micro_batch_size is not None
    return config.data.seq_length * config.training.micro_batch_size // sequence_shards(config)


def gemm_dimensions(config: RunConfig) -> list[GemmDimensions]:
    """The linears of a dense transformer layer on one tensor-parallel rank, in the order of the forward pass.

    The output layer is left out: it has the input dimension and the rows of linear_fc1, and the vocabulary is padded
    to its alignment.
    """
    model, ranks = config.model, config.parallel.tensor_model_parallel_size
    assert model.hidden_size is not None
    hidden, rows = model.hidden_size, rows_per_rank(config)
    query, kv = dimensions.query_projection_size(model), dimensions.kv_projection_size(model)
    ffn = dimensions.ffn_hidden_size(model)
    gathered = rows * ranks if config.parallel.sequence_parallel else rows
    attention = [
        GemmDimensions("linear_qkv", (query + 2 * kv) // ranks, hidden, rows),
        GemmDimensions("linear_proj", hidden, query // ranks, gathered),
    ]
    if latent_attention.is_latent(model):
        attention = [
            GemmDimensions(
                name,
                outputs // ranks if split == "outputs" else outputs,
                inputs // ranks if split == "inputs" else inputs,
                gathered if split == "inputs" else rows,
            )
            for name, outputs, inputs, split in latent_attention.linear_shapes(model)
        ]
    return [
        *attention,
        GemmDimensions("linear_fc1", (2 if is_gated(model) else 1) * ffn // ranks, hidden, rows),
        GemmDimensions("linear_fc2", hidden, ffn // ranks, gathered),
    ]


def sequence_shards(config: RunConfig) -> int:
    """Parts of a sequence on different ranks, for the linears that read a part."""
    parallel = config.parallel
    shared = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    return parallel.context_parallel_size * shared
