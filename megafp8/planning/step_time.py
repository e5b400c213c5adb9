"""How long an optimizer step takes: what the slowest pipeline stage does, one after the other, part by part.

    step = microbatches x slowest stage + bubble + reductions and gathers that are not hidden + optimizer

A stage's microbatch is its layers forward and backward, what is computed again, the communication that its linears and
its attention wait for, and embedding or output layer at the ends. Where the host takes longer to start a layer's
kernels than the GPU to run them, the layer takes the host's time, except where steps run as CUDA graphs.

The bubble is the time in which the slowest stage waits for the others: the sum of their microbatches, divided by the
chunks of the interleaved schedule (Narayanan et al. 2021, section 2.2).

Overlap: gathers and reductions of tensor parallelism beside dgrad and wgrad, the ring of context parallelism beside
attention, reductions of gradients beside the last microbatch's backward pass and gathers of parameters beside the
first one's forward pass (with the flags for it; the last bucket is seen), pipeline sends in the interleaved schedule.
Only what takes longer than what it runs beside is counted. Communication does not slow computation down, and all GPUs
are equally fast: both are assumptions that flatter large clusters.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

from megafp8.config import derived, model_shapes, precision_map
from megafp8.planning import communication, compute
from megafp8.planning.memory import parameters_on_stage, quantized_fraction
from megafp8.planning.planned_run import BACKWARD, FORWARD, HIGH, PlannedRun, layer_shares, output_recipes
from megafp8.recipes import registry

MATHEMATICS = ("linears", "attention", "output layer")
WAITS = ("tensor parallel", "context parallel", "host")
SCALED_MOMENTS = ("fp16", "fp8")


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on the slowest stage, by part; their sum is the step."""

    parts: dict[str, float]
    tokens: int
    num_gpus: int
    flops_per_token: float
    peak_flops: float
    """Of one GPU, for the dtype of the linears."""

    @property
    def seconds(self) -> float:
        """The whole step."""
        return sum(self.parts.values())

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Speed."""
        return self.tokens / self.seconds / self.num_gpus

    @property
    def mfu_fraction(self) -> float:
        """Model FLOP/s over the peak of the linears' dtype, as the records of a run have it."""
        return self.tokens_per_s_per_gpu * self.flops_per_token / self.peak_flops

    @property
    def limit(self) -> str:
        """What takes most of the step beside the model's own products."""
        others = {name: seconds for name, seconds in self.parts.items() if name not in MATHEMATICS}
        return max(others, key=others.__getitem__)


Layers = dict[str, dict[str, tuple[float, float]]]
"""By recipe and part: seconds of one layer, forward and backward."""


@dataclass
class StageTime:
    """Seconds of one microbatch on one pipeline stage, by part, and how much of it can hide communication."""

    parts: dict[str, float] = field(default_factory=dict)
    forward: float = 0.0
    backward: float = 0.0

    def add(self, name: str, forward: float, backward: float = 0.0) -> None:
        """Add to a part."""
        self.parts[name] = self.parts.get(name, 0.0) + forward + backward
        self.forward += forward
        self.backward += backward

    @property
    def seconds(self) -> float:
        """The microbatch."""
        return self.forward + self.backward


def step_time(run: PlannedRun) -> StepTime:
    """Predict a step."""
    layers = all_layers(run)
    stages = [stage_time(run, stage, layers) for stage in sorted({0, min(1, run.pipeline - 1), run.pipeline - 1})]
    slowest = max(range(len(stages)), key=lambda index: stages[index].seconds)
    stage, number = stages[slowest], [0, 1, run.pipeline - 1][slowest] if run.pipeline > 2 else slowest
    microbatches = derived.num_microbatches(run.config, run.world_size)
    parts = {name: microbatches * seconds for name, seconds in stage.parts.items()}
    parts |= pipeline_parts(run, stages, stage.seconds, microbatches)
    parts["data parallel"] = exposed_data_s(run, stage, number)
    parts["optimizer"] = optimizer_s(run, number)
    parts["casts"] += weight_casts_s(run, number)
    assert run.config.data.seq_length is not None
    return StepTime(
        parts={name: seconds for name, seconds in parts.items() if seconds > 0},
        tokens=derived.tokens_per_step(run.config, run.world_size),
        num_gpus=run.world_size,
        flops_per_token=model_shapes.flops_per_token(run.config.model, run.padded_vocab, run.config.data.seq_length),
        peak_flops=run.gpu.peak.flops[peak_dtype(run.recipe)],
    )


def peak_dtype(recipe: str) -> str:
    """Of which dtype's peak the model's FLOP/s are a part."""
    return HIGH if recipe == HIGH else registry.get(recipe).family


# ---- one microbatch -----------------------------------------------------------------------------------------------


def stage_time(run: PlannedRun, stage: int, layers_of: Optional[Layers] = None) -> StageTime:
    """One microbatch, forward and backward, on a stage.

    Args:
        layers_of: what `all_layers` gives, where it is known already: it is the same for all stages.
    """
    result, layers_of = StageTime(), layers_of or all_layers(run)
    counts = [layer_counts(run, stage, products) for products in (FORWARD, BACKWARD)]
    for recipe, parts in layers_of.items():
        in_forward, in_backward = (count.get(recipe, 0.0) for count in counts)
        for name, (forward, backward) in parts.items() if in_forward or in_backward else ():
            result.add(name, in_forward * forward, in_backward * backward)
    if stage == 0:
        add_embedding(run, result)
    if stage == run.pipeline - 1:
        add_output_layer(run, result)
    busy_s = sum(seconds for name, seconds in result.parts.items() if name not in WAITS)
    gaps_s = over(busy_s / run.calibration.busy_fraction - busy_s, result.parts.get("host", 0.0))
    share = result.forward / result.seconds
    result.add("gaps between kernels", gaps_s * share, gaps_s * (1 - share))
    return result


def layer_counts(run: PlannedRun, stage: int, products: tuple[str, ...]) -> dict[str, float]:
    """Layers of a stage by recipe."""
    if run.config.precision.precision_map:
        return layer_shares(run.config, stage, products)
    layers = derived.layers_per_pipeline_rank(run.config)
    if run.recipe == "bf16":
        return {"bf16": layers}
    quantized = layers * quantized_fraction(run.config, stage)
    return {"bf16": layers - quantized, run.recipe: quantized}


def all_layers(run: PlannedRun) -> Layers:
    """One layer under each precision that the model has."""
    precision = run.config.precision
    recipes = {run.recipe, *precision_map.used_recipes(precision)}
    if precision.first_last_layers_bf16 or precision.precision_map:
        recipes.add("bf16")
    return {recipe: layer_time(run, recipe) for recipe in recipes}


def layer_time(run: PlannedRun, recipe: str) -> dict[str, tuple[float, float]]:
    """Seconds of one layer by part, (forward, backward)."""
    forward, backward = compute.forward_pass(run, recipe), compute.backward_pass(run, recipe)
    traffic = communication.tensor_traffic(run, recipe)
    ring_forward, ring_backward, _ = communication.context_traffic(run)
    hides_ring = run.config.parallel.cp_comm_type == "p2p"
    again = compute.recomputed(run, forward)
    parts = {
        "linears": (forward.gemms, backward.gemms),
        "attention": (forward.attention, backward.attention),
        "norms, activation, rotary": (forward.passes, backward.passes),
        "casts": (forward.casts, backward.casts),
        "recompute": (0.0, again),
        "tensor parallel": (
            traffic.forward_s,
            traffic.backward_s
            + over(traffic.beside_dgrad_s, backward.dgrad)
            + over(traffic.beside_wgrad_s, backward.wgrad)
            + traffic.forward_s * again / forward.total,
        ),
        "context parallel": (
            over(ring_forward, forward.attention * hides_ring), over(ring_backward, backward.attention * hides_ring)
        ),
    }  # fmt: skip
    gpu_s = sum(map(sum, parts.values()))
    waits = over(host_layer_s(run, recipe) * (1 + again / (forward.total + backward.total)), gpu_s)
    return parts | {"host": (waits / 3, waits * 2 / 3)}


def host_layer_s(run: PlannedRun, recipe: str) -> float:
    """Seconds that the host takes to start a layer's kernels, forward and backward; none in a graph."""
    if derived.has_step_graph(run.config):
        return 0.0
    return run.calibration.bf16_host_layer_s if recipe == "bf16" else run.calibration.fp8_host_layer_s


def add_embedding(run: PlannedRun, stage: StageTime) -> None:
    """Lookup and its gradient, with the sum over the parts of the vocabulary."""
    numbers = run.tokens * run.hidden_size
    summed_s = communication.ring_s(run, communication.tensor_group(run), compute.BF16_BYTES * numbers)
    stage.add("norms, activation, rotary", *2 * (run.memory_s(2 * compute.BF16_BYTES * numbers),))
    stage.add("tensor parallel", summed_s, summed_s)


def add_output_layer(run: PlannedRun, stage: StageTime) -> None:
    """Final norm is not counted; logits, loss, their gradients."""
    forward_s, backward_s, loss_s = compute.logits_s(run)
    stage.add("output layer", forward_s, backward_s)
    stage.add("casts", *compute.output_casts_s(run))
    stage.add("loss", loss_s / 2, loss_s / 2)
    # Its input is gathered forward, as codes where it is quantized; backward that gather runs beside dgrad, and the
    # reduction beside wgrad.
    group, numbers = communication.tensor_group(run), run.tokens * run.hidden_size
    code_bytes = compute.code_bytes(output_recipes(run.config)["fprop"])
    gather_s, reduce_s = (communication.ring_s(run, group, each * numbers) for each in (code_bytes, compute.BF16_BYTES))
    seen_s = over(gather_s, backward_s / 2) + over(reduce_s, backward_s / 2)
    stage.add("tensor parallel", gather_s, seen_s)


def over(seconds: float, beside_s: float) -> float:
    """What is left to see of something that runs beside something else."""
    return max(0.0, seconds - beside_s)


# ---- once a step --------------------------------------------------------------------------------------------------


def pipeline_parts(run: PlannedRun, stages: list[StageTime], slowest_s: float, microbatches: int) -> dict[str, float]:
    """Bubble, and sends that nothing hides.

    Args:
        stages: the first, one of the inner ones, the last.
    """
    if run.pipeline == 1:
        return {}
    inner = stages[1].seconds if run.pipeline > 2 else 0.0
    others_s = stages[0].seconds + stages[-1].seconds + (run.pipeline - 2) * inner - slowest_s
    send_s = communication.send_s(run, communication.pipeline_group(run), communication.boundary_bytes(run))
    is_hidden = run.chunks > 1 and run.config.parallel.overlap_p2p_comm
    # One each way for a microbatch and chunk; hidden ones are seen while the pipeline fills and drains.
    sends = 2 * (run.pipeline - 1) + (0 if is_hidden else 2 * microbatches * run.chunks)
    return {"bubble": others_s / run.chunks, "pipeline sends": sends * send_s}


def exposed_data_s(run: PlannedRun, stage: StageTime, number: int) -> float:
    """Reductions of gradients and gathers of parameters that no computation hides."""
    traffic, parallel = communication.data_traffic(run, number), run.config.parallel
    last_s, first_s = traffic.reduce_s / traffic.num_buckets, traffic.gather_s / traffic.num_buckets
    reduce_s, gather_s = traffic.reduce_s, traffic.gather_s
    if parallel.overlap_grad_reduce:
        reduce_s = max(last_s, over(reduce_s, stage.backward))
    if parallel.overlap_param_gather:
        gather_s = max(first_s, over(gather_s, stage.forward))
    return reduce_s + gather_s


def optimizer_s(run: PlannedRun, number: int) -> float:
    """Passes over gradients, master weights and moments."""
    parameters = sum(parameters_on_stage(run.config, run.padded_vocab, number))
    shards = communication.data_group(run).size if run.config.parallel.use_distributed_optimizer else 1
    whole, shard = passes_over_parameters(run)
    moved_bytes = whole * parameters + shard * parameters / shards
    return moved_bytes / (run.gpu.hbm_bytes_per_s * run.calibration.optimizer_fraction)


def weight_casts_s(run: PlannedRun, number: int) -> float:
    """Casts of the linears' weights, kept over the microbatches of a step."""
    quantizable, _ = parameters_on_stage(run.config, run.padded_vocab, number)
    # Of FP8 weights the transposed codes only: the codes are made of the optimizer's shard.
    numbers = quantizable / (2 if run.config.precision.fp8_param_gather else 1)
    numbers /= derived.layers_per_pipeline_rank(run.config)
    counts = layer_counts(run, number, FORWARD)
    tensors = len(model_shapes.gemm_dimensions(run.config))
    layers_s = sum(compute.cast_s(run, recipe, numbers * count, tensors * count) for recipe, count in counts.items())
    if number < run.pipeline - 1:
        return layers_s
    matrix = run.padded_vocab // run.tensor * run.hidden_size
    return layers_s + compute.cast_s(run, output_recipes(run.config)["fprop"], matrix, 1)


def passes_over_parameters(run: PlannedRun) -> tuple[int, int]:
    """Bytes a parameter moved (over all of a rank's, over its shard).

    In one kernel: norm 4, read gradient, master weight and moments 16, write them 12, and the BF16 weight 2. In
    megatron-core's passes: norm 4, clip 8, Adam 28, copy to BF16 6, and division by the tokens 8 of the whole buffer.
    Buffers are set to zero (4) where gradients are added to them. For the scales of moments in FP16 and FP8 the kernel
    reads those and the gradient (4) once more.
    """
    optimizer, training, precision = run.config.optimizer, run.config.training, run.config.precision
    state = {"fp32": 8, "fp16": 4, "bf16": 4, "fp8": 2}
    moments = (optimizer.exp_avg_dtype, optimizer.exp_avg_sq_dtype)
    scaled = [state[dtype] // 2 for dtype in moments if dtype in SCALED_MOMENTS]
    for_scales = 4 + sum(scaled) if scaled else 0
    lean = 0
    if optimizer.use_precision_aware_optimizer:  # moments read and written, master weights as 16 bits beside BF16
        lean = 8 - state[optimizer.exp_avg_dtype] + 8 - state[optimizer.exp_avg_sq_dtype] + 4
    overwrites = precision.gradient_overwrite and run.pipeline == 1
    zeros = 0 if overwrites else 4
    if derived.fused_adam_obstacle(run.config) is None:
        return zeros, 34 - lean + for_scales
    return zeros + (8 if training.calculate_per_token_loss else 0), 46 - lean


def bytes_by_group(run: PlannedRun) -> dict[str, float]:
    """Bytes that a rank of the busiest stage sends in one step, by process group."""
    layers = derived.layers_per_pipeline_rank(run.config)
    microbatches = derived.num_microbatches(run.config, run.world_size)
    traffic = communication.tensor_traffic(run, run.recipe)
    _, _, ring_bytes = communication.context_traffic(run)
    data = communication.data_traffic(run, 0)
    found = {
        "tensor parallel": layers * microbatches * traffic.bytes,
        "context parallel": layers * microbatches * ring_bytes,
        "pipeline": 2 * microbatches * run.chunks * communication.boundary_bytes(run) if run.pipeline > 1 else 0.0,
        "data parallel, gradients": data.reduce_bytes,
        "data parallel, parameters": data.gather_bytes,
    }
    return {name: value for name, value in found.items() if value}
