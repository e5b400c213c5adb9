"""Memory model: device memory of a rank, by part, from the configuration alone.

    weights       P x (2 bytes in BF16 and FP16, 4 in FP32)
    FP8 copies    Q x (2 bytes with Transformer Engine: codes and transposed codes; emulated 1, MXFP8 2); FP4: half.
                  With --fp8-param-gather they replace the weights
    gradients     P x (4 bytes, 2 with a low-precision reduction)
    optimizer     P x (4 master weights + 4 + 4 moments), divided by data- x context-parallel size if sharded. An
                  optimizer of matrices has one moment for those. --ema-decay: P x 4 more, or 2 in BF16
    activations   microbatches in flight x layers x bytes per layer
    logits        tokens x vocabulary / tensor-parallel size x (format + 4 + format), on the last stage
    buffers       gradients of the layer that runs backward, on stages without logits; or FP32 copies of the state
                  (`mixture_memory.py`), as far as they are larger than activations and logits

P: parameters on this rank. Q: the part of them that is quantized, which is the linears of quantized layers, and the
output layer if a precision map quantizes it. --fp8-param-gather does not replace the output layer's weight. Gradients
of a tied embedding are reduced between the first and the last stage, so both hold a copy.

Activations follow Korthikanti et al. 2022 ("Reducing Activation Recomputation in Large Transformer Models"), counted
tensor by tensor to cover grouped queries, gated MLPs and FP8. For the paper's GPT with dropout the sum is its
s b h (34 + 5 a s / h) bytes per layer (equation 1), equation 2 with tensor parallelism and equation 4 with sequence
parallelism. Flash attention saves its output instead of the a s^2 matrices.

In addition to the logits, the last stage has a second tensor of their size and an FP32 matrix of the output layer's
size. Both come from peaks measured on an H200, not from source code. Without them the estimate was low by 1.91 and 3.46
GiB (llama-1b, 8 and 16 x 2048 tokens) and 1.64 GiB (hidden size 4096, 2 x 4096) in BF16, and by the same to within 0.02
GiB in FP8. benchmarks/results/planner has the error against every measured peak.

All of this is allocated by torch. `mixture_memory.non_torch_bytes` is what a process takes on the device besides that.
"""

from __future__ import annotations

from dataclasses import dataclass

from megafp8.config import (
    activations,
    derived,
    dimensions,
    iterations,
    latent_attention,
    mixture,
    model_shapes,
    multi_token,
    stages,
    topology,
)
from megafp8.config.activations import is_gated
from megafp8.config.layer_backends import TRANSFORMER_ENGINE, LayerBackend
from megafp8.config.optimizers import is_layer_wise, updates_matrices
from megafp8.config.saved_activations import ACTIVATION, NORM, PACKED_BYTES
from megafp8.config.schema import ModelConfig, PrecisionConfig, RunConfig
from megafp8.config.sharding import ERROR_BYTES, num_shards, shard
from megafp8.recipes import registry
from megafp8.resources import mixture_memory
from megafp8.resources.mixture_memory import BYTES, expert_layers_on_stage, expert_parameters_on_stage, mlp_channels
from megafp8.resources.recipe_shares import BF16, layers_by_recipe, output_layer_recipes, quantized_fraction

# ---- What one layer saves for the backward pass ---------------------------------------------------------------------


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


# ---- Activation memory of attention without a fused kernel ----------------------------------------------------------


def explicit_score_bytes(model: ModelConfig, implementation: LayerBackend, backend: str = "auto") -> int:
    """Bytes that torch's explicit attention saves for each score, in FP32; 0 with another kernel.

    It saves the probabilities and the capped scores.

    Args:
        backend: `--attention-backend`.
    """
    is_capped = model.attention_logit_softcapping is not None
    is_chosen = model.softmax_type != "vanilla" or backend == "unfused"
    if not is_capped and (not is_chosen or not implementation.has_torch_attention):
        return 0
    return 4 * (1 + is_capped)


# ----------------------------------------------------------------------------------------------------------------------

DROPOUT_MASK_BYTES = 1
LOG_SUM_EXP_BYTES = 4
"""Flash attention keeps one FP32 log-sum-exp per query and head."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one rank of a pipeline stage at the peak of a step.

    Attributes:
        parameters: number of parameters on the rank.
    """

    stage: int
    parameters: int
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
    config: RunConfig,
    world_size: int,
    padded_vocab: int,
    *,
    stage: int = 0,
    implementation: LayerBackend = TRANSFORMER_ENGINE,
) -> MemoryEstimate:
    """Estimate the memory of one rank of a pipeline stage.

    Args:
        config: a configuration that violates no rule.
        padded_vocab: vocabulary size after padding (`dimensions.padded_vocab_size`).
        implementation: the layers in use.
    """
    quantizable, other = parameters_on_stage(config, padded_vocab, stage)
    parameters = quantizable + other
    quantized = int(quantizable * quantized_fraction(config, stage))
    in_bf16 = expert_parameters_on_stage(config, stage) if mixture_memory.keeps_experts_in_bf16(config) else 0
    weights_bytes, fp8_copies_bytes = _weight_bytes(config, quantized, parameters - quantized, implementation, in_bf16)
    if _is_last(config, stage):
        fp8_copies_bytes += _output_copy_bytes(config, padded_vocab, implementation)
    logits_bytes = _logit_bytes(config, padded_vocab) if _is_last(config, stage) else 0
    activations_bytes = _activation_bytes(config, world_size, stage, implementation)
    gradient_bytes = backward_bytes(config, _tokens(config), BYTES[derived.params_dtype(config.precision)])
    updated = updated_parameters(config, world_size, parameters, expert_parameters_on_stage(config, stage))
    copies_bytes = mixture_memory.update_bytes(config) * updated
    error_bytes = ERROR_BYTES if config.precision.grad_reduce_fp8_error_feedback else 0
    estimate = MemoryEstimate(
        stage=stage,
        parameters=parameters,
        weights_bytes=weights_bytes,
        fp8_copies_bytes=fp8_copies_bytes,
        gradients_bytes=parameters * (BYTES[derived.grad_dtype(config.precision)] + error_bytes),
        optimizer_bytes=_optimizer_bytes(config, world_size, padded_vocab, stage, updated),
        activations_bytes=activations_bytes,
        logits_bytes=logits_bytes,
        buffers_bytes=max(0, gradient_bytes - logits_bytes, copies_bytes - activations_bytes - logits_bytes),
    )
    return shard(config, world_size, estimate, quantizable)  # type: ignore[no-any-return]


def estimate_stages(
    config: RunConfig, world_size: int, padded_vocab: int, *, implementation: LayerBackend = TRANSFORMER_ENGINE
) -> tuple[MemoryEstimate, ...]:
    """Estimates of the stages that may need the most memory, in their order.

    These are the first and the last pipeline stage. Where these have fewer layers than others, or only some layers have
    experts, it may also be the first of the others.
    """
    last = config.parallel.pipeline_model_parallel_size - 1
    has_kinds = len(set(mixture.expert_layers(config.model))) > 1
    inner = () if stages.is_even(config) and not has_kinds else stages.kinds_of_stages(config)
    return tuple(
        estimate_memory(config, world_size, padded_vocab, stage=stage, implementation=implementation)
        for stage in sorted({0, last, *inner})
    )


def cuda_graph_memory_bytes(
    config: RunConfig, estimate: MemoryEstimate, *, implementation: LayerBackend = TRANSFORMER_ENGINE
) -> int:
    """Memory that a rank needs in addition to its CUDA graph; 0 without a graph, or without anything that runs eagerly.

    A graph keeps the memory of its capture, and nothing else can use it between replays. The first statistics step, and
    the first of the guard, runs eagerly and needs activations and logits a second time. Validation needs logits and one
    layer's activations. They never run at the same time, so they share memory. Steps before the capture need nothing:
    torch returns their memory to the device first. Quantized weights are shared with the graph.

    This follows from how torch's allocator and Transformer Engine's layers work. It is not measured: recorded peaks are
    those of tensors, which do not include a graph's memory between replays.

    Args:
        estimate: the estimate of the same rank.
    """
    if not derived.uses_cuda_graph(config):
        return 0
    if config.logging.fp8_log_interval is not None or config.training.fp8_guard != "off":
        return estimate.activations_bytes + estimate.logits_bytes + estimate.buffers_bytes
    if config.training.eval_iters:
        return layer_activations(config, implementation=implementation).total + estimate.logits_bytes
    return 0


# ---- parameters, weights and optimizer ----------------------------------------------------------------------------


def parameters_on_stage(config: RunConfig, padded_vocab: int, stage: int) -> tuple[int, int]:
    """Number of parameters on one rank of a stage: weights of the layers' linears, and all others.

    The router counts as a part of the shared experts. Weights are sharded over tensor-parallel ranks, and so are the
    biases of column-parallel linears. Norms, position embeddings and the other biases are replicated.
    """
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    count = model_shapes.count_parameters(model, padded_vocab)
    layers, depths = multi_token.num_layers_with_mtp(config, stage), multi_token.depths_on(config, stage)
    assert model.hidden_size is not None
    replicated_biases = 2 * model.hidden_size if model.add_bias_linear else 0
    sharded_biases = count.biases_per_layer - replicated_biases
    num_expert_layers = expert_layers_on_stage(config, stage)
    replicated = latent_attention.num_replicated_weights(model) if latent_attention.is_latent(model) else 0
    quantizable = layers * (count.attention_weights_per_layer - replicated + count.mlp_weights_per_layer) // tp
    quantizable += layers * replicated
    quantizable += num_expert_layers * (count.shared_per_layer - count.mlp_per_layer) // tp
    quantizable += expert_parameters_on_stage(config, stage)
    quantizable += depths * count.projection_per_depth // tp
    other = layers * (sharded_biases // tp + replicated_biases + count.norms_per_layer) + depths * count.norms_per_depth
    if stage == 0:
        other += count.word_embeddings // tp + count.position_embeddings
    if _is_last(config, stage):
        other += count.final_norm + count.output_layer // tp
        if (model.share_embeddings_and_output_weights or depths) and stage > 0:
            other += count.word_embeddings // tp
    return quantizable, other


def _output_copy_bytes(config: RunConfig, padded_vocab: int, implementation: LayerBackend) -> int:
    """Bytes of the quantized copies of the output layer's weight. --fp8-param-gather does not affect them."""
    recipe = output_layer_recipes(config)["fprop"]
    if recipe == BF16:
        return 0
    assert config.model.hidden_size is not None
    num_copies = 2 if implementation.keeps_transposed_codes or not registry.get(recipe).shares_weight_codes else 1
    weight_size = padded_vocab // config.parallel.tensor_model_parallel_size * config.model.hidden_size
    return int(weight_size * registry.get(recipe).code_bytes * num_copies)


def _weight_bytes(
    config: RunConfig, quantized: int, other: int, implementation: LayerBackend, in_bf16: int
) -> tuple[int, int]:
    """Bytes of the weights, and bytes of the quantized copies that are kept besides them.

    Args:
        in_bf16: of the quantized ones, those that are in high precision beside FP8 weights, too.
    """
    precision = config.precision
    param_bytes = BYTES[derived.params_dtype(precision)]
    # fprop and dgrad share one copy of the codes if these are the same and need no transposing, or only while a linear
    # computes, as with sharded weights.
    keeps_transpose = implementation.keeps_transposed_codes and not config.parallel.shards_weights
    has_two = keeps_transpose or not all(recipe.shares_weight_codes for recipe in derived.used_recipes(precision))
    copies = int(quantized * _code_bytes(precision) * (2 if has_two else 1))
    if precision.fp8_param_gather:
        return copies + (other + in_bf16) * param_bytes, 0
    return (quantized + other) * param_bytes, copies


def _code_bytes(precision: PrecisionConfig) -> float:
    """Bytes per code of the run's widest recipe; 0 in high precision."""
    return max((recipe.code_bytes for recipe in derived.used_recipes(precision)), default=0)


def _optimizer_bytes(config: RunConfig, world_size: int, padded_vocab: int, stage: int, updated: int) -> int:
    """Bytes of master weights, moments, their moving average, and FP32 gradients converted from low-precision ones.

    Args:
        updated: parameters whose state the rank has; not for an optimizer of complete matrices.
    """
    master, moments, gradients = mixture_memory.state_bytes(config)
    master += derived.ema_bytes(config.optimizer)  # one element for each of a master weight, on the same ranks
    if updates_matrices(config.optimizer):
        quantizable, other = parameters_on_stage(config, padded_vocab, stage)
        has_table = stage == 0 or _is_last(config, stage)
        channels = padded_vocab if has_table else dimensions.ffn_hidden_size(config.model)
        assert config.model.hidden_size is not None
        largest = channels * config.model.hidden_size // config.parallel.tensor_model_parallel_size
        return matrix_state_bytes(
            config, world_size, matrices=quantizable, others=other, experts=expert_parameters_on_stage(config, stage),
            largest=largest, itemsize=master + gradients,
        )  # fmt: skip
    return updated * (master + moments + gradients)


def matrix_state_bytes(
    config: RunConfig, world_size: int, *, matrices: int, others: int, experts: int, largest: int, itemsize: int
) -> int:
    """Bytes of the state of an optimizer of matrices on the rank that has most of it.

    It has one FP32 moment for a matrix of the layers, where Adam has two.

    Args:
        matrices: elements of the matrices of the layers on the rank, with those of experts.
        others: elements of all other weights.
        experts: those of `matrices` that are of routed experts.
        largest: elements of the largest weight, which one rank updates.
        itemsize: bytes of an element's master weight and of its converted gradient.
    """
    of_matrix, of_other = itemsize + BYTES["fp32"], itemsize + 2 * BYTES["fp32"]
    if not is_layer_wise(config.optimizer, config.parallel):
        return matrices * of_matrix + others * of_other
    ranks = topology.data_parallel_size(config, world_size, with_context_parallel=True)
    expert_ranks = mixture.expert_data_size(config, world_size) if experts else 1
    dense = max((matrices - experts) * of_matrix + others * of_other, ranks * largest * of_other)
    return -(-dense // ranks) + -(-experts * of_matrix // expert_ranks)


def updated_parameters(config: RunConfig, world_size: int, parameters: int, experts: int) -> int:
    """Parameters whose state the rank has, of those on its stage, some of which are experts'."""
    shards = expert_shards = 1
    if config.parallel.shards_optimizer:
        shards = num_shards(config, world_size)
        expert_shards = mixture.expert_data_size(config, world_size) if experts else 1
    return -(-(parameters - experts) // shards) + -(-experts // expert_shards)


# ---- activations --------------------------------------------------------------------------------------------------


def layer_activations(config: RunConfig, *, implementation: LayerBackend = TRANSFORMER_ENGINE) -> LayerActivations:
    """Activations of one transformer layer on one rank for one microbatch."""
    model, parallel, precision = config.model, config.parallel, config.precision
    assert model.hidden_size is not None and model.num_attention_heads is not None and model.num_layers is not None
    tokens, seq = _tokens(config), config.data.seq_length
    assert seq is not None
    tp = parallel.tensor_model_parallel_size
    act_bytes = BYTES[derived.params_dtype(precision)]
    # A quantized linear saves its input as codes. If wgrad is in high precision, it saves the input itself.
    saves_codes = _code_bytes(precision) and precision.fp8_wgrad and implementation.quantizes
    input_bytes = _code_bytes(precision) if saves_codes and precision.fp8_schedule is None else act_bytes
    if precision.precision_map and input_bytes != act_bytes:
        num_high = sum(
            layers_by_recipe(config, stage, ("wgrad",)).get(BF16, 0.0)
            for stage in range(parallel.pipeline_model_parallel_size)
        )
        input_bytes += (act_bytes - input_bytes) * num_high / model.num_layers

    residual = _residual_elements(config)
    query = tokens * dimensions.query_projection_size(model) // tp
    kv = tokens * dimensions.kv_projection_size(model) // tp
    is_gathered = config.data.reset_attention_mask and dimensions.cp_exchange(config) == "allgather"
    if is_gathered and parallel.context_parallel_size > 1 and not implementation.has_torch_attention:
        # For one piece of the queries the keys up to its end, and for the other one those up to that of its own.
        kv = kv * (2 * parallel.context_parallel_size + 1) // 2
    ffn, routed = mlp_channels(config, tokens, residual)
    masks = 2 * residual * DROPOUT_MASK_BYTES if model.hidden_dropout > 0 else 0
    attention = act_bytes * (query + 2 * kv) + int(input_bytes * query)
    if latent_attention.is_latent(model):
        query = tokens * model.num_attention_heads * model.v_head_dim // tp  # the output, below as well
        attention = latent_attention_bytes(config, tokens, act_bytes, input_bytes)
    scores = tokens * seq * model.num_attention_heads // tp
    if score_bytes := explicit_score_bytes(model, implementation, precision.attention_backend):
        core = scores * (score_bytes + (DROPOUT_MASK_BYTES if model.attention_dropout > 0 else 0))
    elif precision.attention_backend in ("unfused", "local"):
        core = scores * (2 * act_bytes + DROPOUT_MASK_BYTES if model.attention_dropout > 0 else act_bytes)
    else:
        core = tokens * model.num_attention_heads // tp * LOG_SUM_EXP_BYTES
        # The kernel saves its output. linear_proj shares that tensor unless it saves codes instead.
        attention += act_bytes * query if input_bytes != act_bytes else 0
    return LayerActivations(
        residual_stream=int(2 * saved_itemsize(precision, NORM, act_bytes) * residual) + masks,
        norm_outputs=int(2 * input_bytes * residual),
        attention=attention,
        core_attention=core,
        mlp=int(saved_itemsize(precision, ACTIVATION, act_bytes) * ffn * (2 if is_gated(model) else 1))
        + int(input_bytes * (ffn + routed)),
        layer_input=act_bytes * residual // (tp if config.training.distribute_saved_activations else 1),
    )


def saved_layer_bytes(config: RunConfig, *, implementation: LayerBackend = TRANSFORMER_ENGINE) -> int:
    """Bytes that one layer keeps of a microbatch until its backward pass, with the recomputation of the run."""
    layer = layer_activations(config, implementation=implementation)
    if derived.recompute_granularity(config.training) == "full":
        return layer.layer_input
    return layer.after_selective_recompute(derived.recompute_modules(config.training))


def layers_in_flight(config: RunConfig, world_size: int, stage: int) -> float:
    """Layers x microbatches whose activations a stage holds at its peak.

    The 1F1B schedule holds one microbatch for this stage and each later one. The interleaved schedule has a warmup of
    2 x (later stages) + (chunks - 1) x stages chunks (Narayanan et al. 2021, section 2.2); instead of the number of
    stages, --microbatch-group-size-per-virtual-pipeline-stage if it is given.
    """
    num_stages = config.parallel.pipeline_model_parallel_size
    num_microbatches = iterations.num_microbatches(config, world_size)
    layers = multi_token.num_layers_with_mtp(config, stage)
    num_chunks = stages.virtual_pipeline_size(config.model, config.parallel)
    num_later = num_stages - stage - 1
    if num_chunks is None:
        return layers * min(num_later + 1, num_microbatches)
    group_size = stages.microbatch_group_size(config)
    in_flight = min(2 * num_later + (num_chunks - 1) * group_size + 1, num_microbatches * num_chunks)
    return layers / num_chunks * in_flight


def _activation_bytes(config: RunConfig, world_size: int, stage: int, implementation: LayerBackend) -> int:
    layer = layer_activations(config, implementation=implementation)
    in_flight = layers_in_flight(config, world_size, stage)
    num_layers = multi_token.num_layers_with_mtp(config, stage)
    embedding = 0.0
    if stage == 0 and config.model.hidden_dropout > 0 and num_layers:  # the dropout mask after the embedding
        embedding = _residual_elements(config) * DROPOUT_MASK_BYTES * in_flight / num_layers
    if not num_layers:
        return 0
    if derived.recompute_granularity(config.training) != "full":
        stored = saved_layer_bytes(config, implementation=implementation)
        # While a module is recomputed, the activations that it had dropped exist once.
        return int(in_flight * stored + (layer.total - stored) + embedding)
    num_recomputed = config.training.recompute_num_layers
    assert num_recomputed is not None
    if config.training.recompute_method == "uniform":
        # Each unit of `num_recomputed` layers saves its input. One unit at a time exists in full.
        return int(in_flight / num_recomputed * layer.layer_input + num_recomputed * layer.total + embedding)
    fraction = min(1.0, num_recomputed / num_layers)
    return int(in_flight * (fraction * layer.layer_input + (1 - fraction) * layer.total) + layer.total + embedding)


def _logit_bytes(config: RunConfig, padded_vocab: int) -> int:
    """Bytes of the inputs of the final norm and the output layer, the logits, their FP32 softmax and their gradient."""
    assert config.model.hidden_size is not None
    act_bytes, tp = BYTES[derived.params_dtype(config.precision)], config.parallel.tensor_model_parallel_size
    shards = tp if config.parallel.sequence_parallel else 1
    wgrad_recipe = output_layer_recipes(config)["wgrad"]
    saves_codes = wgrad_recipe != BF16 and config.precision.fp8_schedule is None
    input_bytes = registry.get(wgrad_recipe).code_bytes if saves_codes else act_bytes
    hidden_bytes = int((act_bytes + input_bytes) * _tokens(config) * config.model.hidden_size // shards)
    # Codes of the logits' gradient are made after the loss has freed its copies, and are no larger than those. TE's
    # fused loss writes the gradient over the logits. The others make an FP32 copy and a gradient.
    logit_bytes = 2 * act_bytes if has_fused_loss(config.precision) else act_bytes + BYTES["fp32"] + act_bytes
    weight_bytes = BYTES["fp32"] * (padded_vocab // tp) * config.model.hidden_size
    # Multi-token prediction has logits of its own for each depth. All exist until the backward pass. Its modules also
    # keep the inputs of two norms, and that of the projection, of twice the size.
    depths = multi_token.num_depths(config.model)
    depth_bytes = depths * 4 * act_bytes * _residual_elements(config)
    each = hidden_bytes + logit_elements(config, padded_vocab) * logit_bytes
    return (1 + depths) * each + depth_bytes + weight_bytes


def logit_elements(config: RunConfig, padded_vocab: int) -> int:
    """Elements of the logits of one microbatch on one rank of the last stage."""
    return _tokens(config) * padded_vocab // config.parallel.tensor_model_parallel_size


def has_fused_loss(precision: PrecisionConfig) -> bool:
    """Whether the loss is Transformer Engine's, which makes no FP32 copy of the logits."""
    return bool(precision.cross_entropy_loss_fusion) and precision.cross_entropy_fusion_impl == "te"


def _tokens(config: RunConfig) -> int:
    """Tokens of one microbatch on one context-parallel rank."""
    assert config.data.seq_length is not None and config.training.micro_batch_size is not None
    return config.data.seq_length // config.parallel.context_parallel_size * config.training.micro_batch_size


def _residual_elements(config: RunConfig) -> int:
    """Elements of the residual stream of one microbatch on one rank: a shard with sequence parallelism."""
    assert config.model.hidden_size is not None
    shards = config.parallel.tensor_model_parallel_size if config.parallel.sequence_parallel else 1
    return _tokens(config) * config.model.hidden_size // shards


def _is_last(config: RunConfig, stage: int) -> bool:
    return stage == config.parallel.pipeline_model_parallel_size - 1
