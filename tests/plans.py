"""Jobs for the tests of the time model."""

from __future__ import annotations

from typing import Any

from megafp8.config import dimensions
from megafp8.config.model_shapes import PRESETS
from megafp8.config.schema import RunConfig
from megafp8.config.settings import with_values
from megafp8.device.gpus import GPUS
from megafp8.planning.planned_run import PlannedRun

SETTINGS = {
    **PRESETS["llama3-8b"],
    "model.model_preset": "llama3-8b",
    "data.seq_length": 8192,
    "data.mock_data": True,
    "data.tokenizer_type": "NullTokenizer",
    "training.micro_batch_size": 1,
    "training.global_batch_size": 64,
    "training.train_iters": 10,
    "optimizer.lr": 1e-4,
    "precision.bf16": True,
    "precision.cross_entropy_loss_fusion": True,
    "precision.cross_entropy_fusion_impl": "te",
    "parallel.use_distributed_optimizer": True,
    "parallel.overlap_grad_reduce": True,
    "parallel.overlap_param_gather": True,
}
PIPELINE = {"parallel.pipeline_model_parallel_size": 4}
TENSOR = {"parallel.tensor_model_parallel_size": 4, "parallel.sequence_parallel": True}
FP8 = {"precision.fp8_format": "hybrid", "precision.fp8_recipe": "tensorwise"}


def config_of(changes: "dict[str, Any] | None" = None) -> RunConfig:
    """Llama 3 8B on Transformer Engine."""
    return with_values(RunConfig(), SETTINGS | (changes or {}))


def run_of(changes: "dict[str, Any] | None" = None, *, gpus: int = 8, gpu: str = "h200") -> PlannedRun:
    """The same on this number of GPUs."""
    config = config_of(changes)
    padded = dimensions.padded_vocab_size(config, config.model.vocab_size or 0)
    return PlannedRun(config=config, gpu=GPUS[gpu], world_size=gpus, padded_vocab=padded)
