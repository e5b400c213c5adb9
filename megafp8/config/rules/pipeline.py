"""Rules about pipeline stages: their layers, the interleaved schedule, and the communication between them."""

from __future__ import annotations

from collections.abc import Iterator

from megafp8.config import iterations, stages, topology
from megafp8.config.rules.base import Rule, all_positive, flags_without_effect, microbatches, no_effect_without
from megafp8.config.schema import ParallelConfig, RunConfig
from megafp8.errors import ConfigError
from megafp8.utils.integers import fitting_size, round_up

SPLIT_FLAGS = "--account-for-embedding-in-pipeline-split and --account-for-loss-in-pipeline-split"
UNEVEN_FLAGS = (
    "--decoder-first-pipeline-num-layers",
    "--decoder-last-pipeline-num-layers",
    "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
    "--pipeline-model-parallel-layout",
)
END_FLAGS = "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers"


def end_stages(parallel: ParallelConfig) -> dict[str, int]:
    """The given layers of the first and the last stage, by flag."""
    given = {
        "--decoder-first-pipeline-num-layers": parallel.decoder_first_pipeline_num_layers,
        "--decoder-last-pipeline-num-layers": parallel.decoder_last_pipeline_num_layers,
    }
    return {flag: count for flag, count in given.items() if count is not None}


def stages_are_split_in_one_way(config: RunConfig, world_size: int) -> Iterator[str]:
    """The sizes of the stages come from one of three kinds of flags, and need more than one stage."""
    parallel = config.parallel
    if parallel.pipeline_model_parallel_size == 1:
        yield from flags_without_effect(config, UNEVEN_FLAGS, "--pipeline-model-parallel-size of at least 2")
        return
    ways = {
        END_FLAGS: bool(end_stages(parallel)),
        SPLIT_FLAGS: parallel.account_for_embedding_in_pipeline_split or parallel.account_for_loss_in_pipeline_split,
        "--pipeline-model-parallel-layout": parallel.pipeline_model_parallel_layout is not None,
    }
    chosen = [flags for flags, is_given in ways.items() if is_given]
    if len(chosen) > 1:
        yield f"the layers of the pipeline stages are given by {'; and by '.join(chosen)}: keep one of these"


def stages_divide_the_layers(config: RunConfig, world_size: int) -> Iterator[str]:
    """Stages whose number of layers is not given have equal numbers of them."""
    layers, parallel = config.model.num_layers, config.parallel
    pp, ends = parallel.pipeline_model_parallel_size, end_stages(parallel)
    if not all_positive(layers, pp, *ends.values()) or layers is None or parallel.pipeline_model_parallel_layout:
        return
    if pp > 1 and ends:
        yield from _middle_problems(layers, pp, ends)
        return
    total = stages.split_layers(layers, parallel) if pp > 1 else layers
    if total % pp:
        counted = f"--num-layers {layers}" + (f" with {total - layers} for embedding or loss" if total > layers else "")
        yield (
            f"{counted} is not divisible by --pipeline-model-parallel-size {pp} ({total} / {pp} = {total / pp:.4g}): "
            f"use --pipeline-model-parallel-size {fitting_size(pp, total)}, or uneven stages "
            "(--decoder-first-pipeline-num-layers, --pipeline-model-parallel-layout), or another model with "
            f"{round_up(total, pp) - total + layers} layers"
        )


def _middle_problems(layers: int, pp: int, ends: dict[str, int]) -> Iterator[str]:
    """Problems of the stages other than those whose layers are given."""
    left, num_others = layers - sum(ends.values()), pp - len(ends)
    given = " and ".join(f"{flag} {count}" for flag, count in ends.items())
    if num_others == 0 and left:
        yield f"{given} have {layers - left} layers together, not --num-layers {layers}: leave one of them out"
    elif num_others and (left < num_others or left % num_others):
        yield (
            f"{given} leave {left} of --num-layers {layers} for {num_others} other pipeline stages, which need equal "
            f"numbers of at least one ({left} / {num_others} = {left / num_others:.4g}): change one of them"
        )


def layout_string_has_every_layer(config: RunConfig, world_size: int) -> Iterator[str]:
    """A layout string starts with the embedding, ends with the loss, and has every layer once."""
    text, layers = config.parallel.pipeline_model_parallel_layout, config.model.num_layers
    pp = config.parallel.pipeline_model_parallel_size
    if text is None or not all_positive(layers, pp):
        return
    flag = f"--pipeline-model-parallel-layout {text}"
    try:
        contents = stages.expand_layout(text)
    except ConfigError as error:
        yield str(error.problems[0])
        return
    whole = "".join(contents)
    if unknown := sorted(set(whole) - {stages.EMBEDDING, stages.LAYER, stages.MULTI_TOKEN, stages.OUTPUT}):
        yield f"{flag}: E, t, m and L are known, not {' '.join(unknown)}; stages are separated by |"
        return
    if len(contents) % pp:
        yield (
            f"{flag} has {len(contents)} stages, not a multiple of --pipeline-model-parallel-size {pp}: separate "
            f"{round_up(len(contents), pp)} stages by |"
        )
    if whole.count(stages.EMBEDDING) != 1 or whole[0] != stages.EMBEDDING:
        yield f"{flag}: E, the embedding, must be there once, at the beginning"
    if whole.count(stages.OUTPUT) != 1 or whole[-1] != stages.OUTPUT:
        yield f"{flag}: L, output layer and loss, must be there once, at the end"
    if whole.count(stages.LAYER) != layers:
        yield f"{flag} has {whole.count(stages.LAYER)} layers (t), not --num-layers {layers}: give as many as there are"


def one_spelling_of_virtual_stages(config: RunConfig, world_size: int) -> Iterator[str]:
    """The interleaved schedule is given by layers per chunk, by chunks per rank, or by a layout string."""
    parallel = config.parallel
    per_stage, chunks = parallel.num_layers_per_virtual_pipeline_stage, parallel.num_virtual_stages_per_pipeline_rank
    if per_stage is not None and chunks is not None:
        yield (
            f"--num-layers-per-virtual-pipeline-stage {per_stage} and --num-virtual-stages-per-pipeline-rank {chunks} "
            "are two ways to set the same value: keep one"
        )
    if parallel.pipeline_model_parallel_layout is not None and (per_stage is not None or chunks is not None):
        yield (
            "--pipeline-model-parallel-layout has the virtual stages already: remove "
            "--num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank"
        )
    if per_stage is not None and end_stages(parallel):
        yield (
            f"--num-layers-per-virtual-pipeline-stage {per_stage} with {' and '.join(end_stages(parallel))}: stages of "
            "different sizes have no common number of layers per chunk; use --num-virtual-stages-per-pipeline-rank"
        )


def virtual_stages_divide_the_layers(config: RunConfig, world_size: int) -> Iterator[str]:
    """The chunks of a stage have equal numbers of layers, unless a layout string gives them."""
    layers, parallel = config.model.num_layers, config.parallel
    pp, ends = parallel.pipeline_model_parallel_size, end_stages(parallel)
    if layers is None or parallel.pipeline_model_parallel_layout is not None or not all_positive(layers, pp):
        return
    if any(stages_divide_the_layers(config, world_size)) or not all_positive(*ends.values()):
        return
    total = stages.split_layers(layers, parallel)
    sizes = [total // pp]
    if ends and pp > 1:
        num_others = pp - len(ends)
        sizes = [*ends.values(), *([(layers - sum(ends.values())) // num_others] if num_others else [])]
    for flag, divisor in (
        ("--num-layers-per-virtual-pipeline-stage", parallel.num_layers_per_virtual_pipeline_stage),
        ("--num-virtual-stages-per-pipeline-rank", parallel.num_virtual_stages_per_pipeline_rank),
    ):
        for size in sizes:
            if divisor is not None and divisor > 0 and size % divisor:
                origin = f"{total} / {pp} = {size}" if not ends else str(size)
                yield (
                    f"{flag} {divisor} does not divide the {origin} layers of a pipeline rank: use a divisor of {size}"
                )
    chunks = parallel.num_virtual_stages_per_pipeline_rank
    if pp == 2 and len(ends) == 2 and chunks is not None and chunks > 1:
        yield (
            f"{END_FLAGS} with two interleaved stages: megatron-core divides by the number of other stages, which is "
            "0; remove --decoder-last-pipeline-num-layers, and the last stage has the remaining layers"
        )


LAYER_RULES: tuple[Rule, ...] = (
    stages_are_split_in_one_way,
    stages_divide_the_layers,
    layout_string_has_every_layer,
    one_spelling_of_virtual_stages,
    virtual_stages_divide_the_layers,
)


def has_stages(config: RunConfig, world_size: int) -> bool:
    """Whether the layers of every stage are known, so that a rule can compute with `stages.stage_layers`."""
    parallel = config.parallel
    given = (
        parallel.num_layers_per_virtual_pipeline_stage,
        parallel.num_virtual_stages_per_pipeline_rank,
        *end_stages(parallel).values(),
    )
    is_positive = all_positive(config.model.num_layers, parallel.pipeline_model_parallel_size) and all(
        value is None or value > 0 for value in given
    )
    return is_positive and not any(problem for rule in LAYER_RULES for problem in rule(config, world_size))


def interleaving_needs_a_pipeline(config: RunConfig, world_size: int) -> Iterator[str]:
    """The interleaved schedule needs two stages, and groups of at least as many microbatches, also the last one."""
    parallel, pp = config.parallel, config.parallel.pipeline_model_parallel_size
    group = parallel.microbatch_group_size_per_virtual_pipeline_stage
    if not is_interleaved(config):
        if all_positive(group):
            yield no_effect_without(
                f"--microbatch-group-size-per-virtual-pipeline-stage {group}", "--num-virtual-stages-per-pipeline-rank"
            )
        return
    if pp < 2:
        yield (
            f"virtual pipeline stages need --pipeline-model-parallel-size of at least 2, not {pp}: remove "
            "--num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank, or add stages"
        )
        return
    size = pp if group is None else group
    if 0 < size < pp:
        yield (
            f"--microbatch-group-size-per-virtual-pipeline-stage {size} is below --pipeline-model-parallel-size {pp}: "
            f"use at least {pp}"
        )
        return
    for count in microbatches(config, world_size):
        if size > 0 and (count < size or 0 < count % size < pp):
            yield _incomplete_group(config, world_size, count, size)
            return  # of a batch schedule, one phase is enough


def _incomplete_group(config: RunConfig, world_size: int, count: int, size: int) -> str:
    """The message for a number of microbatches that does not fill groups of a size."""
    pp, micro = config.parallel.pipeline_model_parallel_size, config.training.micro_batch_size
    group = config.parallel.microbatch_group_size_per_virtual_pipeline_stage
    dp = topology.data_parallel_size(config, world_size)
    assert micro is not None
    multiple = f"--pipeline-model-parallel-size {pp}" if group is None else (
        f"--microbatch-group-size-per-virtual-pipeline-stage {size}, or {pp} or more above one"
    )  # fmt: skip
    flag = "a global batch of" if iterations.has_batch_schedule(config.training) else "--global-batch-size"
    return (
        f"the interleaved schedule needs a number of microbatches per step that is a multiple of {multiple}, "
        f"not {count * micro * dp} / ({micro} x {dp}) = {count}: use {flag} "
        f"{round_up(count, size) * micro * dp}"
    )


def is_interleaved(config: RunConfig) -> bool:
    """Whether virtual stages are asked for; False where the settings do not tell."""
    parallel = config.parallel
    if parallel.pipeline_model_parallel_layout is not None:
        if not all_positive(parallel.pipeline_model_parallel_size):
            return False
        try:
            return (stages.virtual_pipeline_size(config.model, config.parallel) or 1) > 1
        except ConfigError:
            return False
    requested = (parallel.num_layers_per_virtual_pipeline_stage, parallel.num_virtual_stages_per_pipeline_rank)
    return any(all_positive(value) for value in requested)


def flush_overlap_needs_overlapped_messages(config: RunConfig, world_size: int) -> Iterator[str]:
    """Communication of warmup and flush overlaps only where that of the steady phase does."""
    parallel = config.parallel
    if parallel.overlap_p2p_comm_warmup_flush and not (parallel.overlap_p2p_comm and is_interleaved(config)):
        yield (
            "--overlap-p2p-communication-warmup-flush needs virtual pipeline stages without "
            "--no-overlap-p2p-communication: give --num-virtual-stages-per-pipeline-rank, or remove it"
        )
