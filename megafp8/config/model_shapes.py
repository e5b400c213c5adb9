"""Model presets, parameter counts, FLOPs per token, and the dimensions of GEMMs.

A preset sets fields of the model section only, never batch, layout or precision. `llama-1b` has 1.439e9 parameters:
1.233e9 in 24 layers of width 2048, and the rest in untied embedding and output matrices of 50,304 tokens, which are
GPT-2's 50,257 padded to a multiple of 128.

Each dimension of a linear (`out_features`, `in_features` and rows) is the contiguous one of an operand in one of fprop,
dgrad and wgrad. cuBLAS reads FP8 operands in units of 16 bytes along it, MXFP8 has blocks of 32 and NVFP4 of 16, so all
three dimensions must be multiples of `derived.gemm_alignment`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from megafp8.config import derived, precision_map
from megafp8.config.precision_map import LINEARS, OUTPUT_LAYER
from megafp8.config.schema import ModelConfig, RunConfig
from megafp8.recipes import registry


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
_LLAMA3 = _GROUPED | {"rotary_base": 500_000, "vocab_size": 128_256, "max_position_embeddings": 8192}
PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "tiny": _llama(2, 128, 4, 384, group_query_attention=True, num_query_groups=2, max_position_embeddings=512),
        "tiny-gpt2": _gpt2(2, 128, 4, max_position_embeddings=512),
        "gpt2-124m": _gpt2(12, 768, 12, vocab_size=50_257),
        "gpt2-350m": _gpt2(24, 1024, 16, vocab_size=50_257),
        "llama-1b": _llama(24, 2048, 16, 5632, max_position_embeddings=2048, vocab_size=50_304),
        "llama3-8b": _llama(32, 4096, 32, 14_336, **_LLAMA3),
        "llama3-70b": _llama(80, 8192, 64, 28_672, **_LLAMA3),
    }
)
"""Preset name -> settings (`section.field` -> value). The tiny presets take the vocabulary size of the tokenizer."""
FORWARD_AND_BACKWARD = 3  # the backward pass has two GEMMs, dgrad and wgrad, for each of the forward pass


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of a model, by part.

    Attributes:
        output_layer: 0 if it shares the word embeddings.
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
    def quantizable(self) -> int:
        """Weights of the linears of all layers, which a recipe quantizes."""
        return self.num_layers * (self.attention_weights_per_layer + self.mlp_weights_per_layer)

    @property
    def total(self) -> int:
        return self.num_layers * self.per_layer + self.final_norm + self.embeddings


def count_parameters(model: ModelConfig, padded_vocab: int) -> ParameterCount:
    """Count the parameters of a model.

    Args:
        model: its shape.
        padded_vocab: rows of the embedding.
    """
    assert model.num_layers is not None and model.hidden_size is not None
    hidden, ffn = model.hidden_size, derived.ffn_hidden_size(model)
    query, kv = derived.query_projection_size(model), derived.kv_projection_size(model)
    ffn_in = 2 * ffn if model.swiglu else ffn
    norm = hidden * (2 if model.normalization == "LayerNorm" else 1)
    qk_norms = 2 * derived.kv_channels(model) * (norm // hidden) if model.qk_layernorm else 0
    learned = model.position_embedding_type == "learned_absolute"
    word_embeddings = padded_vocab * hidden
    return ParameterCount(
        num_layers=model.num_layers,
        word_embeddings=word_embeddings,
        position_embeddings=(model.max_position_embeddings or 0) * hidden if learned else 0,
        attention_weights_per_layer=hidden * (query + 2 * kv) + query * hidden,
        mlp_weights_per_layer=hidden * ffn_in + ffn * hidden,
        biases_per_layer=_biases_per_layer(model, query + 2 * kv, ffn_in),
        norms_per_layer=2 * norm + qk_norms,
        final_norm=norm,
        output_layer=0 if model.share_embeddings_and_output_weights else word_embeddings,
    )


def _biases_per_layer(model: ModelConfig, qkv_channels: int, ffn_in: int) -> int:
    assert model.hidden_size is not None
    if model.add_bias_linear:
        return qkv_channels + model.hidden_size + ffn_in + model.hidden_size
    return qkv_channels if model.add_qkv_bias else 0


def flops_per_token(model: ModelConfig, padded_vocab: int, seq_length: int) -> float:
    """Model FLOPs per token, forward and backward, without recomputation.

        6 * N  +  6 * L * h * s

    N is the number of parameters, including embeddings: 2 FLOPs each in the forward pass and 4 in the backward. L is
    the number of layers, h that of query channels, s the sequence length. The second term is Q*K and P*V of attention:
    2 GEMMs x 2 FLOPs x h x s/2 keys, the mean under the causal mask, times 3 for forward and backward. With a sliding
    window of w tokens the mean number of keys is w - w^2 / 2s.

    The lookup in an untied embedding counts as a GEMM, to be comparable with the common `6 N`. Megatron-LM does not
    count it: its number is 0.93 of this one for the preset llama-1b.
    """
    assert model.num_layers is not None
    parameters = count_parameters(model, padded_vocab).total
    window = min(model.window_size or seq_length, seq_length)
    mean_keys = window - window * window / (2 * seq_length)
    attention_forward = model.num_layers * 2 * 2 * derived.query_projection_size(model) * mean_keys
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
    return config.data.seq_length * config.training.micro_batch_size // _sequence_shards(config)


def gemm_dimensions(config: RunConfig) -> list[GemmDimensions]:
    """The four linears of a transformer layer on one tensor-parallel rank, in the order of the forward pass.

    The output layer is left out: it has the input dimension and the rows of linear_qkv, and the vocabulary is padded
    to its alignment.
    """
    model, ranks = config.model, config.parallel.tensor_model_parallel_size
    assert model.hidden_size is not None
    hidden, rows = model.hidden_size, rows_per_rank(config)
    query, kv = derived.query_projection_size(model), derived.kv_projection_size(model)
    ffn = derived.ffn_hidden_size(model)
    gathered = rows * ranks if config.parallel.sequence_parallel else rows
    return [
        GemmDimensions("linear_qkv", (query + 2 * kv) // ranks, hidden, rows),
        GemmDimensions("linear_proj", hidden, query // ranks, gathered),
        GemmDimensions("linear_fc1", (2 if model.swiglu else 1) * ffn // ranks, hidden, rows),
        GemmDimensions("linear_fc2", hidden, ffn // ranks, gathered),
    ]


def gemm_alignment_problems(config: RunConfig) -> Iterator[str]:
    """Problems with GEMM dimensions that are no multiples of the recipe's alignment, with the padded value.

    The shape must be complete and divisible by the parallel sizes.
    """
    align, rule = _required_alignment(config, (*LINEARS, OUTPUT_LAYER))
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    assert model.hidden_size is not None and model.num_attention_heads is not None
    qkv, proj, _, fc2 = gemm_dimensions(config)
    if model.hidden_size % align:
        padded = derived.round_up(model.hidden_size, math.lcm(align, model.num_attention_heads))
        yield f"hidden size {model.hidden_size} is a dimension of every linear: {rule}; use --hidden-size {padded}"
    align, rule = _required_alignment(config, LINEARS[:2])
    if qkv.out_features % align or proj.in_features % align:
        yield (
            f"linear_qkv has {qkv.out_features} output and linear_proj {proj.in_features} input channels per rank "
            f"(heads of {derived.kv_channels(model)}, tensor-parallel size {tp}): {rule}; use --kv-channels "
            f"{derived.round_up(derived.kv_channels(model), align)}"
        )
    align, rule = _required_alignment(config, LINEARS[2:])
    if fc2.in_features % align:
        ffn = derived.ffn_hidden_size(model)
        yield (
            f"linear_fc2 has {ffn} / {tp} = {fc2.in_features} input channels per rank: {rule}; use --ffn-hidden-size "
            f"{derived.round_up(ffn, align * tp)}"
        )
    align, rule = _required_alignment(config, (*LINEARS, OUTPUT_LAYER))
    if qkv.rows % align:
        yield _rows_problem(config, align, rule)


def _required_alignment(config: RunConfig, linears: tuple[str, ...]) -> tuple[int, str]:
    """The alignment of these linears in all layers, and a text that names the recipe that needs it."""
    recipes = precision_map.recipes_of(config.model, config.precision, linears)
    if not recipes:
        return 1, ""
    strictest = max(recipes, key=lambda recipe: registry.get(recipe).gemm_alignment)
    align = registry.get(strictest).gemm_alignment
    return align, f"{precision_map.recipe_source(config.precision, strictest)} needs multiples of {align}"


def _rows_problem(config: RunConfig, align: int, rule: str) -> str:
    micro, seq = config.training.micro_batch_size, config.data.seq_length
    assert micro is not None and seq is not None
    shards = _sequence_shards(config)
    unit = align * shards
    padded_seq = derived.round_up(seq, unit // math.gcd(unit, micro))
    padded_micro = derived.round_up(micro, unit // math.gcd(unit, seq))
    return (
        f"a microbatch has {micro} x {seq} / {shards} = {rows_per_rank(config)} rows per rank: {rule}; use "
        f"--seq-length {padded_seq} or --micro-batch-size {padded_micro}"
    )


def _sequence_shards(config: RunConfig) -> int:
    parallel = config.parallel
    shared = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    return parallel.context_parallel_size * shared
