"""Settings: records of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from megafp8.config.schema.setting import setting


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Records of a run."""

    log_interval: int = setting(100, "steps between console lines; every step is recorded")
    tensorboard_dir: Optional[str] = setting(None, "folder for TensorBoard; default tensorboard/ in --save", path=True)
    tensorboard_log_interval: int = setting(1, "steps between TensorBoard points")
    wandb_project: Optional[str] = setting(None, "Weights & Biases project (needs wandb)")
    wandb_entity: Optional[str] = setting(None, "Weights & Biases entity")
    wandb_exp_name: Optional[str] = setting(None, "Weights & Biases run name")
    wandb_save_dir: Optional[str] = setting(None, "Weights & Biases local folder", path=True)
    fp8_log_interval: Optional[int] = setting(
        None, "steps between looks at what quantization does to every operand of the linears; default never"
    )
    fp8_log_layers: str = setting(
        "*", "linears to look at: shell patterns of names such as layers.0.linear_fc1, with commas between",
        metavar="PATTERNS",
    )
    fp8_what_if: Optional[str] = setting(
        None, "recipes to try on the same tensors: tensorwise, blockwise, mxfp8, nvfp4, with commas between",
        metavar="RECIPES",
    )
    log_throughput: bool = setting(True, "log TFLOP/s and MFU", flags=("--log-throughput",))
    log_params_norm: bool = setting(False, "log the norm of the weights")
    log_num_zeros_in_grad: bool = setting(False, "log how many gradient elements are zero")
    log_memory_to_tensorboard: bool = setting(False, "log memory use")
    log_timers_to_tensorboard: bool = setting(False, "log the parts of a step's time")
    log_progress: bool = setting(False, "accepted; progress is always logged")
    progress_bar: Optional[bool] = setting(
        None, "progress bar; default on a terminal only", flags=("--progress-bar",), off=("--no-progress-bar",)
    )
    logging_level: Optional[int] = setting(None, "level of Python's logging, for example 20")
    profile: bool = setting(False, "record a torch profile of some steps")
    profile_step_start: int = setting(10, "first profiled step")
    profile_step_end: int = setting(12, "step after the last profiled one")
    profile_ranks: tuple[int, ...] = setting((0,), "ranks to profile", many=True)
