"""`--dry-run`: a description of a run on the target cluster, from one process on any machine.

It is a summary of less than 60 lines. `--verbose` adds all settings, the place of every rank, the sizes that
`--micro-batch-size auto` would try, and the precision of every GEMM.

What needs torch or megatron-core is imported where it is used: planning works without them.
"""

from __future__ import annotations

import importlib.util
import math
import os
import textwrap
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Optional

from megafp8 import __version__
from megafp8.config import derived, dimensions, iterations, mixture, model_shapes, multi_token, precision_map, topology
from megafp8.config.activations import is_gated
from megafp8.config.data_phases import first_samples, parse_phases, schedule_marks
from megafp8.config.expert_layers import is_mixture
from megafp8.config.layer_backends import EMULATED, LayerBackend
from megafp8.config.micro_batch_sizes import SIZE_SETTINGS, is_auto, possible_sizes, refused_sizes
from megafp8.config.rules.paths import checkpoints_to_load_are_there
from megafp8.config.run_sizes import run_sizes
from megafp8.config.schema import RunConfig
from megafp8.config.schema.io import BEST_FIT
from megafp8.config.settings import all_settings, value_of, with_values
from megafp8.config.stages import stage_layers
from megafp8.config.topology import layout_of
from megafp8.data.tokenizers.build import build_tokenizer
from megafp8.device.capability import Target
from megafp8.device.gpus import gpu_of
from megafp8.errors import CapabilityError, ConfigError, DataError
from megafp8.planning.fit import MemoryVerdict, fp8_warnings, memory_verdict
from megafp8.planning.host_memory import checkpoint_memory, host_memory_text
from megafp8.planning.mixture_time import exchanged_bytes
from megafp8.planning.newton_schulz import newton_schulz_lines
from megafp8.planning.planned_run import PlannedRun, attention_lines, documents_of
from megafp8.planning.step_time import step_time, step_time_problem
from megafp8.resources import micro_batch
from megafp8.resources.automatic import Choice
from megafp8.resources.memory import cuda_graph_memory_bytes, estimate_stages
from megafp8.resources.micro_batch import gib
from megafp8.resources.mixture_memory import FREE_MEMORY_FRACTION, non_torch_bytes
from megafp8.resources.precision_table import format_precision_map, resolve_precision_map
from megafp8.utils.formatting import duration_text
from megafp8.utils.object_store import url_of

if TYPE_CHECKING:
    from megafp8.data.document_lengths import DocumentEstimate
    from megafp8.training.checks import ValidatedRun

# ---------------------------------------------------------------------------------------------------------------------
# The experts of a run in a dry run: their layout, the GEMMs of one expert and the tokens that ranks exchange

SMALL_ROWS, SMALL_EXPERTS = 2048, 64
"""On an H200, with as many experts on a GPU and with fewer tokens each, quantizing took what FP8 GEMMs saved."""


def mixture_text(config: RunConfig, world_size: int) -> list[str]:
    """Lines about the experts, as one text; nothing for a dense model.

    Numbers of tokens are those of a balanced load.
    """
    model, parallel = config.model, config.parallel
    if not mixture.is_mixture(model):
        return []
    rows, local = mixture.routed_rows(config), mixture.experts_per_rank(config)
    assert rows is not None and model.hidden_size is not None
    splits = mixture.expert_tensor_size(parallel)
    width = mixture.moe_ffn_hidden_size(model) // splits
    width_in = 2 * width if is_gated(model) else width
    lines = [
        f"experts: {model.num_experts} in {mixture.num_expert_layers(model)} layers, {model.moe_router_topk} a token; "
        f"{local} a rank: expert {parallel.expert_model_parallel_size} x expert tensor {splits} x expert data "
        f"{mixture.expert_data_size(config, world_size)}",
        f"  GEMMs of one expert and microbatch, if the load is balanced: {rows} x {model.hidden_size} x {width_in} and "
        f"{rows} x {width} x {model.hidden_size}",
    ]
    if parallel.expert_model_parallel_size > 1:
        lines.append(f"  exchanged by a rank: {exchanged_bytes(config) / 1e6:,.1f} MB a layer and microbatch")
    if derived.used_recipes(config.precision) and local >= SMALL_EXPERTS and rows < SMALL_ROWS:
        lines.append(
            f"  warning: {local} experts on a rank with about {rows} tokens each: quantizing their operands may take "
            "as long as FP8 GEMMs save; use more expert-parallel ranks or a larger micro batch"
        )
    return ["\n".join(lines)]


# ----------------------------------------------------------------------------------------------------------------------

GIB = 2**30
MAX_RANK_LINES = 16
MAX_LINES = 9
"""Limit of each list in the summary."""
MAX_WORDS = 6
NO_SPEED = "speed: not predicted (the run does not fit)"
DATA_PATHS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")


class DryRun(NamedTuple):
    """The text of a dry run, and whether the run fits, as far as that is known.

    Attributes:
        fits: also True for a device whose memory the planner does not know.
    """

    text: str
    fits: bool


def describe_run(validated: ValidatedRun) -> DryRun:
    """Describe a run that is not started.

    Builds megatron-core's configuration objects, so that its checks run as well. The one of the precision-aware
    optimizer needs Transformer Engine, and is built only if that is installed here.

    Raises:
        CheckpointError: the checkpoint of `--load` does not fit the run.
        ConfigError: megatron-core refuses the configuration.
        DataError: the tokenizer cannot be read.
    """
    from megafp8.mcore.config import build_ddp_config, build_optimizer_config, build_transformer_config
    from megafp8.training.checks import check_with_size, chosen_settings

    requested, world_size, automatic = validated.requested, validated.world_size, list[str]()
    is_verbose = requested.logging.verbose
    if is_auto(requested.training):
        first, text = micro_batch_text(validated)
        validated, automatic = check_with_size(validated, first), [text if is_verbose else text.splitlines()[0]]
    config, target, implementation = validated.invocation.config, validated.target, validated.implementation
    listed = with_values(config, {name: value_of(requested, name) for name in SIZE_SETTINGS})  # with `auto`
    has_transformer_engine = importlib.util.find_spec("transformer_engine") is not None
    # megatron-core's checks of experts ask for the version of Transformer Engine.
    asks_version = is_mixture(config.model) and not has_transformer_engine
    build_transformer_config(config, EMULATED if asks_version else implementation, on_cuda=False)
    build_ddp_config(config)
    if not config.optimizer.use_precision_aware_optimizer or has_transformer_engine:
        build_optimizer_config(config, implementation)
    vocab_size = dimensions.padded_vocab_size(config, vocabulary_size(config))
    choices = [*chosen_settings(config, target, implementation), *validated.choices]
    if target.kind == "cpu" and validated.invocation.target is None:
        verdict: Optional[MemoryVerdict] = host_memory_verdict(config, implementation, vocab_size, world_size)
    else:
        verdict = find_verdict(config, target, implementation, vocab_size, world_size)
    fits = verdict is None or verdict.fits
    documents = documents_of(config, world_size)
    checkpoints, saved = checkpoint_text(config, validated, vocab_size)
    details = "" if is_verbose else "; --verbose prints all settings, ranks and GEMMs"
    sections = [
        f"megafp8 {__version__} | dry run{details}",
        *([verdict.text] if verdict else []),
        *([settings_text(listed, validated.invocation.given)] if is_verbose else []),
        model_text(config),
        layout_text(config, target, implementation, world_size),
        *automatic,
        size_text(config, vocab_size, world_size, documents),
        *mixture_text(config, world_size),
        *newton_schulz_lines(config, run_sizes(config, world_size, vocab_size)),
        memory_text(config, vocab_size, world_size, implementation, target, saved),
        speed_text(config, target, implementation, vocab_size, world_size, documents.length) if fits else NO_SPEED,
        data_text(config, documents),
        *phases_text(config, world_size),
        checkpoints,
        precision_text(config, implementation),
        *([chosen_text(choices)] if choices else []),
        *warning_lines(validated),
        *warning_text(config, target, implementation, vocab_size, world_size, documents.length),
    ]
    return DryRun(("\n\n" if is_verbose else "\n").join(sections), fits)


def find_verdict(
    config: RunConfig, target: Target, implementation: LayerBackend, vocab_size: int, world_size: int
) -> Optional[MemoryVerdict]:
    """Whether the run fits into the memory of its GPUs; None for a device that the planner does not know."""
    gpu = gpu_of(target)
    if gpu is None or not implementation.has_step_time_model:
        return None
    return memory_verdict(PlannedRun(config=config, gpu=gpu, world_size=world_size, padded_vocab=vocab_size))


def host_memory_verdict(
    config: RunConfig, implementation: LayerBackend, vocab_size: int, world_size: int
) -> MemoryVerdict:
    """Whether the ranks of a run fit into the memory of this machine, which trains on its CPU."""
    from megafp8.device.platform import detect_platform

    estimates = estimate_stages(run_sizes(config, world_size, vocab_size), implementation=implementation)
    needed, has = world_size * max(each.total_bytes for each in estimates), detect_platform().total_memory_bytes()
    if needed <= has:
        return MemoryVerdict(True, f"fits: {gib(needed)} of {gib(has)} GiB of this machine, estimated")
    fix = "reduce --micro-batch-size or --seq-length, take a smaller model, or give the GPUs: --target, --world-size"
    return MemoryVerdict(False, f"does not fit: needs {gib(needed)} GiB, this machine has {gib(has)}; {fix}")


def chosen_text(choices: Sequence[Choice]) -> str:
    """The settings that megafp8 chose, one a line."""
    return section("chosen: settings without a flag", [f"{each.flag} {each.value} ({each.reason})" for each in choices])


def vocabulary_size(config: RunConfig) -> int:
    """The vocabulary size before padding. With `--vocab-size` the tokenizer need not be here: it may be elsewhere."""
    given = None if config.data.tokenizer_type == "NullTokenizer" else config.model.vocab_size
    try:
        tokenizer = build_tokenizer(config.data, config.model.vocab_size)
    except (CapabilityError, ConfigError, DataError) as error:
        if given is not None:
            return given
        if isinstance(error, DataError):
            raise DataError(f"{error}. A dry run for another machine does without it with --vocab-size") from error
        raise
    return dimensions.vocabulary_size(config.model, config.data, tokenizer.vocab_size)


def settings_text(config: RunConfig, given: Collection[str]) -> str:
    """Every setting with its value; `*` marks those given on the command line."""
    lines = (
        f"{'*' if setting.name in given else ' '} {setting.name} = {setting.written(value_of(config, setting.name))}"
        for setting in all_settings()
    )
    return section("settings (* given on the command line)", lines)


def model_text(config: RunConfig) -> str:
    """The shape of the model."""
    model = config.model
    preset = f"{model.model_preset}, " if model.model_preset else ""
    heads = f"{model.num_attention_heads} heads ({dimensions.num_query_groups(model)} of keys and values)"
    depths = multi_token.num_depths(model)
    more = f" + {depths} of multi-token prediction" if depths else ""
    return (
        f"model: {preset}{model.num_layers} layers{more}, hidden size {model.hidden_size}, FFN size "
        f"{dimensions.ffn_hidden_size(model)}, {heads}, sequences of {config.data.seq_length} tokens"
    )


def layout_text(config: RunConfig, target: Target, implementation: LayerBackend, world_size: int) -> str:
    """The parallel layout: the layers of each stage; with `--verbose` of each rank unless there are many."""
    layout = layout_of(config, world_size)
    is_verbose = config.logging.verbose
    stages = stage_layers(config)
    lines = layout.describe(stages) if is_verbose else []
    if not 0 < len(lines) <= MAX_RANK_LINES:
        lines = layout.describe_stages(stages)
    lines = lines if is_verbose else shortened(lines)
    head = (
        f"layout: {world_size} x {target.name}, {implementation} layers: tensor {layout.tensor} x context "
        f"{layout.context} x pipeline {layout.pipeline} (virtual {layout.virtual}) x data {layout.data}"
    )
    return section(head, lines)


def size_text(config: RunConfig, vocab_size: int, world_size: int, documents: DocumentEstimate) -> str:
    """Numbers of parameters, tokens and FLOPs."""
    count = model_shapes.count_parameters(config.model, vocab_size)
    assert config.data.seq_length is not None
    tokens = iterations.tokens_per_step(config, world_size)
    flops = model_shapes.flops_per_token(config.model, vocab_size, documents.length or config.data.seq_length)
    steps, samples = iterations.train_iters(config, world_size), iterations.trained_samples(config, world_size)
    lines = (
        f"{count.total:,} parameters ({vocab_size:,} rows of embedding)"
        + (f", of which a token passes {count.active:,}" if is_mixture(config.model) else ""),
        f"{tokens:,} tokens a step = {iterations.num_microbatches(config, world_size)} microbatches x "
        f"{config.training.micro_batch_size} sequences x {topology.data_parallel_size(config, world_size)} "
        f"data-parallel ranks x {config.data.seq_length} tokens",
        *batch_schedule_lines(config, world_size),
        f"{steps:,} steps = {samples * config.data.seq_length:,} tokens; {flops / 1e9:,.3f} GFLOP a token, "
        f"{flops * tokens / 1e12:,.3f} TFLOP a step",
        *attention_lines(config, documents),
    )
    return section("size", lines)


def batch_schedule_lines(config: RunConfig, world_size: int) -> list[str]:
    """The sizes of a batch schedule; none if the batch size is constant."""
    schedule, lines = iterations.batch_schedule(config, world_size), []
    if schedule.is_constant:
        return []
    step, total = 1, iterations.train_iters(config, world_size)
    for first, batch_size, num_steps in schedule.segments():
        left = total + 1 - step
        count = left if num_steps is None else min(num_steps, left)
        if count < 1:
            break
        microbatches = iterations.num_microbatches(config, world_size, batch_size)
        lines.append(
            f"batch {batch_size:,} sequences ({microbatches} microbatches): {count:,} steps from step {step:,}, sample "
            f"{first:,}"
        )
        step += count
    return ["the global batch grows, and the step above has its last size", *shortened(lines)]


def micro_batch_text(validated: ValidatedRun) -> tuple[int, str]:
    """The size with which `--micro-batch-size auto` would start, and a table of what it would try."""
    from megafp8.device.platform import detect_platform, resident_bytes

    config, world_size = validated.invocation.config, validated.world_size
    target, implementation = validated.target, validated.implementation
    vocab_size = dimensions.padded_vocab_size(config, vocabulary_size(config))
    outside = non_torch_bytes(config, world_size) if target.kind == "cuda" else resident_bytes()
    sizes = possible_sizes(config, world_size)
    predicted = micro_batch.predicted_bytes(config, sizes, world_size, vocab_size, implementation, outside)
    gpu, limit_gib = gpu_of(target), config.training.micro_batch_size_memory_limit
    memory_bytes = detect_platform().free_memory_bytes() if gpu is None else gpu.memory_bytes
    limit_bytes = int((1 - FREE_MEMORY_FRACTION) * memory_bytes) if limit_gib is None else int(limit_gib * GIB)
    candidates, first = micro_batch.sizes_to_try(predicted, limit_bytes), micro_batch.first_size(predicted, limit_bytes)
    notes = dict.fromkeys(predicted, micro_batch.NOT_TRIED) | dict.fromkeys(candidates, "") | {first: "first"}
    trials = [micro_batch.Trial(size=size, predicted_bytes=each, note=notes[size]) for size, each in predicted.items()]
    head = f"micro-batch size: auto, to be tried below {gib(limit_bytes)} GiB a rank; what follows is for {first}"
    return first, section(head, [*refused_sizes(config, world_size), micro_batch.table(trials)])


def memory_text(
    config: RunConfig,
    vocab_size: int,
    world_size: int,
    implementation: LayerBackend,
    target: Target,
    saved: Optional[RunConfig],
) -> str:
    """Estimated memory of a rank of the first and of the last pipeline stage, and of larger ones between them.

    Args:
        saved: settings of the checkpoint that the run resumes from, if any.
    """
    sizes = run_sizes(config, world_size, vocab_size)
    estimates = estimate_stages(sizes, implementation=implementation)
    lines = []
    for estimate in estimates:
        is_last = estimate.stage == config.parallel.pipeline_model_parallel_size - 1
        name = "first stage" if estimate.stage == 0 else "last stage" if is_last else f"stage {estimate.stage}"
        parts = ", ".join(f"{part} {gib(value)}" for part, value in estimate.parts().items())
        lines.append(f"{name}: {gib(estimate.total_bytes)} GiB ({parts})")
    graph_bytes = max(cuda_graph_memory_bytes(sizes, each, implementation=implementation) for each in estimates)
    if graph_bytes:
        lines.append(f"beside the graph: {gib(graph_bytes)} GiB more for statistics steps and validations")
    host = [checkpoint_memory(config, world_size, vocab_size, each, saved) for each in estimates]
    lines.append(f"host memory for checkpoints: {host_memory_text(host)}")
    gpu = gpu_of(target)
    if gpu is not None:
        lines.append(f"outside of torch, such as CUDA and NCCL: {gib(non_torch_bytes(config, world_size))} GiB")
    available = "" if gpu is None else f"; {gpu.name} has {gib(gpu.memory_bytes)} GiB"
    return section(f"memory of one rank, estimated{available}", lines)


def speed_text(
    config: RunConfig, target: Target, implementation: LayerBackend, vocab_size: int, world_size: int,
    document_length: Optional[float],
) -> str:  # fmt: skip
    """The planner's prediction of the step time, or why there is none."""
    gpu = gpu_of(target)
    problem = (
        f"the planner does not know {target.name}" if gpu is None
        else f"{implementation} layers" if not implementation.has_step_time_model
        else step_time_problem(config)
    )  # fmt: skip
    if gpu is None or problem is not None:
        return f"speed: not predicted ({problem})"
    step = step_time(PlannedRun(
        config=config, gpu=gpu, world_size=world_size, padded_vocab=vocab_size, document_length=document_length
    ))  # fmt: skip
    num_steps = iterations.trained_samples(config, world_size) / iterations.global_batch_size(config, world_size)
    return (
        f"speed, predicted: {step.seconds:.3f} s a step, {step.tokens_per_s_per_gpu:,.0f} tokens/s a GPU, MFU "
        f"{step.mfu_fraction:.1%}, {duration_text(num_steps * step.seconds)} of steps"
    )


def data_text(config: RunConfig, documents: DocumentEstimate) -> str:
    """Shards or made-up tokens, packing, tokenizer and validation."""
    data, training = config.data, config.training
    if data.mock_data:
        sources = ["made-up tokens (--mock-data)"]
    else:
        paths = {flag: value_of(config, f"data.{flag}") for flag in DATA_PATHS}
        sources = [f"{flag.replace('_', ' ')} {shortened_words(value)}" for flag, value in paths.items() if value]
    if data.data_phases:
        held_out = " and ".join(sources) or "nothing (give --data-path or --valid-data-path)"
        sources = [f"{len(data.data_phases)} phases for training", f"held out from {held_out}"]
    tokenizer = " ".join(filter(None, [derived.tokenizer_type(data), data.tokenizer_model]))
    interval = "" if training.eval_interval is None else f"every {training.eval_interval} steps and "
    size = "" if training.eval_global_batch_size is None else f"of {training.eval_global_batch_size} sequences "
    validation = (
        f"validation on {training.eval_iters} global batches {size}{interval}at the end" if training.eval_iters
        else "no validation (--eval-iters 0)"
    )  # fmt: skip
    fraction = documents.padding_fraction
    padding = f"not known ({documents.problem})" if fraction is None else f"about {fraction:.3%} of tokens"
    packing = [f"packing {BEST_FIT}, padding: {padding}"] if data.packing == BEST_FIT else []
    return section(f"data: {', '.join(sources)}", (f"tokenizer {tokenizer}", *packing, validation))


def phases_text(config: RunConfig, world_size: int) -> list[str]:
    """The phases of data and of the learning rate in the order of their steps; nothing without `--data-phases`."""
    phases = parse_phases(config.data)
    if not phases:
        return []
    blends = {f"data: {phase.name}": shortened_words(phase.words) for phase in phases}
    starts = dict(zip(blends, first_samples(config, world_size), strict=True))
    marks = {next(iter(blends)): 1.0} | schedule_marks(config, world_size)
    found: dict[int, list[str]] = {}
    for name, step in sorted(marks.items(), key=lambda mark: mark[1]):
        text = f"{name} from sample {starts[name]:,}: {blends[name]}" if name in blends else name
        found.setdefault(math.floor(step), []).append(text)
    lines = [f"step {step:,}: {'; '.join(texts)}" for step, texts in found.items()]
    return [section("phases of data and of the learning rate", lines)]


def checkpoint_text(config: RunConfig, validated: ValidatedRun, vocab_size: int) -> tuple[str, Optional[RunConfig]]:
    """Where checkpoints are saved, and the one from which the run resumes, after its checks; and the latter's settings.

    Raises:
        CheckpointError: a start would refuse the checkpoint, as far as its files and settings tell.
    """
    from megafp8.checkpoint.metadata import read_config
    from megafp8.training.resume import preview

    checkpoint, parsed = config.checkpoint, validated.invocation
    interval = "" if checkpoint.save_interval is None else f"every {checkpoint.save_interval} steps and "
    saves = f"saved to {checkpoint.save} {interval}at the end" if checkpoint.save else "none saved (no --save)"
    folders = [folder for folder in (checkpoint.load, checkpoint.pretrained_checkpoint) if folder]
    absent = [folder for folder in folders if not os.path.isdir(folder)]
    if absent and (parsed.world_size is not None or parsed.target is not None):
        has_warning = any(checkpoints_to_load_are_there(config, validated.world_size))
        missing = "" if has_warning else f"; not checked: {' and '.join(absent)}, absent on this machine"
        return f"checkpoints: {saves}{missing}", None
    if remote := [url for folder in absent if (url := url_of(folder))]:
        return f"checkpoints: {saves}; not checked: {' and '.join(remote)}, which a dry run does not download", None
    found, weights_only = preview(config, validated.world_size, validated.implementation, vocab_size)
    if found is None:
        loads = f"; no checkpoint in {checkpoint.load}: starts from step 0" if checkpoint.load else ""
        return f"checkpoints: {saves}{loads}", None
    loads = f"starts from step 0 with the weights of {found.path}" if weights_only else (
        f"resumes from step {found.step} ({found.path})"
    )  # fmt: skip
    return section(f"checkpoints: {saves}; {loads}", found.notes), read_config(found.path)


def precision_text(config: RunConfig, implementation: LayerBackend) -> str:
    """The resolved recipes; with `--verbose` formats and scales of every GEMM."""
    from megafp8.training.run_record import recipe_lines

    if config.logging.verbose:
        return section("precision", [format_precision_map(resolve_precision_map(config.model, config.precision))])
    first, *others = recipe_lines(config, implementation) or [f"precision: {derived.params_dtype(config.precision)}"]
    return section(first, shortened([line.strip() for line in others]))


def warning_lines(validated: ValidatedRun) -> list[str]:
    """The warnings of the checks."""
    from megafp8.training.checks import short_warnings

    if validated.invocation.config.logging.verbose:
        return [f"notice: {warning}" for warning in validated.warnings]
    return shortened([f"notice: {warning}" for warning in short_warnings(validated.warnings)])


def warning_text(
    config: RunConfig, target: Target, implementation: LayerBackend, vocab_size: int, world_size: int,
    document_length: Optional[float] = None,
) -> list[str]:  # fmt: skip
    """A warning if the run will not be faster than BF16; for a GPU that the planner knows."""
    gpu, precision = gpu_of(target), config.precision
    if gpu is None or not implementation.has_step_time_model:
        return []
    run = PlannedRun(
        config=config, gpu=gpu, world_size=world_size, padded_vocab=vocab_size, document_length=document_length
    )
    is_planned = (
        not (is_mixture(config.model) and precision.precision_map)
        and precision_map.is_quantized(precision)
        and precision.fp8_schedule is None  # plans have one precision
    )
    lines = fp8_warnings(run) if is_planned else []
    return ["warning: " + "\n".join(lines)] if lines else []


def shortened(lines: list[str]) -> list[str]:
    """At most `MAX_LINES` lines, the last of which then counts those that are left out."""
    if len(lines) <= MAX_LINES:
        return lines
    return [*lines[: MAX_LINES - 1], f"{len(lines) - MAX_LINES + 1} more lines with --verbose"]


def shortened_words(words: Sequence[str]) -> str:
    """At most `MAX_WORDS` words, and the number of those that are left out."""
    rest = f" and {len(words) - MAX_WORDS} more words" if len(words) > MAX_WORDS else ""
    return " ".join(words[:MAX_WORDS]) + rest


def section(head: str, lines: Iterable[str]) -> str:
    """A heading, and lines below it that are indented by two; a line may hold several."""
    return "\n".join([head, *(textwrap.indent(line, "  ", predicate=lambda _: True) for line in lines)])
