"""`--dry-run`: a description of a run on the target cluster, from one process on any machine."""

from __future__ import annotations

import importlib.util
import textwrap

from megafp8.config import derived, model_shapes, precision_map
from megafp8.config.flags import Invocation
from megafp8.config.schema import RunConfig
from megafp8.config.settings import all_settings, value_of
from megafp8.config.topology import layout_of
from megafp8.data.tokenizers.build import build_tokenizer
from megafp8.device.capability import Target
from megafp8.device.gpus import find_gpu
from megafp8.device.platform import detect_platform
from megafp8.mcore.config import build_ddp_config, build_optimizer_config, build_transformer_config
from megafp8.planning import micro_batch
from megafp8.planning.fp8_gain import fp8_warnings
from megafp8.planning.layouts import FREE_MEMORY_FRACTION
from megafp8.planning.memory import cuda_graph_memory_bytes, estimate_end_stages, non_torch_bytes
from megafp8.planning.micro_batch import gib
from megafp8.planning.planned_run import PlannedRun
from megafp8.planning.precision_table import format_precision_map, resolve_precision_map
from megafp8.training.checks import Checked

GIB = 2**30
MAX_RANK_LINES = 16


def describe_run(checked: Checked) -> str:
    """The text of a dry run: settings, layout, size, memory and precision.

    Builds megatron-core's configuration objects, so that its checks run as well. The one of the precision-aware
    optimizer needs Transformer Engine, and is built only if that is installed here.

    Raises:
        ConfigError: megatron-core refuses the configuration.
        DataError: the tokenizer cannot be read.
    """
    config, implementation, world_size = checked.invocation.config, checked.implementation, checked.world_size
    build_transformer_config(config, implementation, on_cuda=False)
    build_ddp_config(config)
    has_transformer_engine = importlib.util.find_spec("transformer_engine") is not None
    if not config.optimizer.use_precision_aware_optimizer or has_transformer_engine:
        build_optimizer_config(config, implementation)
    vocab_size = derived.padded_vocab_size(config, vocabulary_size(config))
    automatic = []
    if micro_batch.is_auto(config):
        first, text = micro_batch_text(config, vocab_size, world_size, checked)
        config, automatic = micro_batch.with_size(config, first), [text]
    sections = [
        *(f"notice: {notice}" for notice in checked.notices),
        settings_text(checked.invocation),
        layout_text(config, checked.target, implementation, world_size),
        *automatic,
        size_text(config, vocab_size, world_size),
        memory_text(config, vocab_size, world_size, implementation),
        *fp8_text(config, checked.target, implementation, vocab_size, world_size),
        "precision\n" + indented(format_precision_map(resolve_precision_map(config))),
    ]
    return "\n\n".join(sections)


def vocabulary_size(config: RunConfig) -> int:
    """The vocabulary size before padding. The tokenizer is read only if needed: it may be on another machine."""
    if config.model.vocab_size is not None and config.data.tokenizer_type != "NullTokenizer":
        return config.model.vocab_size
    return derived.vocabulary_size(config, build_tokenizer(config.data, config.model.vocab_size).vocab_size)


def settings_text(invocation: Invocation) -> str:
    """Every setting with its value; `*` marks those given on the command line."""
    lines = []
    for setting in all_settings():
        value = setting.written(value_of(invocation.config, setting.name))
        mark = "*" if setting.name in invocation.given else " "
        lines.append(f"{mark} {setting.name} = {value}")
    return "settings (* given on the command line)\n" + indented("\n".join(lines))


def layout_text(config: RunConfig, target: Target, implementation: str, world_size: int) -> str:
    """The parallel layout: the layers of each rank, or of each stage where there are many ranks."""
    layout = layout_of(config, world_size)
    assert config.model.num_layers is not None
    lines = layout.describe(config.model.num_layers)
    if len(lines) > MAX_RANK_LINES:
        lines = layout.describe_stages(config.model.num_layers)
    head = (
        f"layout: {world_size} x {target.name}, {implementation} layers: tensor {layout.tensor} x context "
        f"{layout.context} x pipeline {layout.pipeline} (virtual {layout.chunks_per_rank}) x data {layout.data}"
    )
    return head + "\n" + indented("\n".join(lines))


def size_text(config: RunConfig, vocab_size: int, world_size: int) -> str:
    """Numbers of parameters, tokens and FLOPs."""
    count = model_shapes.count_parameters(config.model, vocab_size)
    assert config.data.seq_length is not None
    tokens = derived.tokens_per_step(config, world_size)
    flops = model_shapes.flops_per_token(config.model, vocab_size, config.data.seq_length)
    steps = derived.train_iters(config, world_size)
    lines = (
        f"{count.total:,} parameters ({vocab_size:,} rows of embedding)",
        f"{tokens:,} tokens a step = {derived.num_microbatches(config, world_size)} microbatches x "
        f"{config.training.micro_batch_size} sequences x {derived.data_parallel_size(config, world_size)} "
        f"data-parallel ranks x {config.data.seq_length} tokens",
        f"{steps:,} steps = {steps * tokens:,} tokens; {flops / 1e9:,.3f} GFLOP a token, {flops * tokens / 1e12:,.3f} "
        "TFLOP a step",
    )
    return "size\n" + indented("\n".join(lines))


def micro_batch_text(config: RunConfig, vocab_size: int, world_size: int, checked: Checked) -> tuple[int, str]:
    """The size with which `--micro-batch-size auto` would start, and a table of what it would try."""
    target, implementation = checked.target, checked.implementation
    predicted = {
        size: micro_batch.predicted_bytes(config, size, world_size, vocab_size, implementation)
        for size in micro_batch.possible_sizes(config, world_size)
    }
    memory_bytes, limit_gib = device_memory_bytes(target), config.training.micro_batch_size_memory_limit
    limit_bytes = int((1 - FREE_MEMORY_FRACTION) * memory_bytes) if limit_gib is None else int(limit_gib * GIB)
    outside = non_torch_bytes(config, world_size) if target.kind == "cuda" else 0
    needed = {size: each + outside for size, each in predicted.items()}
    candidates, first = micro_batch.sizes_to_try(needed, limit_bytes), micro_batch.first_size(needed, limit_bytes)
    notes = dict.fromkeys(predicted, micro_batch.NOT_TRIED) | dict.fromkeys(candidates, "") | {first: "first"}
    trials = [micro_batch.Trial(size=size, predicted_bytes=each, note=notes[size]) for size, each in predicted.items()]
    head = f"micro-batch size: auto, to be tried below {gib(limit_bytes)} GiB a rank; what follows is for {first}"
    return first, head + "\n" + indented(
        "\n".join([*micro_batch.refused_sizes(config, world_size), micro_batch.table(trials)])
    )


def device_memory_bytes(target: Target) -> int:
    """Memory of a device of the target: a GPU that the planner knows, else the free memory of this machine."""
    gpu = find_gpu(target.name)
    return detect_platform().free_memory_bytes() if gpu is None else gpu.memory_bytes


def memory_text(config: RunConfig, vocab_size: int, world_size: int, implementation: str) -> str:
    """Estimated memory of a rank of the first and of the last pipeline stage."""
    estimates = estimate_end_stages(config, world_size, vocab_size, implementation=implementation)
    lines = []
    for name, estimate in zip(("first stage", "last stage"), estimates, strict=False):
        parts = ", ".join(f"{part} {gib(value)}" for part, value in estimate.parts().items())
        lines.append(f"{name}: {gib(estimate.total_bytes)} GiB ({parts})")
    graph_bytes = cuda_graph_memory_bytes(config, estimates[0], implementation=implementation)  # a graph has one stage
    if graph_bytes:
        lines.append(f"beside the graph: {gib(graph_bytes)} GiB more for statistics steps and validations")
    return "memory of one rank, estimated\n" + indented("\n".join(lines))


def fp8_text(config: RunConfig, target: Target, implementation: str, vocab_size: int, world_size: int) -> list[str]:
    """A warning if quantized linears will not be faster than BF16, for a GPU that the planner knows."""
    gpu, precision = find_gpu(target.name), config.precision
    is_planned = precision_map.is_quantized(precision) and precision.fp8_schedule is None  # plans have one precision
    if gpu is None or not is_planned or implementation != "transformer_engine":
        return []
    warnings = fp8_warnings(PlannedRun(config=config, gpu=gpu, world_size=world_size, padded_vocab=vocab_size))
    return ["warning: " + "\n".join(warnings)] if warnings else []


def indented(text: str) -> str:
    """The text, each line indented by two."""
    return textwrap.indent(text, "  ", predicate=lambda line: True)
