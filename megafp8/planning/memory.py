"""How much device memory a rank needs, part by part, from the configuration alone.

    weights       P x (2 bytes in BF16 and FP16, 4 in FP32)
    FP8 copies    Q x (2 bytes with Transformer Engine: codes and their transpose; 1 emulated, MXFP8 2); FP4: half.
                  With --fp8-param-gather they are the weights, and nothing else is
    gradients     P x (4 bytes, 2 with a low-precision reduction)
    optimizer     P x (4 master + 4 + 4 moments), divided by the data- and context-parallel ranks if it is sharded
    activations   microbatches in flight x layers x bytes per layer
    logits        tokens x vocabulary / tensor ranks x (format + 4 + format), on the last stage
    buffers       gradients of the layer that runs backward, where the logits are not there at that time

P: parameters on this rank. Q: of those, the weights of the linears in quantized layers, and the output layer's where a
precision map quantizes it (whose copies --fp8-param-gather leaves beside it). Gradients of a tied embedding are reduced
between the first and the last stage, so both hold a copy.

Activations follow Korthikanti et al. 2022 ("Reducing Activation Recomputation in Large Transformer Models"), counted
tensor by tensor so that grouped queries, gated MLPs and FP8 are covered; for its GPT with dropout the sum is the
paper's s b h (34 + 5 a s / h) bytes per layer (equation 1), with tensor parallelism equation 2, with sequence
parallelism equation 4. Flash attention saves its output instead of the a s^2 matrices.

Beside the logits the last stage has a second tensor of their size and an FP32 matrix of the vocabulary's size. Both
were found in peaks measured on an H200, not in source: without them the estimate was low by 1.91 and 3.46 GiB
(llama-1b, 8 and 16 x 2048 tokens) and 1.64 GiB (width 4096, 2 x 4096) in BF16, and by the same to within 0.02 in FP8.
benchmarks/RESULTS.md has the error against every peak that was measured.

That is what torch allocates. `outside_bytes` is what else a process takes on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

from megafp8.config import derived, model_shapes
from megafp8.config.schema import PrecisionConfig, RunConfig
from megafp8.planning.planned_run import FORWARD, HIGH, layer_shares, output_recipes
from megafp8.recipes import registry

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
MASK_BYTES = 1
LOG_SUM_EXP_BYTES = 4
"""What flash attention keeps of the softmax: one FP32 number per query and head."""
CONTEXT_BYTES = 600 * 2**20
"""CUDA context, loaded kernels and workspaces of cuBLAS and cuDNN on a datacenter GPU: assumed, not measured."""
COMMUNICATOR_BYTES = 256 * 2**20
"""Buffers of one NCCL communicator: 32 channels x 2 directions x NCCL_BUFFSIZE, 4 MiB by NCCL's documentation."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one rank of one pipeline stage at the peak of a step."""

    stage: int
    parameters: int
    """Parameters that the rank holds."""
    weights_bytes: int
    fp8_copies_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    logits_bytes: int
    buffers_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        """The parts by name, in bytes."""
        return {
            "weights": self.weights_bytes,
            "FP8 copies": self.fp8_copies_bytes,
            "gradients": self.gradients_bytes,
            "optimizer": self.optimizer_bytes,
            "activations": self.activations_bytes,
            "logits": self.logits_bytes,
            "buffers": self.buffers_bytes,
        }


def estimate_memory(
    config: RunConfig, world_size: int, padded_vocab: int, *, stage: int = 0, implementation: str = "transformer_engine"
) -> MemoryEstimate:
    """Estimate one rank of pipeline stage `stage`.

    Args:
        config: a configuration that breaks no rule.
        padded_vocab: rows of the embedding, as `derived.padded_vocab_size` gives them.
        implementation: `transformer_engine`, `emulated` or `local`, already resolved.
    """
    quantizable, other = parameters_on_stage(config, padded_vocab, stage)
    parameters = quantizable + other
    quantized = int(quantizable * quantized_fraction(config, stage))
    weights_bytes, fp8_copies_bytes = _weight_bytes(config, quantized, parameters - quantized, implementation)
    if _is_last(config, stage):
        fp8_copies_bytes += _output_copy_bytes(config, padded_vocab, implementation)
    logits_bytes = _logit_bytes(config, padded_vocab) if _is_last(config, stage) else 0
    return MemoryEstimate(
        stage=stage,
        parameters=parameters,
        weights_bytes=weights_bytes,
        fp8_copies_bytes=fp8_copies_bytes,
        gradients_bytes=parameters * BYTES[derived.grad_dtype(config.precision)],
        optimizer_bytes=_optimizer_bytes(config, world_size, parameters),
        activations_bytes=_activation_bytes(config, world_size, stage, implementation),
        logits_bytes=logits_bytes,
        buffers_bytes=max(0, _backward_bytes(config) - logits_bytes),
    )


def estimate_ends(
    config: RunConfig, world_size: int, padded_vocab: int, *, implementation: str = "transformer_engine"
) -> tuple[MemoryEstimate, ...]:
    """Estimates of the first and the last pipeline stage, which need the most; one where they are the same."""
    last = config.parallel.pipeline_model_parallel_size - 1
    return tuple(
        estimate_memory(config, world_size, padded_vocab, stage=stage, implementation=implementation)
        for stage in sorted({0, last})
    )


def outside_bytes(config: RunConfig, world_size: int) -> int:
    """Device memory of a process that torch does not allocate: context, workspaces, NCCL's buffers."""
    parallel = config.parallel
    groups = (
        parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size, parallel.context_parallel_size,
        derived.data_parallel_size(config, world_size) * parallel.context_parallel_size, world_size,
    )  # fmt: skip
    return CONTEXT_BYTES + COMMUNICATOR_BYTES * sum(size > 1 for size in groups)


# ---- parameters and what hangs on them ----------------------------------------------------------------------------


def parameters_on_stage(config: RunConfig, padded_vocab: int, stage: int) -> tuple[int, int]:
    """Parameters on one rank of a stage: (weights of the layers' linears, all others).

    Matrices and the biases along their split side are divided over tensor-parallel ranks; norms, position embeddings
    and the other biases are on each of them.
    """
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    count = model_shapes.count_parameters(model, padded_vocab)
    layers = derived.layers_per_pipeline_rank(config)
    assert model.hidden_size is not None
    whole_biases = 2 * model.hidden_size if model.add_bias_linear else 0
    split_biases = count.biases_per_layer - whole_biases
    quantizable = layers * (count.attention_weights_per_layer + count.mlp_weights_per_layer) // tp
    other = layers * (split_biases // tp + whole_biases + count.norms_per_layer)
    if stage == 0:
        other += count.word_embeddings // tp + count.position_embeddings
    if _is_last(config, stage):
        other += count.final_norm + count.output_layer // tp
        if model.share_embeddings_and_output_weights and stage > 0:
            other += count.word_embeddings // tp
    return quantizable, other


def quantized_fraction(config: RunConfig, stage: int) -> float:
    """Of the layers of a stage, by their linears' weights, those that fprop quantizes."""
    precision, layers = config.precision, derived.layers_per_pipeline_rank(config)
    if precision.precision_map:
        return 1 - layer_shares(config, stage, FORWARD).get(HIGH, 0.0) / layers
    kept = precision.num_layers_at_start_in_bf16 if stage == 0 else 0
    kept += precision.num_layers_at_end_in_bf16 if _is_last(config, stage) else 0
    return 1 - kept / layers if precision.first_last_layers_bf16 else 1.0


def _output_copy_bytes(config: RunConfig, padded_vocab: int, implementation: str) -> int:
    """Quantized copies of the output layer's weight, which --fp8-param-gather leaves as it is."""
    recipe = output_recipes(config)["fprop"]
    if recipe == HIGH:
        return 0
    assert config.model.hidden_size is not None
    num_copies = 2 if implementation == "transformer_engine" or not registry.get(recipe).shares_weight_codes else 1
    matrix = padded_vocab // config.parallel.tensor_model_parallel_size * config.model.hidden_size
    return int(matrix * registry.get(recipe).code_bytes * num_copies)


def _weight_bytes(config: RunConfig, quantized: int, other: int, implementation: str) -> tuple[int, int]:
    """(bytes of the weights, bytes of quantized copies beside them)."""
    precision = config.precision
    each = BYTES[derived.params_dtype(precision)]
    # One copy for both GEMMs that read a weight, where its codes are the same and need not be transposed for them.
    has_two = implementation == "transformer_engine" or not all(
        recipe.shares_weight_codes for recipe in derived.used_recipes(precision)
    )
    copies = int(quantized * _code_bytes(precision) * (2 if has_two else 1))
    if precision.fp8_param_gather:
        return copies + other * each, 0
    return (quantized + other) * each, copies


def _code_bytes(precision: PrecisionConfig) -> float:
    """Bytes of a quantized number, the largest of a run; 0 in high precision."""
    return max((recipe.code_bytes for recipe in derived.used_recipes(precision)), default=0)


def _optimizer_bytes(config: RunConfig, world_size: int, parameters: int) -> int:
    """Master weights, moments, and FP32 gradients made from low-precision ones."""
    optimizer, precision = config.optimizer, config.precision
    is_fp32 = derived.params_dtype(precision) == "fp32"
    if optimizer.use_precision_aware_optimizer:
        # Beside BF16 weights, TE keeps the 16 bits that an FP32 master weight has more.
        master = BYTES["bf16"] if derived.params_dtype(precision) == "bf16" else BYTES[optimizer.main_params_dtype]
        moments = BYTES[optimizer.exp_avg_dtype] + BYTES[optimizer.exp_avg_sq_dtype]
        gradients = 0
    else:
        master = 0 if is_fp32 else BYTES["fp32"]
        moments = (2 if optimizer.optimizer == "adam" else 1) * BYTES["fp32"]
        gradients = 0 if derived.grad_dtype(precision) == "fp32" else BYTES["fp32"]
    shards = 1
    if config.parallel.use_distributed_optimizer:
        shards = derived.data_parallel_size(config, world_size) * config.parallel.context_parallel_size
    return -(-parameters * (master + moments + gradients) // shards)


# ---- activations --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerActivations:
    """Bytes that one layer saves for the backward pass of one microbatch, by what recomputation can drop."""

    residual_stream: int
    """Inputs of the two norms, and dropout masks: kept by every kind of selective recompute."""
    norm_outputs: int
    """Inputs of linear_qkv and linear_fc1."""
    attention: int
    """Queries, keys, values, and attention's output where a linear or the kernel needs it."""
    core_attention: int
    """Softmax matrices, or what flash attention keeps of them."""
    mlp: int
    """Input of the activation and of linear_fc2."""
    layer_input: int
    """Input of the whole layer: all that full recompute saves."""

    @property
    def total(self) -> int:
        return self.residual_stream + self.norm_outputs + self.attention + self.core_attention + self.mlp

    def after_selective_recompute(self, modules: tuple[str, ...]) -> int:
        """Bytes left when `modules` are computed again in the backward pass."""
        kept = self.total
        if "core_attn" in modules:
            kept -= self.core_attention
        if "layernorm" in modules:
            kept -= self.norm_outputs
        if "mlp" in modules:
            kept -= self.mlp
        return kept


def layer_activations(config: RunConfig, *, implementation: str = "transformer_engine") -> LayerActivations:
    """Activations of one transformer layer on one rank, in bytes."""
    model, parallel, precision = config.model, config.parallel, config.precision
    assert model.hidden_size is not None and model.num_attention_heads is not None
    tokens, seq = _tokens(config), config.data.seq_length
    assert seq is not None
    tp = parallel.tensor_model_parallel_size
    shards = tp if parallel.sequence_parallel else 1
    each = BYTES[derived.params_dtype(precision)]
    # A quantized linear saves its input as codes; where wgrad is in high precision it needs the input itself.
    keeps_codes = _code_bytes(precision) and precision.fp8_wgrad and implementation != "local"
    linear_input = _code_bytes(precision) if keeps_codes and precision.fp8_schedule is None else each
    if precision.precision_map and linear_input != each:
        high = sum(layer_shares(config, stage, ("wgrad",)).get(HIGH, 0.0) for stage in range(_num_stages(config)))
        linear_input += (each - linear_input) * high / model.num_layers

    stream = tokens * model.hidden_size // shards
    query = tokens * derived.query_projection_size(model) // tp
    kv = tokens * derived.kv_projection_size(model) // tp
    ffn = tokens * derived.ffn_hidden_size(model) // tp
    masks = 2 * stream * MASK_BYTES if model.hidden_dropout > 0 else 0
    attention = each * (query + 2 * kv) + int(linear_input * query)
    if precision.attention_backend in ("unfused", "local"):
        scores = tokens * seq * model.num_attention_heads // tp
        core = scores * (2 * each + MASK_BYTES if model.attention_dropout > 0 else each)
    else:
        core = tokens * model.num_attention_heads // tp * LOG_SUM_EXP_BYTES
        # The kernel keeps its output; the linear behind it shares that tensor unless it keeps codes instead.
        attention += each * query if linear_input != each else 0
    return LayerActivations(
        residual_stream=2 * each * stream + masks,
        norm_outputs=int(2 * linear_input * stream),
        attention=attention,
        core_attention=core,
        mlp=each * ffn * (2 if model.swiglu else 1) + int(linear_input * ffn),
        layer_input=each * stream // (tp if config.training.distribute_saved_activations else 1),
    )


def layers_in_flight(config: RunConfig, world_size: int, stage: int) -> float:
    """Layers x microbatches whose activations a stage holds at its peak.

    One-forward-one-backward holds as many microbatches as there are stages from this one on; the interleaved schedule
    warms up with 2 (stages behind) + (chunks - 1) x stages further chunks (Narayanan et al. 2021, section 2.2).
    """
    pp = config.parallel.pipeline_model_parallel_size
    microbatches = derived.num_microbatches(config, world_size)
    layers, chunks = derived.layers_per_pipeline_rank(config), derived.virtual_pipeline_size(config)
    behind = pp - stage - 1
    if chunks is None:
        return layers * min(behind + 1, microbatches)
    in_flight = min(2 * behind + (chunks - 1) * pp + 1, microbatches * chunks)
    return layers / chunks * in_flight


def _activation_bytes(config: RunConfig, world_size: int, stage: int, implementation: str) -> int:
    layer = layer_activations(config, implementation=implementation)
    in_flight = layers_in_flight(config, world_size, stage)
    granularity = derived.recompute_granularity(config.training)
    embedding = _embedding_bytes(config) * in_flight / derived.layers_per_pipeline_rank(config) if stage == 0 else 0
    if granularity != "full":
        kept = layer.after_selective_recompute(derived.recompute_modules(config.training))
        # While a module is computed again, what it had dropped is there once.
        return int(in_flight * kept + (layer.total - kept) + embedding)
    assert config.training.recompute_num_layers is not None
    layers, count = derived.layers_per_pipeline_rank(config), config.training.recompute_num_layers
    if config.training.recompute_method == "uniform":
        # A unit of `count` layers saves its input; one unit at a time is there in full.
        return int(in_flight / count * layer.layer_input + count * layer.total + embedding)
    share = count / layers
    return int(in_flight * (share * layer.layer_input + (1 - share) * layer.total) + layer.total + embedding)


def _backward_bytes(config: RunConfig) -> int:
    """Gradients that are there at once while an MLP runs backward: of its two linears' inputs and outputs."""
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    assert model.hidden_size is not None
    channels = 2 * model.hidden_size + (3 if model.swiglu else 2) * derived.ffn_hidden_size(model) // tp
    return BYTES[derived.params_dtype(config.precision)] * _tokens(config) * channels


def _embedding_bytes(config: RunConfig) -> int:
    """Dropout mask behind the embedding."""
    assert config.model.hidden_size is not None
    shards = config.parallel.tensor_model_parallel_size if config.parallel.sequence_parallel else 1
    return _tokens(config) * config.model.hidden_size // shards * MASK_BYTES if config.model.hidden_dropout > 0 else 0


def _logit_bytes(config: RunConfig, padded_vocab: int) -> int:
    """Input of the final norm and of the output layer, logits, their FP32 softmax and their gradient."""
    assert config.model.hidden_size is not None
    each, tp = BYTES[derived.params_dtype(config.precision)], config.parallel.tensor_model_parallel_size
    shards = tp if config.parallel.sequence_parallel else 1
    of_wgrad = output_recipes(config)["wgrad"]
    keeps_codes = of_wgrad != HIGH and config.precision.fp8_schedule is None
    saved_input = registry.get(of_wgrad).code_bytes if keeps_codes else each
    hidden_bytes = int((each + saved_input) * _tokens(config) * config.model.hidden_size // shards)
    # Codes of the logits' gradient are made once the loss's own copies are gone, and take no more room than those.
    # TE's fused loss writes the gradient over the logits; the others make an FP32 copy and a gradient.
    per_logit = 2 * each if has_fused_loss(config.precision) else each + BYTES["fp32"] + each
    matrix_bytes = BYTES["fp32"] * (padded_vocab // tp) * config.model.hidden_size
    return hidden_bytes + _tokens(config) * padded_vocab // tp * per_logit + matrix_bytes


def has_fused_loss(precision: PrecisionConfig) -> bool:
    """Whether the loss is Transformer Engine's, which makes no FP32 copy of the logits."""
    return precision.cross_entropy_loss_fusion and precision.cross_entropy_fusion_impl == "te"


def _tokens(config: RunConfig) -> int:
    """Tokens of one microbatch on one context-parallel rank."""
    assert config.data.seq_length is not None and config.training.micro_batch_size is not None
    return config.data.seq_length // config.parallel.context_parallel_size * config.training.micro_batch_size


def _num_stages(config: RunConfig) -> int:
    return config.parallel.pipeline_model_parallel_size


def _is_last(config: RunConfig, stage: int) -> bool:
    return stage == _num_stages(config) - 1
