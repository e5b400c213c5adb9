"""The run record, the first of a run: configuration, layout, arithmetic, device and versions."""

from __future__ import annotations

import functools
import importlib.metadata
import platform as python_platform
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Optional

import torch

import megafp8
from megafp8.config import derived, model_shapes, precision_map, settings
from megafp8.config.fused_adam import fused_adam_problem
from megafp8.config.layer_backends import LayerBackend
from megafp8.config.optimizers import updates_matrices
from megafp8.config.precision_map import OUTPUT_LAYER
from megafp8.config.schema import PrecisionConfig, RunConfig
from megafp8.config.stages import virtual_pipeline_size
from megafp8.device.cuda_libraries import cuda_library_versions
from megafp8.device.gpus import find_peak
from megafp8.device.platform import THREAD_VARIABLES, cores_per_rank
from megafp8.metrics.records import RunRecord
from megafp8.optimizer import fused_adam
from megafp8.optimizer.layer_wise import LayerWiseOptimizer
from megafp8.quantization import saved_activations
from megafp8.resources.precision_table import GemmPrecision, format_recipes, resolve_precision_map
from megafp8.training.run import Run

LIBRARIES = ("torch", "megatron-core", "transformer-engine", "deep-ep", "numpy", "sentencepiece")


def describe_arithmetic(precision: PrecisionConfig, implementation: LayerBackend) -> str:
    """The arithmetic of the linears in short, for tables and legends: `fp8 hybrid tensorwise, emulated, on bf16`."""
    dtype, recipe = derived.params_dtype(precision), derived.quantization_recipe(precision)
    if not precision_map.is_quantized(precision):
        return dtype
    formats = f"fp4 {precision.fp4_format}" if precision.fp8_format is None else f"fp8 {precision.fp8_format}"
    base = dtype if recipe is None else f"{formats} {recipe}"
    attention = " with attention" if precision.fp8_dot_product_attention else ""
    mapped = " with a precision map" if precision.precision_map else ""
    steps = f", steps {precision.fp8_schedule}" if precision.fp8_schedule is not None else ""
    return f"{base}{attention}{mapped}{steps}, {implementation.arithmetic}, on {dtype}"


def recipe_lines(config: RunConfig, implementation: LayerBackend) -> list[str]:
    """The resolved recipe as console lines: one per GEMM, or a table where linears differ; none where all is in high
    precision."""
    precision = config.precision
    saved = ", ".join(precision.fp8_saved_activations)
    saved_lines = [f"  saved activations ({saved}): {saved_activations.RULE}"] if saved else []
    if not precision_map.is_quantized(precision):
        return [f"precision: {derived.params_dtype(precision)}", *saved_lines] if saved else []
    rows, arithmetic = resolve_precision_map(config.model, precision), describe_arithmetic(precision, implementation)
    stored = "" if config.parallel.shards_weights else "stored and "
    others = [f"  weights are {stored}gathered as codes and scales"] if precision.fp8_param_gather else []
    others += ["  both attention GEMMs are also in FP8"] if precision.fp8_dot_product_attention else []
    if has_mixed_recipes(rows, precision):
        table = [f"  {line}" for line in format_recipes(rows, precision).splitlines()]
        return [f"recipes: {arithmetic}", *table, *others, *saved_lines]
    row = rows[0]
    gemms = [f"  {gemm}  {getattr(row, gemm)}" for gemm in precision_map.GEMMS]
    return [f"recipe of layers {row.layers}: {arithmetic}", *gemms, *others, *saved_lines]


def has_mixed_recipes(rows: list[GemmPrecision], precision: PrecisionConfig) -> bool:
    """Whether linears have different recipes, by a precision map or by a flag such as `--first-last-layers-bf16`."""
    return bool(precision.precision_map) or len({row.chosen for row in rows if row.linear != OUTPUT_LAYER}) > 1


def mapped_recipes(config: RunConfig) -> dict[str, str]:
    """The recipe of each linear where they differ, for the record, by name: `linear_fc2 of layers 0-3`."""
    rows = resolve_precision_map(config.model, config.precision)
    if not has_mixed_recipes(rows, config.precision):
        return {}
    return {
        row.linear if row.layers == "-" else f"{row.linear} of layers {row.layers}": str(row.chosen) for row in rows
    }


def matmul_dtype(precision: PrecisionConfig, implementation: LayerBackend) -> str:
    """The dtype whose peak FLOP/s the linears could reach; emulated FP8 and FP4 run in the dtype of the parameters, and
    Transformer Engine multiplies FP32 in TF32."""
    families = {recipe.family for recipe in derived.used_recipes(precision)}
    dtype = derived.params_dtype(precision)
    if not implementation.has_native_gemms:
        return dtype
    if families:
        return "fp4" if "fp4" in families else "fp8"
    return "tf32" if dtype == "fp32" else dtype


@functools.cache
def library_versions() -> Mapping[str, str]:
    """Versions of the libraries that affect the arithmetic, read once: that takes 30 ms."""
    versions = {"megafp8": megafp8.__version__, "python": python_platform.python_version()}
    for name in LIBRARIES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return MappingProxyType(versions)


def layout_sizes(run: Run) -> dict[str, int]:
    """Size of each parallel axis."""
    parallel = run.config.parallel
    return {
        "tensor": parallel.tensor_model_parallel_size,
        "context": parallel.context_parallel_size,
        "pipeline": parallel.pipeline_model_parallel_size,
        "virtual": virtual_pipeline_size(run.config.model, run.config.parallel) or 1,
        "data": run.rank_position.data_size,
    }


def model_flops_per_token(run: Run, document_length: Optional[float] = None) -> float:
    """Model FLOPs of one token, forward and backward.

    Args:
        document_length: of a token's document, on average, where attention stops at its borders; None: it does not.
    """
    length = run.seq_length if document_length is None else document_length
    return model_shapes.flops_per_token(run.config.model, run.vocab_size, length)


def describe_threads(run: Run) -> dict[str, str]:
    """A note if a rank has fewer CPU threads than it could use and `--num-threads` is not given; empty on a GPU."""
    threads, useful = torch.get_num_threads(), min(cores_per_rank(), derived.useful_threads(run.config))
    if run.platform.kind != "cpu" or run.config.training.num_threads is not None or threads >= useful:
        return {}
    return {
        "threads": f"{threads} per rank, from {' or '.join(THREAD_VARIABLES)} (torchrun sets the first to 1 if it is "
        f"not set); --num-threads {useful} would be faster"
    }


def describe_update(run: Run) -> dict[str, str]:
    """How weights are updated and gathered, where that depends on the machine or the layout."""
    found = {}
    on_cuda = run.platform.kind == "cuda"
    optimizer = run.training_state.optimizer
    if on_cuda and updates_matrices(run.config.optimizer):
        found["optimizer"] = f"{run.config.optimizer.optimizer.capitalize()} and AdamW, not in one pass"
    elif on_cuda:
        problem = fused_adam_problem(run.config) or fused_adam.device_problem(run.config.optimizer, on_cuda)
        found["optimizer"] = "one pass" if problem is None else f"megatron-core's optimizer ({problem})"
    if isinstance(optimizer, LayerWiseOptimizer):
        own = sum(buffer.nbytes for each in optimizer.ownerships for buffer in each.buffers[each.group.rank()])
        found["parameter broadcast"] = f"{own / 2**20:.1f} MiB from this rank, which has their optimizer state"
    elif run.config.parallel.use_distributed_optimizer and (run.rank_position.data_size > 1 or on_cuda):
        found["parameter gather"] = describe_gather(run)
    return found


def describe_gather(run: Run) -> str:
    """Size of this rank's weights that are gathered over the data-parallel ranks in each step, by format."""
    sizes: dict[str, int] = {}
    for chunk in run.training_state.chunks:
        for buffer in chunk.buffers:
            dtype = buffer.param_data.dtype
            name = "FP8" if dtype == torch.uint8 else str(dtype).removeprefix("torch.")
            sizes[name] = sizes.get(name, 0) + buffer.param_data.nbytes
    parts = ", ".join(f"{size / 2**20:.1f} MiB in {name}" for name, size in sizes.items())
    return f"{parts} over {run.rank_position.data_size} ranks"


def fresh_tokens(run: Run) -> Optional[int]:
    """Training tokens before a document is read again; None where no single number says it."""
    samples = getattr(run.datasets[0], "fresh_samples", None)  # phases have none
    return None if samples is None else int(samples * run.seq_length)


def run_record(run: Run, resumed_from_step: Optional[int]) -> RunRecord:
    """The record that opens a run's file."""
    precision = run.config.precision
    peak = find_peak(run.platform.name)
    return RunRecord(
        config_hash=settings.stable_hash(run.config),
        config=settings.to_dict(run.config),
        world_size=run.rank_position.world_size,
        layout=layout_sizes(run),
        recipe=describe_arithmetic(precision, run.implementation),
        precision_map=mapped_recipes(run.config),
        device_name=run.platform.name,
        device_memory_bytes=run.platform.total_memory_bytes() if run.platform.kind == "cuda" else None,
        num_threads=torch.get_num_threads(),
        peak_flops=dict(peak.flops) if peak else None,
        peak_source=peak.source if peak else None,
        mfu_dtype=matmul_dtype(precision, run.implementation) if peak else None,
        num_parameters=model_shapes.count_parameters(run.config.model, run.vocab_size).total,
        flops_per_token=model_flops_per_token(run),
        fresh_tokens=fresh_tokens(run),
        versions=dict(library_versions()),
        cuda_versions=cuda_library_versions(),
        resumed_from_step=resumed_from_step,
    )
