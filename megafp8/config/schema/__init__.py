"""Every setting of a run, once: name, type, default, help and the command-line spelling.

A section is a frozen dataclass in a file of its own; `RunConfig` holds one of each. A field `hidden_size` is the flag
`--hidden-size` unless its metadata says otherwise. Spelling, default and meaning are Megatron-LM's wherever Megatron
has the flag. `None` means "not given": what it then becomes is worked out in `derived.py`, never written back here.
"""

from __future__ import annotations

from dataclasses import dataclass

from megafp8.config.schema.io import CheckpointConfig, DataConfig, LoggingConfig
from megafp8.config.schema.model import ModelConfig, ParallelConfig
from megafp8.config.schema.precision import PrecisionConfig
from megafp8.config.schema.setting import AUTO, setting
from megafp8.config.schema.training import OptimizerConfig, TrainingConfig

__all__ = [
    "AUTO", "CheckpointConfig", "DataConfig", "LoggingConfig", "ModelConfig", "OptimizerConfig", "ParallelConfig",
    "PrecisionConfig", "RunConfig", "TrainingConfig",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All sections of one run, and the overrides of megatron-core's own configuration fields."""

    model: ModelConfig = ModelConfig()
    parallel: ParallelConfig = ParallelConfig()
    precision: PrecisionConfig = PrecisionConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    data: DataConfig = DataConfig()
    training: TrainingConfig = TrainingConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    overrides: tuple[str, ...] = setting(
        (),
        "set a megatron-core configuration field: transformer.FIELD=VALUE, ddp.FIELD=VALUE or optimizer.FIELD=VALUE",
        flags=("--override",),
        many=True,
        metavar="SECTION.FIELD=VALUE",
    )
