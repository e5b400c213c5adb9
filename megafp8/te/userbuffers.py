"""Buffers through which Transformer Engine's linears talk to tensor-parallel ranks while their GEMMs run.

The GPUs write into each other's memory, without NCCL. What is sent in FP8 is sent as codes: all-gathers of inputs and
of gradients; what is reduced is in the run's own type.
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
    """Allocate them; all ranks call it, before the first forward pass. A second call makes them anew.

    Raises:
        CapabilityError: the GPUs cannot write into each other's memory.
    """
    parallel, model = config.parallel, config.model
    assert config.data.seq_length is not None and model.hidden_size is not None
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
        mend = "" if os.environ.get("UB_SKIPMC") == "1" else "; without NVLink multicast, set the variable UB_SKIPMC=1"
        raise CapabilityError(f"--tp-comm-overlap: {reason}{mend}; or leave the flag out") from error


def is_fp8(config: RunConfig) -> bool:
    """Whether any linear of a layer quantizes."""
    return derived.quantization_recipe(config.precision) is not None


def has_high_precision_layers(config: RunConfig) -> bool:
    """Whether any layer does not, or not in all steps."""
    precision = config.precision
    return not is_fp8(config) or precision.first_last_layers_bf16 or precision.fp8_schedule is not None


def read_settings(path: Optional[str]) -> Optional[dict[str, Any]]:
    """How each GEMM's communication is overlapped, by its name: `qkv_fprop`, `fc2_dgrad`...

    Raises:
        ConfigError: the file is no such table.
    """
    if path is None:
        return None
    try:
        table = read_yaml(path)
    except UnreadableFile as error:
        raise ConfigError(f"--tp-comm-overlap-cfg {path}: cannot be read: {error.reason}") from error
    if not isinstance(table, dict) or not all(isinstance(entry, dict) for entry in table.values()):
        raise ConfigError(
            [
                f"--tp-comm-overlap-cfg {path}: give a table of settings for each GEMM, such as "
                "`qkv_fprop: {method: ring_exchange}`"
            ]
        )
    return table
