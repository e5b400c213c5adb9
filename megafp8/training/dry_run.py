"""`--dry-run`: describes a run on the target cluster, from one process on any machine."""

from __future__ import annotations

import importlib.util

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
from megafp8.planning.fp8_gain import fp8_warnings
from megafp8.planning.layouts import MARGIN_FRACTION, outside_graph_bytes
from megafp8.planning.memory import estimate_ends, outside_bytes
from megafp8.planning.micro_batch import (
    NOT_TRIED,
    Trial,
    first_size,
    hopeful_sizes,
    is_auto,
    possible_sizes,
    predicted_bytes,
    refused_sizes,
    table,
    with_size,
)
from megafp8.planning.planned_run import PlannedRun
from megafp8.planning.precision_table import format_precision_map, resolve_precision_map
from megafp8.training.checks import Checked

GIB = 2**30
MOST_RANK_LINES = 16


def describe_run(checked: Checked) -> str:
    """The complete text: settings, layout, size, memory, precision.

    Also builds megatron-core's configuration objects, so that what it would refuse is refused here. That of the
    precision-aware optimizer asks Transformer Engine's Adam what it can, and is built where that is installed.

    Raises:
        ConfigError: megatron-core refuses the configuration.
        DataError: the tokenizer cannot be read.
    """
    config, implementation, world_size = checked.invocation.config, checked.implementation, checked.world_size
    build_transformer_config(config, implementation, on_cuda=False)
    build_ddp_config(config)
    if not config.optimizer.use_precision_aware_optimizer or has_transformer_engine():
        build_optimizer_config(config, implementation)
    vocab_size = derived.padded_vocab_size(config, vocabulary_size(config))
    automatic = []
    if is_auto(config):
        first, text = automatic_text(config, vocab_size, world_size, checked)
        config, automatic = with_size(config, first), [text]
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


def has_transformer_engine() -> bool:
    """Is it installed here, whatever the target has?"""
    return importlib.util.find_spec("transformer_engine") is not None


def vocabulary_size(config: RunConfig) -> int:
    """Token ids before padding. The tokenizer, which may lie on another machine, is read only if needed."""
    if config.model.vocab_size is not None and config.data.tokenizer_type != "NullTokenizer":
        return config.model.vocab_size
    return derived.vocabulary_size(config, build_tokenizer(config.data, config.model.vocab_size).vocab_size)


def settings_text(invocation: Invocation) -> str:
    """Every setting with its value; `*` marks those that the command line named."""
    lines = []
    for setting in all_settings():
        value = setting.written(value_of(invocation.config, setting.name))
        mark = "*" if setting.name in invocation.given else " "
        lines.append(f"{mark} {setting.name} = {value}")
    return "settings (* given on the command line)\n" + indented("\n".join(lines))


def layout_text(config: RunConfig, target: Target, implementation: str, world_size: int) -> str:
    """Which rank holds what."""
    layout = layout_of(config, world_size)
    assert config.model.num_layers is not None
    lines = layout.describe(config.model.num_layers)
    if len(lines) > MOST_RANK_LINES:
        lines = layout.describe_stages(config.model.num_layers)
    head = (
        f"layout: {world_size} x {target.name}, {implementation} layers: tensor {layout.tensor} x context "
        f"{layout.context} x pipeline {layout.pipeline} (virtual {layout.chunks_per_rank}) x data {layout.data}"
    )
    return head + "\n" + indented("\n".join(lines))


def size_text(config: RunConfig, vocab_size: int, world_size: int) -> str:
    """Parameters, tokens and operations."""
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


def automatic_text(config: RunConfig, vocab_size: int, world_size: int, checked: Checked) -> tuple[int, str]:
    """The size that `--micro-batch-size auto` would start with, and what it would try."""
    target, implementation = checked.target, checked.implementation
    predicted = {
        size: predicted_bytes(config, size, world_size, vocab_size, implementation)
        for size in possible_sizes(config, world_size)
    }
    memory_bytes, asked = memory_of(target), config.training.micro_batch_size_memory_limit
    limit_bytes = int((1 - MARGIN_FRACTION) * memory_bytes) if asked is None else int(asked * GIB)
    outside = outside_bytes(config, world_size) if target.kind == "cuda" else 0
    needed = {size: each + outside for size, each in predicted.items()}
    hopeful, first = hopeful_sizes(needed, limit_bytes), first_size(needed, limit_bytes)
    notes = dict.fromkeys(predicted, NOT_TRIED) | dict.fromkeys(hopeful, "") | {first: "first"}
    trials = [Trial(size=size, predicted_bytes=each, note=notes[size]) for size, each in predicted.items()]
    head = f"micro-batch size: auto, to be tried below {limit_bytes / GIB:.2f} GiB a rank; what follows is for {first}"
    return first, head + "\n" + indented("\n".join([*refused_sizes(config, world_size), table(trials)]))


def memory_of(target: Target) -> int:
    """Memory of a device of the target; of this machine where it is that."""
    gpu = find_gpu(target.name)
    return detect_platform().free_memory_bytes() if gpu is None else gpu.memory_bytes


def memory_text(config: RunConfig, vocab_size: int, world_size: int, implementation: str) -> str:
    """Memory of a rank of the first and of the last pipeline stage."""
    estimates = estimate_ends(config, world_size, vocab_size, implementation=implementation)
    lines = []
    for name, estimate in zip(("first stage", "last stage"), estimates, strict=False):
        parts = ", ".join(f"{part} {value / GIB:.2f}" for part, value in estimate.parts().items())
        lines.append(f"{name}: {estimate.total_bytes / GIB:.2f} GiB ({parts})")
    beside = outside_graph_bytes(config, estimates[0], implementation=implementation)  # a graph has one stage
    if beside:
        lines.append(f"beside the graph: {beside / GIB:.2f} GiB more for looks and validations")
    return "memory of one rank, estimated\n" + indented("\n".join(lines))


def fp8_text(config: RunConfig, target: Target, implementation: str, vocab_size: int, world_size: int) -> list[str]:
    """A warning where quantized linears will not be faster than BF16's, for a GPU that the planner knows."""
    gpu, precision = find_gpu(target.name), config.precision
    is_planned = precision_map.is_quantized(precision) and precision.fp8_schedule is None  # which no plan knows
    if gpu is None or not is_planned or implementation != "transformer_engine":
        return []
    warnings = fp8_warnings(PlannedRun(config=config, gpu=gpu, world_size=world_size, padded_vocab=vocab_size))
    return ["warning: " + "\n".join(warnings)] if warnings else []


def indented(text: str) -> str:
    """Every line moved to the right by two."""
    return "\n".join(f"  {line}" for line in text.splitlines())
