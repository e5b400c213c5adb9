"""Settings of data, checkpoints and logging."""

from dataclasses import dataclass
from typing import ClassVar, Optional

from megafp8.config.schema.setting import (
    AT_LEAST_1,
    COMMON,
    DEPRECATED,
    NO_ROLE,
    NOT_NEGATIVE,
    OWN,
    Range,
    Role,
    setting,
)
from megafp8.recipes import registry

CUT, BEST_FIT = "cut", "best-fit"

# A table: default and help of each setting, then what else is known about it.
# fmt: off


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Tokenizer and token shards."""

    ROLE: ClassVar[Role] = Role.LEARNING

    data_path: tuple[str, ...] = setting(
        (), "path prefixes of token shards; for a blend: weight prefix weight prefix ...",
        many=True, path=True, role=Role.SAMPLES, metavar="PREFIX", audience=COMMON,
    )
    train_data_path: tuple[str, ...] = setting(
        (), "token shards for training only", many=True, path=True, role=Role.SAMPLES, metavar="PREFIX"
    )
    valid_data_path: tuple[str, ...] = setting(
        (), "token shards for validation only", many=True, path=True, role=Role.SAMPLES, metavar="PREFIX"
    )
    test_data_path: tuple[str, ...] = setting(
        (), "token shards for testing only", many=True, path=True, role=Role.SAMPLES, metavar="PREFIX"
    )
    data_phases: tuple[str, ...] = setting(
        (), "YAML file with phases of training data, each a blend and the sample, token or step at which it starts; "
        "--data-path then gives the validation and test data",
        many=True, role=Role.LEARNING | Role.SAMPLES, metavar="FILE", megatron=OWN,
    )
    split: Optional[str] = setting(
        None, "proportions of --data-path for training, validation and test",
        role=Role.LEARNING | Role.SAMPLES, unset="969,30,1", metavar="RATIOS", megatron="ignored with --mock-data",
    )
    data_cache_path: Optional[str] = setting(
        None, "folder for the cache of dataset indices",
        path=True, role=Role.SAMPLES | Role.OUTPUT, unset="in --save, else next to the shards", metavar="DIR",
        megatron="the default is next to the shards; files are pickles",
    )
    data_cache_gib: float = setting(
        64.0, "size of the local cache for shards in object storage, in GiB",
        range=Range(0.125, 1e6), role=Role.OUTPUT, unit="GiB", megatron=OWN,
    )
    mock_data: bool = setting(False, "train on synthetic tokens instead of --data-path", audience=COMMON)
    seq_length: Optional[int] = setting(
        None, "sequence length in tokens",
        flags=("--seq-length", "--encoder-seq-length"), range=AT_LEAST_1,
        role=Role.LEARNING | Role.SAMPLES | Role.CARRIED | Role.MEMORY, unit="tokens", audience=COMMON,
    )
    packing: str = setting(
        CUT, "how documents fill sequences; cut: one after the other, cut where a sequence ends; best-fit: whole, with "
        "padding without loss at the end, and only documents longer than a sequence are cut",
        choices=(CUT, BEST_FIT), role=Role.LEARNING | Role.SAMPLES, megatron=OWN,
    )
    tokenizer_type: Optional[str] = setting(
        None, "tokenizer",
        choices=(
            "SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer", "HuggingFaceTokenizer",
            "GPT2BPETokenizer", "TikTokenizer", "ByteLevelTokenizer", "NullTokenizer",
        ),
        role=Role.LEARNING | Role.SAMPLES | Role.CARRIED, unset="GPT2BPETokenizer with --vocab-file and --merge-file",
        audience=COMMON, megatron="some tokenizers add tokens of their own; here ids are those of the tokenizer's file",
    )
    tokenizer_model: Optional[str] = setting(
        None, "tokenizer file or folder, or the name of a tiktoken encoding",
        path=True, role=Role.LEARNING | Role.SAMPLES | Role.CARRIED, metavar="PATH", audience=COMMON,
    )
    vocab_file: Optional[str] = setting(
        None, "vocabulary file (GPT2BPETokenizer)",
        path=True, role=Role.LEARNING | Role.SAMPLES | Role.CARRIED, metavar="FILE",
    )
    merge_file: Optional[str] = setting(
        None, "merges file (GPT2BPETokenizer)",
        path=True, role=Role.LEARNING | Role.SAMPLES | Role.CARRIED, metavar="FILE",
    )
    tiktoken_pattern: Optional[str] = setting(
        None, "pre-tokenization pattern of a TikTokenizer file: v1 or v2", role=Role.LEARNING | Role.CARRIED, unset="v2"
    )
    tiktoken_num_special_tokens: Optional[int] = setting(
        None, "number of special tokens of a TikTokenizer file, which have the first ids",
        range=AT_LEAST_1, role=Role.LEARNING | Role.CARRIED, unset="1000",
    )
    allow_other_tokenizer: bool = setting(False, "accept shards whose manifest names another tokenizer", megatron=OWN)
    num_workers: int = setting(
        2, "data loader processes per rank; 0 loads data in the training process", range=NOT_NEGATIVE, role=Role.OUTPUT
    )
    reset_position_ids: bool = setting(False, "restart position ids at each document")
    reset_attention_mask: bool = setting(False, "do not attend across documents", role=Role.LEARNING | Role.MEMORY)
    eod_mask_loss: bool = setting(False, "exclude end-of-document tokens from the loss")
    create_attention_mask_in_dataloader: bool = setting(
        True, "create the attention mask in the data loader (no effect: attention is always causal)",
        off=("--no-create-attention-mask-in-dataloader",), role=NO_ROLE, audience=DEPRECATED,
        megatron="has an effect; here attention is always causal",
    )
    mmap_bin_files: bool = setting(True, "memory-map the shards", off=("--no-mmap-bin-files",), role=Role.OUTPUT)
    dataloader_type: str = setting(
        "single", "order of samples; single: in the order of the dataset index",
        choices=("single", "cyclic", "external"),
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Saving and loading."""

    ROLE: ClassVar[Role] = Role.OUTPUT

    save: Optional[str] = setting(
        None, "folder for checkpoints, records and settings of this run",
        path=True, role=Role.SAMPLES | Role.OUTPUT, unset="nothing is saved", metavar="DIR", audience=COMMON,
    )
    load: Optional[str] = setting(
        None, "folder to resume from; without a checkpoint in it, the run starts from scratch",
        path=True, metavar="DIR", audience=COMMON,
    )
    save_interval: Optional[int] = setting(
        None, "steps between checkpoints; the last step is always saved",
        range=AT_LEAST_1, unset="only the last step", unit="steps", audience=COMMON,
    )
    ckpt_keep: Optional[int] = setting(
        None, "number of newest checkpoints to keep; older ones are deleted",
        range=AT_LEAST_1, requires="--save", unset="all", megatron=OWN,
    )
    save_retain_interval: Optional[int] = setting(
        None, "keep the checkpoints of steps that are multiples of this, besides the newest --ckpt-keep (1 unless "
        "given)",
        needs="--save", range=AT_LEAST_1, unit="steps",
    )
    non_persistent_save_interval: Optional[int] = setting(
        None, "steps between non-persistent checkpoints, of which only the newest is kept",
        range=AT_LEAST_1, requires="--save", unit="steps",
    )
    non_persistent_ckpt_type: str = setting(
        "global", "location of non-persistent checkpoints; global: one folder shared by all ranks",
        choices=("global", "local"), megatron="has local",
    )
    non_persistent_global_ckpt_dir: Optional[str] = setting(
        None, "folder for non-persistent checkpoints, for example in a RAM disk",
        path=True, unset="non_persistent/ in --save", metavar="DIR",
    )
    async_save: bool = setting(
        False, "write checkpoints in the background, from a copy of the state in host memory", needs="--save"
    )
    async_save_timeout: int = setting(
        300, "timeout for writing a checkpoint in the background, in seconds",
        range=AT_LEAST_1, unit="seconds", megatron=OWN,
    )
    ckpt_max_failures: int = setting(
        3, "consecutive failed saves after which the run stops; 0: no limit", range=NOT_NEGATIVE, megatron=OWN
    )
    ckpt_verify: str = setting(
        "hash", "check against the checkpoint's manifest before loading; hash: every byte, size: sizes, and small "
        "files",
        choices=("hash", "size"), megatron=OWN,
    )
    no_save_optim: bool = setting(False, "do not save optimizer state", needs="--save")
    no_save_rng: bool = setting(False, "do not save random-number state", needs="--save")
    no_load_optim: bool = setting(False, "do not load optimizer state", needs="--load")
    no_load_rng: bool = setting(False, "do not load random-number state", needs="--load")
    finetune: bool = setting(False, "load only the weights of --load and start at step 0")
    pretrained_checkpoint: Optional[str] = setting(
        None, "folder with a checkpoint whose weights initialize the run if --load has no checkpoint",
        path=True, metavar="DIR",
    )
    exit_on_missing_checkpoint: bool = setting(
        False, "exit with an error if --load has no checkpoint", requires="--load"
    )
    ckpt_format: str = setting(
        "torch_dist", "checkpoint format; others of Megatron-LM are not supported",
        choices=("torch_dist", "torch", "torch_dcp", "fsdp_dtensor", "zarr"),
        megatron="other formats are supported, too",
    )
    use_checkpoint_args: bool = setting(
        False, "take the settings of the model and the tokenizer from the checkpoint, unless a flag gives them"
    )
    use_mp_args_from_checkpoint_args: bool = setting(
        False, "with --use-checkpoint-args, take the sizes of tensor and pipeline parallelism as well",
        requires="--use-checkpoint-args",
    )
    dist_ckpt_strictness: str = setting(
        "assume_ok_unexpected", "handling of keys that only the run (unexpected) or only the checkpoint (missing) has: "
        "error (assume_ok_*, raise_*), log message (log_*, return_*) or nothing (ignore_all); *_unexpected ignores "
        "missing keys",
        choices=(
            "assume_ok_unexpected", "log_unexpected", "log_all", "raise_unexpected", "raise_all", "return_unexpected",
            "return_all", "ignore_all",
        ),
        megatron="a weight that the checkpoint lacks may stay as initialized; return_* does not log",
    )
    ckpt_step: Optional[int] = setting(
        None, "step of the checkpoint to load", range=AT_LEAST_1, requires="--load", unset="the newest", unit="step"
    )
    use_checkpoint_opt_param_scheduler: bool = setting(
        False, "use the checkpoint's learning-rate and weight-decay schedule instead of the flags'",
        flags=("--use-checkpoint-opt_param-scheduler", "--use-checkpoint-opt-param-scheduler"), needs="--load",
        megatron="Adam's betas and epsilon are the checkpoint's, too",
    )
    override_opt_param_scheduler: bool = setting(
        False, "use the flags' learning-rate and weight-decay schedule even if the checkpoint's differs",
        flags=("--override-opt_param-scheduler", "--override-opt-param-scheduler"), needs="--load",
        megatron="Adam's betas and epsilon, --lr and --min-lr are the checkpoint's all the same",
    )
    override_precision: bool = setting(
        False, "allow resuming with a different precision or recipe than the checkpoint's",
        requires="--load", megatron=OWN,
    )
    override_sample_order: bool = setting(
        False, "allow resuming with a different sample order than the checkpoint's (data, blend, split, seed or "
        "sequence length)",
        requires="--load", megatron=OWN,
    )


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Records of a run."""

    ROLE: ClassVar[Role] = Role.OUTPUT

    log_interval: int = setting(
        100, "steps between console lines; the records have every step, and name saturated operands at this interval",
        range=AT_LEAST_1, unit="steps", audience=COMMON,
    )
    tensorboard_dir: Optional[str] = setting(
        None, "folder for TensorBoard files",
        path=True, unset="tensorboard/ in --save", metavar="DIR", megatron="no TensorBoard by default",
    )
    tensorboard_log_interval: int = setting(1, "steps between TensorBoard points", range=AT_LEAST_1, unit="steps")
    wandb_project: Optional[str] = setting(
        None, "Weights & Biases project (needs wandb)", metavar="NAME", audience=COMMON
    )
    wandb_entity: Optional[str] = setting(None, "Weights & Biases entity", needs="--wandb-project", metavar="NAME")
    wandb_exp_name: Optional[str] = setting(None, "Weights & Biases run name", needs="--wandb-project", metavar="NAME")
    wandb_save_dir: Optional[str] = setting(
        None, "local folder for Weights & Biases files", path=True, needs="--wandb-project", metavar="DIR"
    )
    mlflow_experiment: Optional[str] = setting(
        None, "MLflow experiment (needs mlflow)", requires="--save", metavar="NAME", megatron=OWN
    )
    mlflow_run_name: Optional[str] = setting(
        None, "MLflow run name", requires="--mlflow-experiment", unset="MLflow's", metavar="NAME", megatron=OWN
    )
    mlflow_tracking_uri: Optional[str] = setting(
        None, "MLflow server or store: http://..., sqlite:///FILE or file:DIR",
        requires="--mlflow-experiment", unset="MLFLOW_TRACKING_URI, else MLflow's default", metavar="URI", megatron=OWN,
    )
    metrics_port: Optional[int] = setting(
        None, "port of rank 0 on which Prometheus reads the metrics of the job (needs prometheus-client)",
        range=Range(1, 65535), metavar="PORT", megatron=OWN,
    )
    fp8_log_interval: Optional[int] = setting(
        None, "steps between quantization statistics of the operands of linear layers",
        range=AT_LEAST_1, role=Role.OUTPUT | Role.MEMORY, unset="never", unit="steps", megatron=OWN,
    )
    fp8_log_layers: str = setting(
        "*", "linear layers with quantization statistics: comma-separated shell patterns of names such as "
        "layers.0.linear_fc1",
        metavar="PATTERNS", requires="--fp8-log-interval", role=Role.OUTPUT | Role.MEMORY, megatron=OWN,
    )
    fp8_what_if: Optional[str] = setting(
        None,
        "comma-separated recipes for which to compute the same statistics: "
        f"{', '.join(each.name for each in registry.stateless())}",
        metavar="RECIPES", requires="--fp8-log-interval", role=Role.OUTPUT | Role.MEMORY, megatron=OWN,
    )
    sample_interval: Optional[int] = setting(
        None, "steps between samples of text, the most probable continuations of prompts; each new token takes a "
        "forward pass over the text so far",
        range=AT_LEAST_1, unset="never", unit="steps", megatron=OWN,
    )
    sample_prompt: tuple[str, ...] = setting(
        (), "prompts of the samples", many=True, requires="--sample-interval", unset="a new document", metavar="TEXT",
        megatron=OWN,
    )
    sample_prompts: Optional[str] = setting(
        None, "file with more prompts, one a line", path=True, requires="--sample-interval", metavar="FILE",
        megatron=OWN,
    )
    sample_tokens: int = setting(
        64, "maximum number of tokens of a sample",
        range=AT_LEAST_1, requires="--sample-interval", unit="tokens", megatron=OWN,
    )
    log_throughput: bool = setting(
        True, "log TFLOP/s and MFU", flags=("--log-throughput",), megatron="off by default; here always on"
    )
    log_params_norm: bool = setting(False, "log the norm of the weights")
    log_num_zeros_in_grad: bool = setting(False, "log the number of zero gradient elements")
    log_max_attention_logit: bool = setting(
        False, "log the largest attention logit of each step, before softcapping; multiplies queries and keys once "
        "more, about half of the products of a forward pass of attention", role=Role.OUTPUT | Role.MEMORY,
    )
    log_energy: bool = setting(
        False, "log joules for a token, watts of a GPU and the time that it is busy, from NVIDIA's driver",
        megatron="only joules and watts; needs pynvml",
    )
    log_memory_to_tensorboard: bool = setting(False, "log memory use to TensorBoard")
    log_timers_to_tensorboard: bool = setting(False, "log the time of the parts of a step to TensorBoard")
    log_progress: bool = setting(
        False, "no effect: progress is always logged",
        audience=DEPRECATED, megatron="writes progress.txt; here without effect",
    )
    progress_bar: Optional[bool] = setting(
        None, "show a progress bar",
        flags=("--progress-bar",), off=("--no-progress-bar",), unset="on a terminal", megatron=OWN,
    )
    verbose: bool = setting(
        False, "print the recipe of every GEMM, the steps of setup and the warnings of all ranks at the start; with "
        "--dry-run also all settings",
        megatron=OWN,
    )
    logging_level: Optional[int] = setting(
        None, "level of Python's logging module, for example 20 (INFO)", range=NOT_NEGATIVE
    )
    memory_snapshot_path: Optional[str] = setting(
        None, "file for torch's snapshots of GPU memory, with the rank added to its name: when memory is lacking, and "
        "after the step in which a rank gets SIGUSR2",
        path=True, unset="snapshot.pickle with --record-memory-history", metavar="FILE",
        megatron="of the last rank only; also at --log-interval",
    )
    record_memory_history: bool = setting(
        False, "record where GPU memory is allocated, in snapshots and for the memory of each layer",
        megatron="of the last rank only",
    )
    profile: bool = setting(False, "profile some steps with torch.profiler")
    profile_step_start: int = setting(10, "first profiled step", range=NOT_NEGATIVE, unit="step")
    profile_step_end: int = setting(12, "step at which profiling ends (not profiled)", range=NOT_NEGATIVE, unit="step")
    profile_shapes: bool = setting(
        False, "record the shapes of operands in the profile", flags=("--pytorch-profiler-collect-shapes",)
    )
    profile_callstack: bool = setting(
        False, "record Python's call stacks in the profile", flags=("--pytorch-profiler-collect-callstack",)
    )
    profile_ranks: tuple[int, ...] = setting((0,), "ranks to profile", many=True, range=NOT_NEGATIVE)
