"""Settings of data, checkpoints and logging."""

from dataclasses import dataclass
from typing import Optional

from megafp8.config.schema.setting import setting
from megafp8.recipes import registry


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Tokenizer and token shards."""

    data_path: tuple[str, ...] = setting((), "shard prefixes, or weight prefix weight prefix ...", many=True, path=True)
    train_data_path: tuple[str, ...] = setting((), "shards for training only", many=True, path=True)
    valid_data_path: tuple[str, ...] = setting((), "shards for validation only", many=True, path=True)
    test_data_path: tuple[str, ...] = setting((), "shards for testing only", many=True, path=True)
    split: Optional[str] = setting(None, "train,validation,test parts of --data-path; default 969,30,1")
    data_cache_path: Optional[str] = setting(None, "folder for dataset indices; default beside the run", path=True)
    mock_data: bool = setting(False, "made-up tokens instead of --data-path")
    seq_length: Optional[int] = setting(None, "tokens in one sample", flags=("--seq-length", "--encoder-seq-length"))
    tokenizer_type: Optional[str] = setting(
        None,
        "tokenizer; default GPT2BPETokenizer where --vocab-file and --merge-file are given",
        choices=(
            "SentencePieceTokenizer",
            "GPTSentencePieceTokenizer",
            "Llama2Tokenizer",
            "HuggingFaceTokenizer",
            "GPT2BPETokenizer",
            "TikTokenizer",
            "ByteLevelTokenizer",
            "NullTokenizer",
        ),
    )
    tokenizer_model: Optional[str] = setting(
        None, "file or folder of the tokenizer, or name of a tiktoken encoding", path=True
    )
    vocab_file: Optional[str] = setting(None, "vocabulary file (GPT2BPETokenizer)", path=True)
    merge_file: Optional[str] = setting(None, "merges file (GPT2BPETokenizer)", path=True)
    tiktoken_pattern: Optional[str] = setting(None, "splitting pattern of a file for TikTokenizer: v1 or v2 (default)")
    tiktoken_num_special_tokens: Optional[int] = setting(
        None, "ids before the ranks of a file for TikTokenizer; default 1000"
    )
    allow_other_tokenizer: bool = setting(False, "train on shards that another tokenizer made, by their manifests")
    num_workers: int = setting(2, "loader processes per rank; 0 loads in the training process")
    reset_position_ids: bool = setting(False, "positions restart at each document")
    reset_attention_mask: bool = setting(False, "attention does not cross documents")
    eod_mask_loss: bool = setting(False, "no loss on end-of-document tokens")
    create_attention_mask_in_dataloader: bool = setting(
        True,
        "the loader makes the attention mask (unused: attention is causal by construction)",
        off=("--no-create-attention-mask-in-dataloader",),
    )
    mmap_bin_files: bool = setting(True, "map shards into memory", off=("--no-mmap-bin-files",))
    dataloader_type: str = setting("single", "order of samples: single = one pass in index order", choices=("single",))


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Saving and loading."""

    save: Optional[str] = setting(None, "folder for checkpoints, records and the configuration of this run", path=True)
    load: Optional[str] = setting(
        None, "folder to resume from; a folder without checkpoints starts a new run", path=True
    )
    save_interval: Optional[int] = setting(None, "steps between checkpoints; the last step is always saved")
    ckpt_keep: Optional[int] = setting(None, "newest checkpoints to keep, older ones are deleted; default all")
    non_persistent_save_interval: Optional[int] = setting(
        None, "steps between checkpoints of a second kind, of which only the newest is kept"
    )
    non_persistent_ckpt_type: str = setting(
        "global", "where they lie: in one folder that all ranks share", choices=("global", "local")
    )
    non_persistent_global_ckpt_dir: Optional[str] = setting(
        None,
        "folder for them, such as one in memory; default non_persistent/ in --save",
        path=True,
    )
    async_save: bool = setting(
        False, "write checkpoints while training continues, from a copy of the state in host memory"
    )
    async_save_timeout: int = setting(300, "seconds after which a checkpoint that is still being written has failed")
    ckpt_max_failures: int = setting(3, "saves in a row that may fail before the run stops; 0: any number")
    ckpt_verify: str = setting(
        "hash",
        "what is compared with a checkpoint's manifest before it is loaded: every byte, or sizes only",
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
        False,
        "take the schedule from the checkpoint",
        flags=("--use-checkpoint-opt_param-scheduler", "--use-checkpoint-opt-param-scheduler"),
    )
    override_opt_param_scheduler: bool = setting(
        False,
        "take the schedule from the flags although it differs",
        flags=("--override-opt_param-scheduler", "--override-opt-param-scheduler"),
    )
    override_precision: bool = setting(
        False, "resume in other number formats than the checkpoint's: from BF16 to FP8 and back, or in another recipe"
    )
    override_sample_order: bool = setting(
        False,
        "continue in this run's order of samples although the checkpoint was trained in another (other data, "
        "blend, split, seed or sequence length)",
    )


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
        None, "steps between quantization statistics of every operand of the linears; default never"
    )
    fp8_log_layers: str = setting(
        "*",
        "linears with statistics: shell patterns of names such as layers.0.linear_fc1, with commas between",
        metavar="PATTERNS",
    )
    fp8_what_if: Optional[str] = setting(
        None,
        f"recipes to try on the same tensors: {', '.join(each.name for each in registry.stateless())}; commas between",
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
    verbose: bool = setting(
        False,
        "print the recipe of every GEMM, the steps of setup and the warnings of all ranks at the start; with --dry-run "
        "also all settings",
    )
    logging_level: Optional[int] = setting(None, "level of Python's logging, for example 20")
    profile: bool = setting(False, "record a torch profile of some steps")
    profile_step_start: int = setting(10, "first profiled step")
    profile_step_end: int = setting(12, "step after the last profiled one")
    profile_ranks: tuple[int, ...] = setting((0,), "ranks to profile", many=True)
