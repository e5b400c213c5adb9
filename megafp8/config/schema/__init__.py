"""Schema of the settings: name, type, default, help text and flags of each.

Each section is a frozen dataclass; `RunConfig` has one field per section. The flag of a field `hidden_size` is
`--hidden-size` unless its declaration gives another. Flags, defaults and meanings are Megatron-LM's where Megatron-LM
has the flag. `None` means "not given"; functions of `config/` (`derived.py`, `dimensions.py`, `iterations.py`) compute
the value to use, and never write it back. Only settings with `Role.AUTOMATIC`, and a few that `resources/automatic.py`
names, have their chosen values in the configuration of a run.

The modules of this package do without `from __future__ import annotations`, so that the types of fields are objects
and not strings that would have to be evaluated.
"""

from dataclasses import dataclass
from typing import ClassVar

from megafp8.config.schema.io import CheckpointConfig, DataConfig, LoggingConfig
from megafp8.config.schema.model import ModelConfig, ParallelConfig
from megafp8.config.schema.precision import PrecisionConfig
from megafp8.config.schema.setting import AUTO, OWN, Role, setting
from megafp8.config.schema.training import OptimizerConfig, TrainingConfig

__all__ = [
    "AUTO", "CheckpointConfig", "DataConfig", "LoggingConfig", "ModelConfig", "OptimizerConfig", "ParallelConfig",
    "PrecisionConfig", "RunConfig", "TrainingConfig",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All settings of one run."""

    ROLE: ClassVar[Role] = Role.LEARNING | Role.MEMORY

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
        group="general",
        megatron=OWN,
    )
