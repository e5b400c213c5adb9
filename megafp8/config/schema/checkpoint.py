"""Settings: saving and loading."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from megafp8.config.schema.setting import setting


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Saving and loading."""

    save: Optional[str] = setting(None, "folder for checkpoints, records and the configuration of this run", path=True)
    load: Optional[str] = setting(None, "folder to resume from; a folder without checkpoints starts anew", path=True)
    save_interval: Optional[int] = setting(None, "steps between checkpoints; the last step is always saved")
    ckpt_keep: Optional[int] = setting(None, "newest checkpoints to keep, older ones are deleted; default all")
    non_persistent_save_interval: Optional[int] = setting(
        None, "steps between checkpoints of a second kind, of which only the newest is kept"
    )
    non_persistent_ckpt_type: str = setting(
        "global", "where they lie: in one folder that all ranks share", choices=("global", "local")
    )
    non_persistent_global_ckpt_dir: Optional[str] = setting(
        None, "folder for them, such as one in memory; default non_persistent/ in --save",
        path=True,
    )
    async_save: bool = setting(
        False, "write checkpoints while training goes on, from a copy of the state in host memory"
    )
    async_save_timeout: int = setting(300, "seconds after which a checkpoint that is still being written has failed")
    ckpt_max_failures: int = setting(3, "saves in a row that may fail before the run stops; 0: any number")
    ckpt_verify: str = setting(
        "hash", "what is compared with a checkpoint's manifest before it is loaded: every byte, or sizes only",
        choices=("hash", "size"),
    )
    no_save_optim: bool = setting(False, "leave optimizer state out of checkpoints")
    no_save_rng: bool = setting(False, "leave random-number state out of checkpoints")
    no_load_optim: bool = setting(False, "do not load optimizer state")
    no_load_rng: bool = setting(False, "do not load random-number state")
    finetune: bool = setting(False, "load weights only and start at step 0")
    pretrained_checkpoint: Optional[str] = setting(
        None, "folder whose weights start a run that has nothing to resume", path=True
    )
    exit_on_missing_checkpoint: bool = setting(False, "stop when --load holds no checkpoint")
    ckpt_format: str = setting("torch_dist", "checkpoint format", choices=("torch_dist",))
    dist_ckpt_strictness: str = setting(
        "assume_ok_unexpected",
        "keys that only the run (unexpected) or only the checkpoint (missing) has: an error (assume_ok_*, raise_*), a "
        "note (log_*, return_*) or nothing (ignore_all); *_unexpected passes over missing ones",
        choices=(
            "assume_ok_unexpected", "log_unexpected", "log_all", "raise_unexpected", "raise_all",
            "return_unexpected", "return_all", "ignore_all",
        ),
    )  # fmt: skip
    ckpt_step: Optional[int] = setting(None, "step to load; default the newest")
    use_checkpoint_opt_param_scheduler: bool = setting(
        False, "take the schedule from the checkpoint",
        flags=("--use-checkpoint-opt_param-scheduler", "--use-checkpoint-opt-param-scheduler"),
    )
    override_opt_param_scheduler: bool = setting(
        False, "take the schedule from the flags although it differs",
        flags=("--override-opt_param-scheduler", "--override-opt-param-scheduler"),
    )
    override_precision: bool = setting(
        False, "resume in other number formats than the checkpoint's: from BF16 to FP8 and back, or in another recipe"
    )
    override_sample_order: bool = setting(
        False, "go on in this run's order of samples although the checkpoint was trained in another (other data, "
        "blend, split, seed or sequence length)",
    )
