"""Userbuffers: Transformer Engine's overlap of tensor-parallel communication with GEMMs (`--tp-comm-overlap`).

The GPUs write into each other's memory, without NCCL. All-gathers of inputs and gradients send codes where the linear
quantizes to FP8; reductions are in the run's dtype.
"""

from __future__ import annotations

import os
from typing import Any, Optional

import torch
from transformer_engine.pytorch.module.base import UserBufferQuantizationMode, destroy_ub, initialize_ub

from megafp8.config import derived
from megafp8.config.schema import RunConfig
from megafp8.errors import CapabilityError, ConfigError
from megafp8.utils.files import UnreadableFile
from megafp8.utils.strict_yaml import read_yaml


def start(config: RunConfig, dtype: torch.dtype) -> None:
    """Allocate the buffers; a second call replaces them. All ranks call it before the first forward pass.

    Raises:
        CapabilityError: the GPUs cannot write into each other's memory.
    """
    parallel, model = config.parallel, config.model
    assert config.data.seq_length is not None and model.hidden_size is not None
    assert config.training.micro_batch_size is not None
    tokens = config.data.seq_length * config.training.micro_batch_size // parallel.context_parallel_size
    modes = [UserBufferQuantizationMode.FP8] if is_fp8(config) else []
    if has_high_precision_layers(config):
        modes.append(UserBufferQuantizationMode.NONE)
    destroy_ub()
    try:
        initialize_ub(
            shape=[tokens, model.hidden_size],
            tp_size=parallel.tensor_model_parallel_size,
            quantization_modes=modes,
            dtype=dtype,
            ub_cfgs=read_settings(parallel.tp_comm_overlap_cfg),
            bootstrap_backend=parallel.tp_comm_bootstrap_backend,
        )
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        fix = "" if os.environ.get("UB_SKIPMC") == "1" else "; without NVLink multicast, set the variable UB_SKIPMC=1"
        raise CapabilityError(f"--tp-comm-overlap: {reason}{fix}; or leave the flag out") from error


def is_fp8(config: RunConfig) -> bool:
    """Whether any linear of a layer is quantized."""
    return derived.quantization_recipe(config.precision) is not None


def has_high_precision_layers(config: RunConfig) -> bool:
    """Whether any layer runs in high precision, in all steps or in some."""
    precision, may_move = config.precision, derived.moves_linears(config.training) is not None
    return not is_fp8(config) or precision.first_last_layers_bf16 or precision.fp8_schedule is not None or may_move


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
