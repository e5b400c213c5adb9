"""Step time model: seconds of an optimizer step on the slowest pipeline stage, by part.

    step = microbatches x slowest stage + bubble + exposed data-parallel communication + optimizer

A stage's microbatch is the forward and backward pass of its layers, recomputation, exposed tensor- and context-parallel
communication, and the embedding or output layer on the first or last stage. Where the host takes longer to launch a
layer's kernels than the GPU takes to run them, the layer takes the host's time, unless the step is a CUDA graph.

The bubble is the time in which the slowest stage waits for the others: the sum of their microbatches, divided by the
number of model chunks of the interleaved schedule (Narayanan et al. 2021, section 2.2).

Communication that overlaps with computation counts as far as it takes longer: tensor-parallel gathers and reductions
with dgrad and wgrad, the context-parallel ring with attention, pipeline sends in the interleaved schedule. With the
flags for it, gradient reductions overlap with the last microbatch's backward pass, and parameter gathers with the first
one's forward pass; one bucket is always exposed. Two assumptions favor large clusters: communication does not slow
computation down, and all GPUs are equally fast.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

from megafp8.config import derived, dimensions, iterations, mixture, model_shapes, multi_token, precision_map, stages
from megafp8.config.optimizers import updates_matrices
from megafp8.config.schema import RunConfig
from megafp8.planning import communication, compute
from megafp8.planning.mixture_time import exchanged_bytes, experts_time, is_one_launch
from megafp8.planning.newton_schulz import newton_schulz_s
from megafp8.planning.planned_run import PlannedRun
from megafp8.recipes import registry
from megafp8.resources.memory import parameters_on_stage
from megafp8.resources.mixture_memory import (
    BYTES,
    SCALED,
    expert_layers_on_stage,
    expert_parameters_on_stage,
    keeps_experts_in_bf16,
)
from megafp8.resources.recipe_shares import (
    BACKWARD_GEMMS,
    BF16,
    FORWARD_GEMMS,
    layers_by_recipe,
    output_layer_recipes,
    quantized_fraction,
)

# ---- Time of the optimizer in a step: the bytes that its kernels move -----------------------------------------------


def optimizer_s(run: PlannedRun, stage: int) -> float:
    """Seconds of the optimizer's kernels on gradients, master weights and moments, and of Newton-Schulz."""
    parameters = sum(parameters_on_stage(run.sizes, stage))
    parallel = run.config.parallel
    experts = expert_parameters_on_stage(run.sizes, stage)
    num_shards = communication.data_group(run).size if parallel.shards_optimizer else 1
    on_shard = (parameters - experts) / num_shards
    if experts:
        on_shard += experts / (communication.expert_data_group(run).size if parallel.shards_optimizer else 1)
    full_bytes, shard_bytes = optimizer_bytes_per_parameter(run)
    moved_bytes = full_bytes * parameters / (num_shards if parallel.shards_weights else 1) + shard_bytes * on_shard
    orthogonalization_s = newton_schulz_s(run, stage, num_shards) if updates_matrices(run.config.optimizer) else 0.0
    return moved_bytes / (run.gpu.hbm_bytes_per_s * run.calibration.optimizer_fraction) + orthogonalization_s


def optimizer_bytes_per_parameter(run: PlannedRun) -> tuple[float, float]:
    """Bytes that the optimizer moves per parameter of the rank, and per parameter of its shard.

    The fused kernel moves 34 bytes: grad norm 4, reading gradient, master weight and moments 16, writing them 12, BF16
    weight 2. megatron-core's optimizer moves 46: grad norm 4, clipping 8, Adam 28, copy to BF16 6; with per-token loss,
    dividing the complete gradient buffer by the number of tokens adds 8. Zeroing the gradient buffer adds 4 where
    gradients are accumulated into it. For FP16 and FP8 moments the kernel reads moments and gradient (4) once more to
    find their scales. An update of --ema-decay reads the master weight (4), and reads and writes the moving average.
    """
    optimizer, training, precision = run.config.optimizer, run.config.training, run.config.precision
    state = {"fp32": 8, "fp16": 4, "bf16": 4, "fp8": 2}
    moments = (optimizer.exp_avg_dtype, optimizer.exp_avg_sq_dtype)
    scaled = [BYTES[dtype] for dtype in moments if dtype in SCALED]
    scale_bytes = 4 + sum(scaled) if scaled else 0
    saved_bytes = 0
    if optimizer.use_precision_aware_optimizer:
        # Smaller moments are read and written. TE keeps only the 16 bits of a master weight that BF16 lacks.
        saved_bytes = 8 - state[optimizer.exp_avg_dtype] + 8 - state[optimizer.exp_avg_sq_dtype] + 4
    zero_bytes = 0 if precision.gradient_overwrite and run.pipeline == 1 else 4
    mean_bytes = derived.ema_bytes(optimizer)
    averaging_bytes = (4 + 2 * mean_bytes) / optimizer.ema_interval if mean_bytes else 0
    if run.sizes.has_one_pass_update:
        return zero_bytes, 34 - saved_bytes + scale_bytes + averaging_bytes
    return zero_bytes + (8 if training.calculate_per_token_loss else 0), 46 - saved_bytes + averaging_bytes


# ----------------------------------------------------------------------------------------------------------------------

MODEL_GEMM_PARTS = ("linears", "attention", "output layer")
"""Parts of a step that compute the model's own GEMMs."""
WAITING_PARTS = ("tensor parallel", "context parallel", "expert parallel", "host")


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on the slowest stage, by part.

    Attributes:
        peak_flops: FLOP/s of one GPU for the dtype of the linears.
    """

    parts: dict[str, float]
    tokens: int
    num_gpus: int
    flops_per_token: float
    peak_flops: float

    @property
    def seconds(self) -> float:
        """The whole step."""
        return sum(self.parts.values())

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.tokens / self.seconds / self.num_gpus

    @property
    def mfu_fraction(self) -> float:
        """Model FLOP/s over the peak of the linears' dtype, as in a run's records."""
        return self.tokens_per_s_per_gpu * self.flops_per_token / self.peak_flops

    @property
    def limit(self) -> str:
        """The longest part of the step apart from the model's GEMMs."""
        others = {name: seconds for name, seconds in self.parts.items() if name not in MODEL_GEMM_PARTS}
        return max(others, key=others.__getitem__)


LayerTimes = dict[str, dict[str, tuple[float, float]]]
"""Forward and backward seconds of one layer, by recipe and part."""


@dataclass
class StageTime:
    """Seconds of one microbatch on one pipeline stage, by part and in total."""

    parts: dict[str, float] = field(default_factory=dict)
    forward: float = 0.0
    backward: float = 0.0

    def add(self, name: str, forward: float, backward: float = 0.0) -> None:
        """Add seconds to a part."""
        self.parts[name] = self.parts.get(name, 0.0) + forward + backward
        self.forward += forward
        self.backward += backward

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward


def step_time_problem(config: RunConfig) -> Optional[str]:
    """Why the model does not hold for a configuration; None if it does."""
    precision = config.precision
    if mixture.is_mixture(config.model) and precision.precision_map:
        return "--precision with experts"
    if derived.params_dtype(precision) == "fp32":
        return "weights in FP32"
    return "--fp8-schedule changes the precision" if precision.fp8_schedule is not None else None


def step_time(run: PlannedRun) -> StepTime:
    """Predict the time of an optimizer step."""
    counts = stages.kinds_of_stages(run.config)
    sizes = {stage: layers_of_stage(run, stage) for stage in counts}
    layers = {size: layer_times(run, *size) for size in set(sizes.values())}
    times = {stage: stage_time(run, stage, layers[sizes[stage]]) for stage in counts}
    slowest = max(times, key=lambda stage: times[stage].seconds)
    num_microbatches = run.sizes.num_microbatches
    parts = {name: num_microbatches * seconds for name, seconds in times[slowest].parts.items()}
    all_stages_s = sum(count * times[stage].seconds for stage, count in counts.items())
    parts |= pipeline_parts(run, all_stages_s - times[slowest].seconds, num_microbatches)
    parts["data parallel"] = exposed_data_parallel_s(run, times[slowest], slowest)
    parts["optimizer"] = optimizer_s(run, slowest)
    parts["casts"] += weight_casts_s(run, slowest)
    return StepTime(
        parts={name: seconds for name, seconds in parts.items() if seconds > 0},
        tokens=iterations.tokens_per_step(run.config, run.world_size),
        num_gpus=run.world_size,
        flops_per_token=model_shapes.flops_per_token(run.config.model, run.padded_vocab, run.attended_tokens),
        peak_flops=run.gpu.peak.flops[peak_dtype(run.recipe)],
    )


def peak_dtype(recipe: str) -> str:
    """The dtype whose peak FLOP/s is the denominator of MFU."""
    return BF16 if recipe == BF16 else registry.get(recipe).family


# ---- one microbatch -----------------------------------------------------------------------------------------------


def stage_time(run: PlannedRun, stage: int, layers: Optional[LayerTimes] = None) -> StageTime:
    """One microbatch, forward and backward, on a pipeline stage.

    Args:
        layers: the result of `layer_times`, which is the same for all stages with as many layers of each kind.
    """
    result = StageTime()
    counts = [layer_counts(run, stage, gemms) for gemms in (FORWARD_GEMMS, BACKWARD_GEMMS)]
    for recipe, parts in (layers or layer_times(run, *layers_of_stage(run, stage))).items():
        num_forward, num_backward = (count.get(recipe, 0.0) for count in counts)
        for name, (forward, backward) in parts.items() if num_forward or num_backward else ():
            result.add(name, num_forward * forward, num_backward * backward)
    if stage == 0:
        add_embedding(run, result)
    if stage == run.pipeline - 1:
        add_output_layer(run, result)
        add_multi_token(run, result)
    busy_s = sum(seconds for name, seconds in result.parts.items() if name not in WAITING_PARTS)
    gaps_s = exposed_s(busy_s / run.calibration.busy_fraction - busy_s, result.parts.get("host", 0.0))
    forward_fraction = result.forward / result.seconds if result.seconds else 0.0
    result.add("gaps between kernels", gaps_s * forward_fraction, gaps_s * (1 - forward_fraction))
    return result


def layer_counts(run: PlannedRun, stage: int, gemms: tuple[str, ...]) -> dict[str, float]:
    """Number of layers of a stage per recipe, with those of multi-token prediction."""
    num_layers = len(run.sizes.layers[stage])
    if run.config.precision.precision_map:
        counts = layers_by_recipe(run.sizes, stage, gemms)
    elif run.recipe == BF16:
        counts = {BF16: float(num_layers)}
    else:
        num_quantized = num_layers * quantized_fraction(run.sizes, stage)
        counts = {BF16: num_layers - num_quantized, run.recipe: num_quantized}
    recipe = multi_token_recipe(run)
    return counts | {recipe: counts.get(recipe, 0.0) + run.sizes.depths_on(stage)}


def multi_token_recipe(run: PlannedRun) -> str:
    """The recipe of the linears of multi-token prediction."""
    return precision_map.multi_token_choice(run.config.precision).fprop.recipe or BF16


def layers_of_stage(run: PlannedRun, stage: int) -> tuple[int, int]:
    """Layers of a stage, and those of them with experts, both with those of multi-token prediction."""
    return run.sizes.num_layers_on(stage), expert_layers_on_stage(run.sizes, stage)


def layer_times(run: PlannedRun, num_layers: int, num_expert_layers: int = 0) -> LayerTimes:
    """Mean times of the layers of a stage under each recipe that the model has.

    Args:
        num_layers, num_expert_layers: of the stage, all and those with experts.
    """
    precision = run.config.precision
    recipes = {run.recipe, *precision_map.used_recipes(precision)}
    if precision.first_last_layers_bf16 or precision.precision_map:
        recipes.add(BF16)
    if multi_token.num_depths(run.config.model):
        recipes.add(multi_token_recipe(run))
    fraction = num_expert_layers / num_layers if num_layers else 0.0

    def mean(recipe: str) -> dict[str, tuple[float, float]]:
        dense = layer_time(run, recipe, num_layers) if fraction < 1 else {}
        routed = layer_time(run, recipe, num_layers, has_experts=True) if fraction > 0 else {}
        pairs = {name: (dense.get(name, (0.0, 0.0)), routed.get(name, (0.0, 0.0))) for name in {**dense, **routed}}
        return {
            name: ((1 - fraction) * one[0] + fraction * two[0], (1 - fraction) * one[1] + fraction * two[1])
            for name, (one, two) in pairs.items()
        }

    return {recipe: mean(recipe) for recipe in recipes}


def layer_time(
    run: PlannedRun, recipe: str, num_layers: int, has_experts: bool = False
) -> dict[str, tuple[float, float]]:
    """Forward and backward seconds of one layer, by part."""
    forward, backward = (each(run, recipe, has_experts) for each in (compute.forward_time, compute.backward_time))
    traffic = communication.tensor_parallel_traffic(run, recipe, has_experts)
    ring_forward_s, ring_backward_s, _ = communication.context_parallel_traffic(run)
    is_ring = dimensions.cp_exchange(run.config) == "p2p"
    experts = experts_time(run, recipe) if has_experts else None
    if experts is not None:
        forward, backward = forward.plus(experts.forward), backward.plus(experts.backward)
    recompute_s = compute.recompute_s(run, forward, num_layers, experts.forward.total if experts else None)
    exchange_s = experts.exchange if experts is not None else 0.0
    repeats = recompute_s / forward.total if recomputes_exchange(run) else 0.0
    parts = {
        "linears": (forward.gemms, backward.gemms),
        "attention": (forward.attention, backward.attention),
        "norms, activation, rotary": (forward.memory_bound, backward.memory_bound),
        "casts": (forward.casts, backward.casts),
        "recompute": (0.0, recompute_s),
        "expert parallel": (exchange_s, exchange_s * (1 + min(1.0, repeats))),
        "tensor parallel": (
            traffic.forward_s,
            traffic.backward_s
            + exposed_s(traffic.during_dgrad_s, backward.dgrad)
            + exposed_s(traffic.during_wgrad_s, backward.wgrad)
            + traffic.forward_s * recompute_s / forward.total,
        ),
        "context parallel": (
            exposed_s(ring_forward_s, forward.attention * is_ring),
            exposed_s(ring_backward_s, backward.attention * is_ring),
        ),
    }  # fmt: skip
    gpu_s = sum(map(sum, parts.values()))
    host_s = 0.0
    if not derived.uses_cuda_graph(run.config):
        launch_s = run.calibration.bf16_host_layer_s if recipe == BF16 else run.calibration.fp8_host_layer_s
        launch_s += experts.host if experts is not None else 0.0
        host_s = exposed_s(launch_s * (1 + recompute_s / (forward.total + backward.total)), gpu_s)
    return parts | {"host": (host_s / 3, host_s * 2 / 3)}


def recomputes_exchange(run: PlannedRun) -> bool:
    """Whether recomputation exchanges the tokens of experts again."""
    training = run.config.training
    return derived.recompute_granularity(training) == "full" or "moe" in derived.recompute_modules(training)


def add_embedding(run: PlannedRun, stage: StageTime) -> None:
    """Add the embedding lookup, its gradient, and the all-reduce over vocabulary shards."""
    num_elements = run.sizes.tokens * run.sizes.hidden_size
    reduce_s = communication.ring_collective_s(run, communication.tensor_group(run), compute.BF16_BYTES * num_elements)
    stage.add("norms, activation, rotary", *2 * (run.memory_s(2 * compute.BF16_BYTES * num_elements),))
    stage.add("tensor parallel", reduce_s, reduce_s)


def add_output_layer(run: PlannedRun, stage: StageTime) -> None:
    """Add the output layer and the loss. The final norm is not counted."""
    forward_s, backward_s, loss_s = compute.output_layer_s(run)
    stage.add("output layer", forward_s, backward_s)
    stage.add("casts", *compute.output_layer_casts_s(run))
    stage.add("loss", loss_s / 2, loss_s / 2)
    # The input is gathered in the forward pass, as codes if it is quantized. In the backward pass this gather overlaps
    # with dgrad, and the reduction with wgrad.
    group, num_elements = communication.tensor_group(run), run.sizes.tokens * run.sizes.hidden_size
    input_bytes = compute.bytes_per_element(output_layer_recipes(run.config.model, run.config.precision)["fprop"])
    gather_s, reduce_s = (
        communication.ring_collective_s(run, group, each * num_elements) for each in (input_bytes, compute.BF16_BYTES)
    )
    stage.add("tensor parallel", gather_s, exposed_s(gather_s, backward_s / 2) + exposed_s(reduce_s, backward_s / 2))


def add_multi_token(run: PlannedRun, stage: StageTime) -> None:
    """Add what the modules of multi-token prediction have besides a layer: projection, embedding and output layer."""
    recipe, tokens, hidden = multi_token_recipe(run), run.sizes.tokens, run.sizes.hidden_size
    outputs = hidden // run.sizes.tensor
    for _ in range(multi_token.num_depths(run.config.model)):
        add_embedding(run, stage)
        add_output_layer(run, stage)
        forward_s = compute.gemm_s(run, recipe, tokens, outputs, 2 * hidden)
        dgrad_s = compute.gemm_s(run, recipe, tokens, 2 * hidden, outputs)
        wgrad_s = compute.gemm_s(run, recipe, outputs, 2 * hidden, tokens)
        stage.add("linears", forward_s, dgrad_s + wgrad_s)
        num_elements = run.sizes.tokens * hidden
        stage.add(
            "casts", compute.cast_s(run, recipe, 2 * num_elements, 1), compute.cast_s(run, recipe, num_elements, 1)
        )


def exposed_s(seconds: float, overlapped_s: float) -> float:
    """The part of `seconds` that exceeds the work it overlaps with."""
    return max(0.0, seconds - overlapped_s)


# ---- once per step ------------------------------------------------------------------------------------------------


def pipeline_parts(run: PlannedRun, waiting_s: float, num_microbatches: int) -> dict[str, float]:
    """The pipeline bubble and exposed sends.

    Args:
        waiting_s: seconds of one microbatch on all stages but the slowest.
    """
    if run.pipeline == 1:
        return {}
    send_s = communication.send_s(run, communication.pipeline_group(run), communication.pipeline_send_bytes(run))
    is_overlapped = run.chunks > 1 and run.config.parallel.overlap_p2p_comm
    # One send in each direction per microbatch and chunk. Overlapped ones are exposed in warmup and cooldown.
    num_sends = 2 * (run.pipeline - 1) + (0 if is_overlapped else 2 * num_microbatches * run.chunks)
    return {"bubble": waiting_s / run.chunks, "pipeline sends": num_sends * send_s}


def exposed_data_parallel_s(run: PlannedRun, time: StageTime, stage: int) -> float:
    """Gradient reductions and parameter gathers that do not overlap with computation. One bucket never does."""
    traffic, parallel = communication.data_parallel_traffic(run, stage), run.config.parallel
    reduce_s, gather_s = traffic.reduce_s, traffic.gather_s
    if parallel.shards_weights:
        step_s = time.seconds * run.sizes.num_microbatches
        total_s = reduce_s + gather_s
        return max(total_s / traffic.num_buckets, exposed_s(total_s, step_s))
    if parallel.overlap_grad_reduce:
        reduce_s = max(reduce_s / traffic.num_buckets, exposed_s(reduce_s, time.backward))
    if parallel.overlap_param_gather:
        gather_s = max(gather_s / traffic.num_buckets, exposed_s(gather_s, time.forward))
    return reduce_s + gather_s


def weight_casts_s(run: PlannedRun, stage: int) -> float:
    """Seconds of quantizing the linears' weights, once per step."""
    quantizable, _ = parameters_on_stage(run.sizes, stage)
    num_elements = float(quantizable)
    if run.config.precision.fp8_param_gather:
        # FP8 parameters only need the transposed codes: the optimizer writes the codes.
        in_bf16 = expert_parameters_on_stage(run.sizes, stage) if keeps_experts_in_bf16(run.config.parallel) else 0
        num_elements = (num_elements + in_bf16) / 2
    num_elements /= max(1, run.sizes.num_layers_on(stage))
    counts = layer_counts(run, stage, FORWARD_GEMMS)
    num_layers, num_expert_layers = layers_of_stage(run, stage)
    num_tensors = float(len(run.sizes.linears))
    if num_expert_layers:
        num_experts = 1 if is_one_launch(run.config) else mixture.experts_per_rank(run.config)
        num_tensors += 2 * num_experts * num_expert_layers / num_layers
    layers_s = sum(
        compute.cast_s(run, recipe, num_elements * count, num_tensors * count) for recipe, count in counts.items()
    )
    if stage < run.pipeline - 1:
        return layers_s
    output_size = run.padded_vocab // run.sizes.tensor * run.sizes.hidden_size
    recipe = output_layer_recipes(run.config.model, run.config.precision)["fprop"]
    return layers_s + compute.cast_s(run, recipe, output_size, 1)


def bytes_by_group(run: PlannedRun) -> dict[str, float]:
    """Bytes that a rank of the first pipeline stage sends in one step, by process group."""
    num_microbatches = run.sizes.num_microbatches
    num_layer_passes = run.sizes.num_layers_on(0) * num_microbatches
    num_layers, num_expert_layers = layers_of_stage(run, 0)
    traffic = [
        count * num_microbatches * communication.tensor_parallel_traffic(run, run.recipe, has_experts).bytes
        for count, has_experts in ((num_layers - num_expert_layers, False), (num_expert_layers, True)) if count
    ]  # fmt: skip
    # The first layers are often dense, so the stage with the most experts counts.
    most_expert_layers = max(expert_layers_on_stage(run.sizes, stage) for stage in run.sizes.stage_kinds)
    _, _, ring_bytes = communication.context_parallel_traffic(run)
    data = communication.data_parallel_traffic(run, 0)
    sent = {
        "tensor parallel": sum(traffic),
        "expert parallel": float(most_expert_layers * num_microbatches * exchanged_bytes(run.config))
        if most_expert_layers
        else 0.0,
        "context parallel": num_layer_passes * ring_bytes,
        "pipeline": 2 * num_microbatches * run.chunks * communication.pipeline_send_bytes(run)
        if run.pipeline > 1
        else 0.0,
        "data parallel, gradients": data.reduce_bytes,
        "data parallel, parameters": data.gather_bytes,
    }
    return {name: value for name, value in sent.items() if value}
