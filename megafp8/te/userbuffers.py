"""Userbuffers: Transformer Engine's overlap of tensor-parallel communication with GEMMs (`--tp-comm-overlap`).

The GPUs write into each other's memory, without NCCL. All-gathers of inputs and gradients send codes where the linear
quantizes to FP8; reductions are in the run's dtype.
"""

from __future__ import annotations

import os
from typing import Any, Optional

from megatron.core.transformer.transformer_config import TransformerConfig
from transformer_engine.pytorch.module.base import UserBufferQuantizationMode, destroy_ub, initialize_ub

from megafp8.config import derived
from megafp8.config.schema import ParallelConfig, PrecisionConfig, TrainingConfig
from megafp8.errors import CapabilityError, ConfigError
from megafp8.utils.files import UnreadableFile
from megafp8.utils.strict_yaml import read_yaml


def start(
    parallel: ParallelConfig, core: TransformerConfig, num_tokens: int, modes: list[UserBufferQuantizationMode]
) -> None:
    """Allocate the buffers; a second call replaces them. All ranks call it before the first forward pass.

    Args:
        num_tokens: of a microbatch, on all context-parallel ranks.
        modes: of the linears, see `quantization_modes`.

    Raises:
        CapabilityError: the GPUs cannot write into each other's memory.
    """
    destroy_ub()
    try:
        initialize_ub(
            shape=[num_tokens // core.context_parallel_size, core.hidden_size],
            tp_size=core.tensor_model_parallel_size,
            quantization_modes=modes,
            dtype=core.params_dtype,
            ub_cfgs=read_settings(parallel.tp_comm_overlap_cfg),
            bootstrap_backend=parallel.tp_comm_bootstrap_backend,
        )
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        fix = "" if os.environ.get("UB_SKIPMC") == "1" else "; without NVLink multicast, set the variable UB_SKIPMC=1"
        raise CapabilityError(f"--tp-comm-overlap: {reason}{fix}; or leave the flag out") from error


def quantization_modes(precision: PrecisionConfig, training: TrainingConfig) -> list[UserBufferQuantizationMode]:
    """FP8 if linears of layers are quantized, and NONE if any layer is in high precision, in all steps or in some."""
    if derived.quantization_recipe(precision) is None:
        return [UserBufferQuantizationMode.NONE]
    may_move = derived.moves_linears(training) is not None
    has_both = precision.first_last_layers_bf16 or precision.fp8_schedule is not None or may_move
    return [UserBufferQuantizationMode.FP8, *([UserBufferQuantizationMode.NONE] if has_both else [])]


def read_settings(path: Optional[str]) -> Optional[dict[str, Any]]:
    """Read the overlap settings of each GEMM, by its name (`qkv_fprop`, `fc2_dgrad`, ...).

    Raises:
        ConfigError: the file cannot be read, or is not a table of settings.
    """
    if path is None:
        return None
    try:
        table = read_yaml(path)
    except UnreadableFile as error:
        raise ConfigError(f"--tp-comm-overlap-cfg {error}") from error
    if not isinstance(table, dict) or not all(isinstance(entry, dict) for entry in table.values()):
        raise ConfigError(
            f"--tp-comm-overlap-cfg {path}: give a table of settings for each GEMM, such as "
            "`qkv_fprop: {method: ring_exchange}`"
        )
    return table
