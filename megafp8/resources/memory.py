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

from megafp8.config import derived, dimensions, latent_attention, mixture, model_shapes, multi_token, stages
from megafp8.config.activations import is_gated
from megafp8.config.layer_backends import TRANSFORMER_ENGINE, LayerBackend
from megafp8.config.optimizers import is_layer_wise, updates_matrices
from megafp8.config.run_sizes import RunSizes
from megafp8.config.saved_activations import ACTIVATION, NORM, PACKED_BYTES
from megafp8.config.schema import ModelConfig, PrecisionConfig
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


def latent_attention_bytes(model: ModelConfig, tp: int, tokens: int, act_bytes: int, input_bytes: float) -> int:
    """Bytes of multi-latent attention of one layer: compressed tensors, queries, keys, values, and the output.

    Args:
        tp: tensor-parallel size.
        tokens: of a microbatch on a context-parallel rank.
        act_bytes, input_bytes: of one element of an activation, and of a linear's input.
    """
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


def backward_bytes(sizes: RunSizes, act_bytes: int) -> int:
    """Bytes that exist at once in an MLP's backward pass: gradients of its linears' inputs and outputs, and an input of
    the activation function that was unpacked.

    Args:
        act_bytes: as for `latent_attention_bytes`.
    """
    num_fc1_outputs = 2 if is_gated(sizes.model) else 1
    is_unpacked = ACTIVATION in sizes.precision.fp8_saved_activations
    num_ffn = num_fc1_outputs + 1 + num_fc1_outputs * is_unpacked
    num_channels = num_ffn * dimensions.ffn_hidden_size(sizes.model) // sizes.tensor
    return act_bytes * sizes.tokens * (2 * sizes.hidden_size + num_channels)


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
    sizes: RunSizes, *, stage: int = 0, implementation: LayerBackend = TRANSFORMER_ENGINE
) -> MemoryEstimate:
    """Estimate the memory of one rank of a pipeline stage.

    Args:
        implementation: the layers in use.
    """
    precision = sizes.precision
    quantizable, other = parameters_on_stage(sizes, stage)
    parameters = quantizable + other
    quantized = int(quantizable * quantized_fraction(sizes, stage))
    experts = expert_parameters_on_stage(sizes, stage)
    in_bf16 = experts if mixture_memory.keeps_experts_in_bf16(sizes.parallel) else 0
    weights_bytes, fp8_copies_bytes = _weight_bytes(sizes, quantized, parameters - quantized, implementation, in_bf16)
    logits_bytes = 0
    if sizes.is_last(stage):
        fp8_copies_bytes += _output_copy_bytes(sizes, implementation)
        logits_bytes = _logit_bytes(sizes)
    activations_bytes = _activation_bytes(sizes, stage, implementation)
    gradient_bytes = backward_bytes(sizes, BYTES[derived.params_dtype(precision)])
    updated = updated_parameters(sizes, parameters, experts)
    copies_bytes = mixture_memory.update_bytes(sizes) * updated
    error_bytes = ERROR_BYTES if precision.grad_reduce_fp8_error_feedback else 0
    estimate = MemoryEstimate(
        stage=stage,
        parameters=parameters,
        weights_bytes=weights_bytes,
        fp8_copies_bytes=fp8_copies_bytes,
        gradients_bytes=parameters * (BYTES[derived.grad_dtype(precision)] + error_bytes),
        optimizer_bytes=_optimizer_bytes(sizes, stage, updated),
        activations_bytes=activations_bytes,
        logits_bytes=logits_bytes,
        buffers_bytes=max(0, gradient_bytes - logits_bytes, copies_bytes - activations_bytes - logits_bytes),
    )
    return shard(sizes, estimate, quantizable)  # type: ignore[no-any-return]


def estimate_stages(
    sizes: RunSizes, *, implementation: LayerBackend = TRANSFORMER_ENGINE
) -> tuple[MemoryEstimate, ...]:
    """Estimates of the stages that may need the most memory, in their order.

    These are the first and the last pipeline stage. Where these have fewer layers than others, or only some layers have
    experts, it may also be the first of the others.
    """
    has_kinds = len(set(mixture.expert_layers(sizes.model))) > 1
    inner = () if sizes.is_even and not has_kinds else sizes.stage_kinds
    return tuple(
        estimate_memory(sizes, stage=stage, implementation=implementation)
        for stage in sorted({0, len(sizes.layers) - 1, *inner})
    )


def cuda_graph_memory_bytes(
    sizes: RunSizes, estimate: MemoryEstimate, *, implementation: LayerBackend = TRANSFORMER_ENGINE
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
    if sizes.beside_graph == "steps":
        return estimate.activations_bytes + estimate.logits_bytes + estimate.buffers_bytes
    if sizes.beside_graph == "evaluations":
        return layer_activations(sizes, implementation=implementation).total + estimate.logits_bytes
    return 0


# ---- parameters, weights and optimizer ----------------------------------------------------------------------------


def parameters_on_stage(sizes: RunSizes, stage: int) -> tuple[int, int]:
    """Number of parameters on one rank of a stage: weights of the layers' linears, and all others.

    The router counts as a part of the shared experts. Weights are sharded over tensor-parallel ranks, and so are the
    biases of column-parallel linears. Norms, position embeddings and the other biases are replicated.
    """
    model, tp = sizes.model, sizes.tensor
    count = model_shapes.count_parameters(model, sizes.padded_vocab)
    layers, depths = sizes.num_layers_on(stage), sizes.depths_on(stage)
    replicated_biases = 2 * sizes.hidden_size if model.add_bias_linear else 0
    sharded_biases = count.biases_per_layer - replicated_biases
    num_expert_layers = expert_layers_on_stage(sizes, stage)
    replicated = latent_attention.num_replicated_weights(model) if latent_attention.is_latent(model) else 0
    quantizable = layers * (count.attention_weights_per_layer - replicated + count.mlp_weights_per_layer) // tp
    quantizable += layers * replicated
    quantizable += num_expert_layers * (count.shared_per_layer - count.mlp_per_layer) // tp
    quantizable += expert_parameters_on_stage(sizes, stage)
    quantizable += depths * count.projection_per_depth // tp
    other = layers * (sharded_biases // tp + replicated_biases + count.norms_per_layer) + depths * count.norms_per_depth
    if stage == 0:
        other += count.word_embeddings // tp + count.position_embeddings
    if sizes.is_last(stage):
        other += count.final_norm + count.output_layer // tp
        if (model.share_embeddings_and_output_weights or depths) and stage > 0:
            other += count.word_embeddings // tp
    return quantizable, other


def _output_copy_bytes(sizes: RunSizes, implementation: LayerBackend) -> int:
    """Bytes of the quantized copies of the output layer's weight. --fp8-param-gather does not affect them."""
    recipe = output_layer_recipes(sizes.model, sizes.precision)["fprop"]
    if recipe == BF16:
        return 0
    num_copies = 2 if implementation.keeps_transposed_codes or not registry.get(recipe).shares_weight_codes else 1
    weight_size = sizes.padded_vocab // sizes.tensor * sizes.hidden_size
    return int(weight_size * registry.get(recipe).code_bytes * num_copies)


def _weight_bytes(
    sizes: RunSizes, quantized: int, other: int, implementation: LayerBackend, in_bf16: int
) -> tuple[int, int]:
    """Bytes of the weights, and bytes of the quantized copies that are kept besides them.

    Args:
        in_bf16: of the quantized ones, those that are in high precision beside FP8 weights, too.
    """
    precision = sizes.precision
    param_bytes = BYTES[derived.params_dtype(precision)]
    # fprop and dgrad share one copy of the codes if these are the same and need no transposing, or only while a linear
    # computes, as with sharded weights.
    keeps_transpose = implementation.keeps_transposed_codes and not sizes.parallel.shards_weights
    has_two = keeps_transpose or not all(recipe.shares_weight_codes for recipe in derived.used_recipes(precision))
    copies = int(quantized * _code_bytes(precision) * (2 if has_two else 1))
    if precision.fp8_param_gather:
        return copies + (other + in_bf16) * param_bytes, 0
    return (quantized + other) * param_bytes, copies


def _code_bytes(precision: PrecisionConfig) -> float:
    """Bytes per code of the run's widest recipe; 0 in high precision."""
    return max((recipe.code_bytes for recipe in derived.used_recipes(precision)), default=0)


def _optimizer_bytes(sizes: RunSizes, stage: int, updated: int) -> int:
    """Bytes of master weights, moments, their moving average, and FP32 gradients converted from low-precision ones.

    Args:
        updated: parameters whose state the rank has; not for an optimizer of complete matrices.
    """
    master, moments, gradients = mixture_memory.state_bytes(sizes.optimizer, sizes.precision)
    master += derived.ema_bytes(sizes.optimizer)  # one element for each of a master weight, on the same ranks
    if updates_matrices(sizes.optimizer):
        quantizable, other = parameters_on_stage(sizes, stage)
        has_table = stage == 0 or sizes.is_last(stage)
        channels = sizes.padded_vocab if has_table else dimensions.ffn_hidden_size(sizes.model)
        largest = channels * sizes.hidden_size // sizes.tensor
        return matrix_state_bytes(
            sizes, matrices=quantizable, others=other, experts=expert_parameters_on_stage(sizes, stage),
            largest=largest, itemsize=master + gradients,
        )  # fmt: skip
    return updated * (master + moments + gradients)


def matrix_state_bytes(
    sizes: RunSizes, *, matrices: int, others: int, experts: int, largest: int, itemsize: int
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
    if not is_layer_wise(sizes.optimizer, sizes.parallel):
        return matrices * of_matrix + others * of_other
    ranks = sizes.replicas
    dense = max((matrices - experts) * of_matrix + others * of_other, ranks * largest * of_other)
    return -(-dense // ranks) + -(-experts * of_matrix // sizes.expert_replicas)


def updated_parameters(sizes: RunSizes, parameters: int, experts: int) -> int:
    """Parameters whose state the rank has, of those on its stage, some of which are experts'."""
    if not sizes.parallel.shards_optimizer:
        return parameters
    return -(-(parameters - experts) // num_shards(sizes)) + -(-experts // sizes.expert_replicas)


# ---- activations --------------------------------------------------------------------------------------------------


def layer_activations(sizes: RunSizes, *, implementation: LayerBackend = TRANSFORMER_ENGINE) -> LayerActivations:
    """Activations of one transformer layer on one rank for one microbatch."""
    model, precision, tokens, tp = sizes.model, sizes.precision, sizes.tokens, sizes.tensor
    assert model.num_attention_heads is not None and model.num_layers is not None
    act_bytes = BYTES[derived.params_dtype(precision)]
    # A quantized linear saves its input as codes. If wgrad is in high precision, it saves the input itself.
    saves_codes = _code_bytes(precision) and precision.fp8_wgrad and implementation.quantizes
    input_bytes = _code_bytes(precision) if saves_codes and precision.fp8_schedule is None else act_bytes
    if precision.precision_map and input_bytes != act_bytes:
        every_stage = range(len(sizes.layers))
        num_high = sum(layers_by_recipe(sizes, stage, ("wgrad",)).get(BF16, 0.0) for stage in every_stage)
        input_bytes += (act_bytes - input_bytes) * num_high / model.num_layers

    residual = sizes.residual_elements
    query = tokens * dimensions.query_projection_size(model) // tp
    kv = tokens * dimensions.kv_projection_size(model) // tp
    if sizes.gathers_keys and not implementation.has_torch_attention:
        # For one piece of the queries the keys up to its end, and for the other one those up to that of its own.
        kv = kv * (2 * sizes.parallel.context_parallel_size + 1) // 2
    ffn, routed = mlp_channels(sizes)
    masks = 2 * residual * DROPOUT_MASK_BYTES if model.hidden_dropout > 0 else 0
    attention = act_bytes * (query + 2 * kv) + int(input_bytes * query)
    if latent_attention.is_latent(model):
        query = tokens * model.num_attention_heads * model.v_head_dim // tp  # the output, below as well
        attention = latent_attention_bytes(model, tp, tokens, act_bytes, input_bytes)
    scores = tokens * sizes.seq_length * model.num_attention_heads // tp
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
        layer_input=act_bytes * residual // (tp if sizes.splits_layer_inputs else 1),
    )


def saved_layer_bytes(sizes: RunSizes, *, implementation: LayerBackend = TRANSFORMER_ENGINE) -> int:
    """Bytes that one layer keeps of a microbatch until its backward pass, with the recomputation of the run."""
    layer = layer_activations(sizes, implementation=implementation)
    if sizes.recompute_method is not None:
        return layer.layer_input
    return layer.after_selective_recompute(sizes.recompute_modules)


def layers_in_flight(sizes: RunSizes, stage: int) -> float:
    """Layers x microbatches whose activations a stage holds at its peak.

    The 1F1B schedule holds one microbatch for this stage and each later one. The interleaved schedule has a warmup of
    2 x (later stages) + (chunks - 1) x stages chunks (Narayanan et al. 2021, section 2.2); instead of the number of
    stages, --microbatch-group-size-per-virtual-pipeline-stage if it is given.
    """
    num_microbatches = sizes.num_microbatches
    num_chunks = stages.virtual_pipeline_size(sizes.model, sizes.parallel)
    layers, num_later = sizes.num_layers_on(stage), len(sizes.layers) - stage - 1
    if num_chunks is None:
        return layers * min(num_later + 1, num_microbatches)
    group_size = stages.microbatch_group_size(sizes.parallel)
    in_flight = min(2 * num_later + (num_chunks - 1) * group_size + 1, num_microbatches * num_chunks)
    return layers / num_chunks * in_flight


def _activation_bytes(sizes: RunSizes, stage: int, implementation: LayerBackend) -> int:
    layer = layer_activations(sizes, implementation=implementation)
    in_flight, num_layers = layers_in_flight(sizes, stage), sizes.num_layers_on(stage)
    embedding = 0.0
    if stage == 0 and sizes.model.hidden_dropout > 0 and num_layers:  # the dropout mask after the embedding
        embedding = sizes.residual_elements * DROPOUT_MASK_BYTES * in_flight / num_layers
    if not num_layers:
        return 0
    if sizes.recompute_method is None:
        stored = saved_layer_bytes(sizes, implementation=implementation)
        # While a module is recomputed, the activations that it had dropped exist once.
        return int(in_flight * stored + (layer.total - stored) + embedding)
    num_recomputed = sizes.recompute_num_layers
    assert num_recomputed is not None
    if sizes.recompute_method == "uniform":
        # Each unit of `num_recomputed` layers saves its input. One unit at a time exists in full.
        return int(in_flight / num_recomputed * layer.layer_input + num_recomputed * layer.total + embedding)
    fraction = min(1.0, num_recomputed / num_layers)
    return int(in_flight * (fraction * layer.layer_input + (1 - fraction) * layer.total) + layer.total + embedding)


def _logit_bytes(sizes: RunSizes) -> int:
    """Bytes of the inputs of the final norm and the output layer, the logits, their FP32 softmax and their gradient."""
    act_bytes = BYTES[derived.params_dtype(sizes.precision)]
    wgrad_recipe = output_layer_recipes(sizes.model, sizes.precision)["wgrad"]
    saves_codes = wgrad_recipe != BF16 and sizes.precision.fp8_schedule is None
    input_bytes = registry.get(wgrad_recipe).code_bytes if saves_codes else act_bytes
    hidden_bytes = int((act_bytes + input_bytes) * sizes.residual_elements)
    # Codes of the logits' gradient are made after the loss has freed its copies, and are no larger than those. TE's
    # fused loss writes the gradient over the logits. The others make an FP32 copy and a gradient.
    logit_bytes = 2 * act_bytes if has_fused_loss(sizes.precision) else act_bytes + BYTES["fp32"] + act_bytes
    weight_bytes = BYTES["fp32"] * (sizes.padded_vocab // sizes.tensor) * sizes.hidden_size
    # Multi-token prediction has logits of its own for each depth. All exist until the backward pass. Its modules also
    # keep the inputs of two norms, and that of the projection, of twice the size.
    depths = multi_token.num_depths(sizes.model)
    depth_bytes = depths * 4 * act_bytes * sizes.residual_elements
    each = hidden_bytes + logit_elements(sizes) * logit_bytes
    return (1 + depths) * each + depth_bytes + weight_bytes


def logit_elements(sizes: RunSizes) -> int:
    """Elements of the logits of one microbatch on one rank of the last stage."""
    return sizes.tokens * sizes.padded_vocab // sizes.tensor


def has_fused_loss(precision: PrecisionConfig) -> bool:
    """Whether the loss is Transformer Engine's, which makes no FP32 copy of the logits."""
    return bool(precision.cross_entropy_loss_fusion) and precision.cross_entropy_fusion_impl == "te"
