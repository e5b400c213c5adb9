"""Every setting of a run, once: name, type, default, help and the command-line spelling.

A section is a frozen dataclass; `RunConfig` holds one of each. A field `hidden_size` is the flag `--hidden-size`
unless its metadata says otherwise. Spelling, default and meaning are Megatron-LM's wherever Megatron has the flag.
`None` means "not given": what it then becomes is worked out in `derived.py`, never written back here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

AUTO = 0
"""What the word `auto` is read as, in settings that take it."""


def setting(
    default: Any,
    help: str,
    *,
    flags: tuple[str, ...] = (),
    off: tuple[str, ...] = (),
    choices: tuple[Any, ...] = (),
    many: bool = False,
    auto: bool = False,
    metavar: Optional[str] = None,
) -> Any:
    """Declare one field of a section.

    Args:
        default: value when the flag is absent.
        help: one line for `--help`; says the unit where there is one.
        flags: spellings that set the field; empty means `--` and the field's name with dashes.
            For a boolean that is True by default and has only an `off` spelling, give `flags=()`.
        off: spellings that set a boolean field to False (for example `--disable-bias-linear`).
        choices: the values allowed.
        many: the flag takes one or more values and the field is a tuple.
        auto: a count that may also be the word `auto`, kept as `AUTO`.
    """
    metadata = {
        "help": help, "flags": flags, "off": off, "choices": choices, "many": many, "auto": auto, "metavar": metavar
    }  # fmt: skip
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of the GPT."""

    model_preset: Optional[str] = setting(
        None, "named model shape whose values apply where a flag does not say otherwise (see --list-presets)"
    )
    num_layers: Optional[int] = setting(None, "number of transformer layers")
    hidden_size: Optional[int] = setting(None, "width of the residual stream")
    ffn_hidden_size: Optional[int] = setting(
        None, "width of the MLP; default 4 x hidden size, with --swiglu 4 x hidden x 2/3 rounded to 64"
    )
    num_attention_heads: Optional[int] = setting(None, "number of query heads")
    kv_channels: Optional[int] = setting(None, "width of one head; default hidden size / heads")
    group_query_attention: bool = setting(False, "share key and value heads (grouped-query attention)")
    num_query_groups: int = setting(1, "number of key/value heads, with --group-query-attention")
    max_position_embeddings: Optional[int] = setting(
        None, "longest sequence that the position embeddings allow; must be at least the sequence length"
    )
    position_embedding_type: str = setting(
        "learned_absolute", "position embeddings", choices=("learned_absolute", "rope", "none")
    )
    rotary_base: int = setting(10000, "base of the rotary frequencies")
    rotary_percent: float = setting(1.0, "fraction of a head's channels that rotate")
    rotary_interleaved: bool = setting(False, "rotate neighbouring channels instead of halves")
    rotary_seq_len_interpolation_factor: Optional[int] = setting(
        None, "linear interpolation factor of rotary positions"
    )
    use_rope_scaling: bool = setting(False, "scale rotary frequencies as Llama 3.1 does")
    rope_scaling_factor: float = setting(8.0, "factor for --use-rope-scaling")
    normalization: str = setting("LayerNorm", "normalization of every layer", choices=("LayerNorm", "RMSNorm"))
    norm_epsilon: float = setting(1e-5, "epsilon of the normalization")
    apply_layernorm_1p: bool = setting(False, "norm weights are stored as weight - 1")
    swiglu: bool = setting(False, "gated SiLU instead of GELU in the MLP")
    squared_relu: bool = setting(False, "squared ReLU instead of GELU in the MLP")
    add_bias_linear: bool = setting(True, "biases in the linears", off=("--disable-bias-linear",))
    add_qkv_bias: bool = setting(False, "bias in the QKV projection only")
    qk_layernorm: bool = setting(False, "normalize queries and keys")
    share_embeddings_and_output_weights: bool = setting(
        True, "one matrix for embedding and output layer", off=("--untie-embeddings-and-output-weights",)
    )
    vocab_size: Optional[int] = setting(None, "tokens in the vocabulary before padding; default the tokenizer's")
    make_vocab_size_divisible_by: int = setting(128, "vocabulary is padded to a multiple of this x tensor-parallel")
    attention_dropout: float = setting(0.1, "dropout of the attention probabilities")
    hidden_dropout: float = setting(0.1, "dropout of the hidden state")
    init_method_std: float = setting(0.02, "standard deviation of the initial weights")
    attention_softmax_in_fp32: bool = setting(True, "attention softmax in FP32", flags=("--attention-softmax-in-fp32",))
    apply_query_key_layer_scaling: bool = setting(False, "scale Q*K by 1 / layer number (implies FP32 softmax)")
    window_size: Optional[int] = setting(None, "sliding attention window in tokens; default full causal attention")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the work is split over ranks. world = tensor x pipeline x context x data."""

    tensor_model_parallel_size: int = setting(1, "ranks that share each layer's matrices")
    pipeline_model_parallel_size: int = setting(1, "ranks that share the stack of layers")
    num_layers_per_virtual_pipeline_stage: Optional[int] = setting(
        None, "layers in one chunk of the interleaved pipeline schedule"
    )
    num_virtual_stages_per_pipeline_rank: Optional[int] = setting(
        None, "chunks per pipeline rank of the interleaved schedule"
    )
    context_parallel_size: int = setting(1, "ranks that share each sequence")
    cp_comm_type: str = setting(
        "p2p", "how context-parallel attention communicates (TE)", choices=("p2p", "a2a", "allgather")
    )
    sequence_parallel: bool = setting(
        False, "split norms and dropout over the tensor-parallel ranks along the sequence"
    )
    use_distributed_optimizer: bool = setting(False, "shard optimizer state over the data-parallel ranks")
    overlap_grad_reduce: bool = setting(False, "reduce gradients while the backward pass runs")
    overlap_param_gather: bool = setting(False, "gather parameters while the forward pass runs")
    overlap_p2p_comm: bool = setting(
        True, "overlap pipeline sends with computation (interleaved schedule)", off=("--no-overlap-p2p-communication",)
    )
    tp_comm_overlap: bool = setting(
        False, "send activations between tensor-parallel ranks while GEMMs run (Transformer Engine's user buffers)"
    )
    tp_comm_overlap_cfg: Optional[str] = setting(
        None, "YAML file with how each GEMM's communication is overlapped (`ub_cfgs` of Transformer Engine)",
        metavar="FILE",
    )
    tp_comm_overlap_ag: bool = setting(True, "overlap all-gathers", off=("--disable-tp-comm-overlap-ag",))
    tp_comm_overlap_rs: bool = setting(True, "overlap reduce-scatters", off=("--disable-tp-comm-overlap-rs",))
    tp_comm_overlap_rs_dgrad: bool = setting(False, "overlap reduce-scatters with dgrad, not with wgrad")
    tp_comm_bulk_dgrad: bool = setting(
        True, "overlap all-gathers of inputs with dgrad as a whole", off=("--disable-tp-comm-bulk-dgrad",)
    )
    tp_comm_bulk_wgrad: bool = setting(
        True, "overlap reduce-scatters with wgrad as a whole", off=("--disable-tp-comm-bulk-wgrad",)
    )
    tp_comm_bootstrap_backend: str = setting(
        "nccl", "collectives that set up the user buffers", choices=("nccl", "gloo", "mpi")
    )
    ddp_bucket_size: Optional[int] = setting(None, "parameters in one gradient bucket; default megatron-core's")
    ddp_average_in_collective: bool = setting(False, "average gradients inside the collective")
    distributed_backend: Optional[str] = setting(
        None, "collective backend; default nccl on CUDA and gloo on CPU", choices=("nccl", "gloo")
    )
    distributed_timeout_minutes: int = setting(10, "minutes after which a collective gives up")


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Number formats."""

    bf16: bool = setting(False, "BF16 weights and activations with FP32 master weights")
    fp16: bool = setting(False, "FP16 weights and activations with loss scaling")
    fp8_format: Optional[str] = setting(
        None, "FP8 in the linears: e4m3 for all tensors, hybrid: e4m3 forward and e5m2 gradients, e5m2 for all tensors "
        "(emulated only: Transformer Engine has no such format)",
        choices=("e4m3", "hybrid", "e5m2"),
    )
    fp8_recipe: str = setting(
        "delayed", "how FP8 scales are found", choices=("tensorwise", "delayed", "blockwise", "mxfp8")
    )
    fp4_format: Optional[str] = setting(None, "FP4 in the linears: e2m1 for all tensors", choices=("e2m1",))
    fp4_recipe: str = setting("nvfp4", "how FP4 scales are found", choices=("nvfp4",))
    fp4_hadamard: bool = setting(
        True, "nvfp4: Hadamard-transform the operands of the weight gradient", off=("--no-fp4-hadamard",)
    )
    fp4_stochastic_rounding: bool = setting(
        True, "nvfp4: round gradients stochastically", off=("--no-fp4-stochastic-rounding",)
    )
    fp4_2d_weights: bool = setting(
        True, "nvfp4: 16 x 16 blocks for weights, the same values forward and backward", off=("--no-fp4-2d-weights",)
    )
    fp8_margin: int = setting(0, "delayed: scale is divided by 2^margin")
    fp8_amax_history_len: int = setting(1, "delayed: steps of amax history")
    fp8_amax_compute_algo: str = setting(
        "most_recent", "delayed: amax from the history", choices=("most_recent", "max")
    )
    fp8_delayed_start: str = setting(
        "calibrated",
        "delayed: scales of the first step. calibrated = from the first batch, which runs forward and backward before "
        "the first step without an update; te = all 1, as Transformer Engine starts",
        choices=("calibrated", "te"),
    )
    tp_only_amax_red: bool = setting(
        False, "delayed: reduce amaxes over tensor- and context-parallel ranks only, not over data-parallel ones"
    )
    fp8_wgrad: bool = setting(True, "weight gradient GEMM in FP8", off=("--no-fp8-wgrad", "--disable-fp8-wgrad"))
    fp8_param_gather: bool = setting(
        False, "keep the linears' weights as FP8 codes and scales, without a BF16 copy, and gather those: half the "
        "bytes; emulated with tensorwise, delayed and blockwise",
    )
    fp8_power_2_scale: bool = setting(False, "tensorwise: round scales down to powers of two")
    fp8_block_scaling_fp32_scales: bool = setting(
        False, "blockwise: FP32 scales instead of powers of two (emulated; in Transformer Engine the environment "
        "variable NVTE_FP8_BLOCK_SCALING_FP32_SCALES does it)",
    )
    fp8_amax_reduction: str = setting(
        "te",
        "emulated amax reduction over tensor-parallel ranks: te = where Transformer Engine reduces, "
        "all = every operand, so that scales do not depend on the layout",
        choices=("te", "all"),
    )
    first_last_layers_bf16: bool = setting(False, "keep the first and last layers in high precision")
    num_layers_at_start_in_bf16: int = setting(1, "layers at the start, with --first-last-layers-bf16")
    num_layers_at_end_in_bf16: int = setting(1, "layers at the end, with --first-last-layers-bf16")
    precision_map: tuple[str, ...] = setting(
        (), "recipes by linear and GEMM: PATTERN[:GEMMS]=RECIPE[/FORMAT], for example '*.linear_fc2=blockwise' "
        "'layers.20-23.*:dgrad,wgrad=bf16' output_layer=mxfp8; adds up, later entries win (see docs/precision.md)",
        flags=("--precision",), many=True, metavar="ENTRY",
    )
    fp8_schedule: Optional[str] = setting(
        None, "steps in FP8 and steps in high precision, each stretch with its last step: bf16:100,fp8:900,bf16",
        metavar="STRETCHES",
    )
    transformer_impl: str = setting(
        "auto",
        "layer implementation: transformer_engine (CUDA), emulated (any device; FP8 by emulation), local "
        "(megatron-core's own layers, no FP8), auto = transformer_engine where it has the recipe, else emulated",
        choices=("auto", "transformer_engine", "emulated", "local"),
    )
    emulation: bool = setting(
        True, "emulate a recipe that the device does not have; without, that is an error", off=("--no-emulation",)
    )
    attention_backend: str = setting(
        "auto", "attention kernels", choices=("auto", "flash", "fused", "unfused", "local", "sdpa")
    )
    cross_entropy_loss_fusion: bool = setting(False, "fused cross entropy")
    cross_entropy_fusion_impl: str = setting("native", "which fused cross entropy", choices=("native", "te"))
    gradient_accumulation_fusion: bool = setting(
        True, "accumulate weight gradients inside the GEMM where the layer can",
        off=("--no-gradient-accumulation-fusion",),
    )
    gradient_overwrite: bool = setting(
        True, "a step's first weight gradients overwrite their buffers instead of being added to zeros "
        "(Transformer Engine's linears, without pipeline stages)", off=("--no-gradient-overwrite",),
    )
    masked_softmax_fusion: bool = setting(True, "fused masked softmax (CUDA)", off=("--no-masked-softmax-fusion",))
    bias_swiglu_fusion: bool = setting(True, "fused bias and SwiGLU", off=("--no-bias-swiglu-fusion",))
    bias_gelu_fusion: bool = setting(True, "fused bias and GELU", off=("--no-bias-gelu-fusion",))
    bias_dropout_fusion: bool = setting(True, "fused bias, dropout and residual add", off=("--no-bias-dropout-fusion",))
    apply_rope_fusion: bool = setting(True, "fused rotary embedding (CUDA)", off=("--no-rope-fusion",))
    split_rope_fusion: Optional[bool] = setting(
        None, "one kernel splits queries, keys and values and rotates them; default where Transformer Engine's layers "
        "rotate whole heads", flags=("--split-rope-fusion",), off=("--no-split-rope-fusion",),
    )
    swiglu_quantize_fusion: Optional[bool] = setting(
        None, "SwiGLU writes both FP8 copies of its result in one pass (delayed, and forward with blockwise); default "
        "with fused operations", flags=("--swiglu-quantize-fusion",), off=("--no-swiglu-quantize-fusion",),
    )
    use_transformer_engine_op_fuser: Optional[bool] = setting(
        None, "Transformer Engine's fused operations for the MLP; default where they are known to train as its layers",
        flags=("--use-transformer-engine-op-fuser",), off=("--no-use-transformer-engine-op-fuser",),
    )
    accumulate_allreduce_grads_in_fp32: bool = setting(
        False, "FP32 gradient buffers and reduction; with --bf16 they are FP32 unless --grad-reduce-in-bf16"
    )
    grad_reduce_in_bf16: bool = setting(False, "reduce gradients in BF16")
    deterministic_mode: bool = setting(False, "only kernels that give the same bits every time")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer and learning-rate schedule."""

    optimizer: str = setting("adam", "optimizer", choices=("adam", "sgd"))
    lr: Optional[float] = setting(None, "peak learning rate")
    min_lr: float = setting(0.0, "learning rate at the end of the decay")
    lr_warmup_init: float = setting(0.0, "learning rate at the start of the warm-up")
    lr_decay_style: str = setting(
        "linear", "shape of the decay", choices=("constant", "linear", "cosine", "inverse-square-root", "WSD")
    )
    lr_decay_iters: Optional[int] = setting(None, "steps of the schedule; default all training steps")
    lr_decay_samples: Optional[int] = setting(None, "samples of the schedule, with --train-samples")
    lr_warmup_iters: int = setting(0, "steps of linear warm-up")
    lr_warmup_samples: int = setting(0, "samples of linear warm-up, with --train-samples")
    lr_warmup_fraction: Optional[float] = setting(None, "fraction of the schedule that is warm-up")
    lr_wsd_decay_style: str = setting(
        "exponential", "shape of WSD's final decay", choices=("exponential", "linear", "cosine", "minus_sqrt")
    )
    lr_wsd_decay_iters: Optional[int] = setting(None, "steps of WSD's final decay")
    lr_wsd_decay_samples: Optional[int] = setting(None, "samples of WSD's final decay, with --train-samples")
    decoupled_lr: Optional[float] = setting(None, "learning rate of embedding and output layer")
    decoupled_min_lr: Optional[float] = setting(None, "final learning rate of embedding and output layer")
    weight_decay: float = setting(0.01, "decoupled weight decay")
    start_weight_decay: Optional[float] = setting(None, "weight decay at the start")
    end_weight_decay: Optional[float] = setting(None, "weight decay at the end")
    weight_decay_incr_style: str = setting(
        "constant", "shape from start to end weight decay", choices=("constant", "linear", "cosine")
    )
    adam_beta1: float = setting(0.9, "decay of the first moment")
    adam_beta2: float = setting(0.999, "decay of the second moment")
    adam_eps: float = setting(1e-8, "epsilon of Adam")
    sgd_momentum: float = setting(0.9, "momentum of SGD")
    clip_grad: float = setting(1.0, "largest global gradient norm; 0 is no clipping")
    loss_scale: Optional[float] = setting(
        None, "fixed loss scale, in any precision; default dynamic with --fp16, else none"
    )
    initial_loss_scale: float = setting(2.0**32, "first dynamic loss scale for --fp16")
    min_loss_scale: float = setting(1.0, "smallest dynamic loss scale for --fp16")
    loss_scale_window: float = setting(1000, "good steps in a row before the dynamic loss scale doubles")
    hysteresis: int = setting(2, "overflows since it last doubled, from which on the dynamic loss scale halves")
    use_precision_aware_optimizer: bool = setting(
        False, "low-precision optimizer state (enables the four dtypes below)"
    )
    one_pass_optimizer: bool = setting(
        True, "one kernel for scaling and clipping gradients, Adam and the copy to the model's weights (CUDA, adam, "
        "distributed optimizer, moments in fp32 or bf16)", off=("--no-one-pass-optimizer",),
    )
    main_grads_dtype: str = setting("fp32", "gradients that the optimizer reads", choices=("fp32", "bf16"))
    main_params_dtype: str = setting("fp32", "master weights", choices=("fp32", "fp16"))
    exp_avg_dtype: str = setting("fp32", "Adam's first moment", choices=("fp32", "fp16", "bf16", "fp8"))
    exp_avg_sq_dtype: str = setting("fp32", "Adam's second moment", choices=("fp32", "fp16", "bf16", "fp8"))


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Tokenizer and token shards."""

    data_path: tuple[str, ...] = setting((), "shard prefixes, or weight prefix weight prefix ...", many=True)
    train_data_path: tuple[str, ...] = setting((), "shards for training only", many=True)
    valid_data_path: tuple[str, ...] = setting((), "shards for validation only", many=True)
    test_data_path: tuple[str, ...] = setting((), "shards for testing only", many=True)
    split: Optional[str] = setting(None, "train,validation,test parts of --data-path; default 969,30,1")
    data_cache_path: Optional[str] = setting(None, "folder for dataset indices; default beside the run")
    mock_data: bool = setting(False, "made-up tokens instead of --data-path")
    seq_length: Optional[int] = setting(None, "tokens in one sample", flags=("--seq-length", "--encoder-seq-length"))
    tokenizer_type: Optional[str] = setting(
        None, "tokenizer; default GPT2BPETokenizer where --vocab-file and --merge-file are given",
        choices=(
            "SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer", "HuggingFaceTokenizer",
            "GPT2BPETokenizer", "TikTokenizer", "ByteLevelTokenizer", "NullTokenizer",
        ),
    )
    tokenizer_model: Optional[str] = setting(None, "file or folder of the tokenizer, or name of a tiktoken encoding")
    vocab_file: Optional[str] = setting(None, "vocabulary file (GPT2BPETokenizer)")
    merge_file: Optional[str] = setting(None, "merges file (GPT2BPETokenizer)")
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
        True, "the loader makes the attention mask (unused: attention is causal by construction)",
        off=("--no-create-attention-mask-in-dataloader",),
    )
    mmap_bin_files: bool = setting(True, "map shards into memory", off=("--no-mmap-bin-files",))
    dataloader_type: str = setting("single", "order of samples: single = one pass in index order", choices=("single",))


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Length, batch, evaluation, recomputation, when to stop."""

    micro_batch_size: Optional[int] = setting(
        None, "sequences in one forward pass of one data-parallel rank; auto: the fastest size that fits, found by "
        "trying before the first step", auto=True, metavar="N|auto",
    )
    micro_batch_size_memory_limit: Optional[float] = setting(
        None, "GiB that a rank may take with --micro-batch-size auto; default 95% of its GPU, or of the free memory "
        "shared by the ranks here", metavar="GIB",
    )
    global_batch_size: Optional[int] = setting(
        None, "sequences in one optimizer step; default micro batch x data-parallel size"
    )
    train_iters: Optional[int] = setting(None, "optimizer steps to train")
    train_samples: Optional[int] = setting(None, "sequences to train on, instead of --train-iters")
    eval_interval: Optional[int] = setting(None, "steps between validations; default only at the end")
    eval_iters: int = setting(100, "global batches in one validation; 0 is no validation")
    skip_train: bool = setting(False, "only validate")
    exit_interval: Optional[int] = setting(None, "save and stop at the first step that this divides")
    exit_duration_in_mins: Optional[int] = setting(None, "save and stop after so many minutes")
    exit_signal_handler: bool = setting(
        True, "SIGTERM, SIGINT or SIGUSR1 to any rank: all save after the step and end with status 75",
        flags=("--exit-signal-handler",), off=("--no-exit-signal-handler",),
    )
    exit_signal_grace_s: Optional[float] = setting(
        None, "seconds from a signal to the kill that follows it; a rank that is not done before gives up saving; "
        "default torchrun's (TORCH_ELASTIC_SHUTDOWN_TIMEOUT), else 30",
    )
    step_timeout_s: Optional[float] = setting(
        None, "seconds after which a step or a batch of an evaluation counts as hung, the first 5 times as long; 0 is "
        "never; default 5 times the slowest of the last 50, at least 120",
    )
    checkpoint_timeout_s: float = setting(
        1800.0, "seconds after which a save, a load or anything else between steps counts as hung; 0 is never"
    )
    max_crashes: int = setting(
        10, "starts in a row that may crash before they save anything; then the run stops with status 74; 0 is no limit"
    )
    seed: int = setting(1234, "seed of initialization, data order and dropout")
    data_parallel_random_init: bool = setting(False, "another initialization on each data-parallel rank")
    recompute_activations: bool = setting(False, "short for --recompute-granularity selective")
    recompute_granularity: Optional[str] = setting(
        None, "recompute activations in the backward pass", choices=("full", "selective")
    )
    recompute_method: Optional[str] = setting(None, "which layers full recompute takes", choices=("uniform", "block"))
    recompute_num_layers: Optional[int] = setting(None, "layers per recomputed unit (uniform) or in all (block)")
    recompute_modules: tuple[str, ...] = setting(
        (), "what selective recompute takes; default core_attn", many=True,
        choices=("core_attn", "mlp", "layernorm"),
    )
    distribute_saved_activations: bool = setting(False, "spread saved activations over tensor-parallel ranks")
    calculate_per_token_loss: bool = setting(
        True, "loss is the mean over all tokens of the global batch (Megatron's default is a mean of means)",
        flags=("--calculate-per-token-loss",),
    )
    check_for_nan_in_loss_and_grad: bool = setting(
        True, "no update is made when loss or gradient norm is not finite (see --max-skipped-steps)",
        off=("--no-check-for-nan-in-loss-and-grad",),
    )
    max_skipped_steps: int = setting(
        0, "steps in a row whose update may be left out because numbers are not finite, or spike; the next one stops "
        "the run",
    )
    spike_policy: str = setting(
        "off", "loss or gradient norm far above those before: skip leaves out the update, rollback goes back to a "
        "checkpoint and leaves out the batches from there on",
        choices=("off", "skip", "rollback"),
    )
    spike_window: int = setting(128, "updates that a step is compared with to tell a spike")
    spike_sigma: float = setting(6.0, "standard deviations above their mean from which on it is a spike")
    spike_min_steps: int = setting(64, "updates without which nothing is a spike")
    spike_rollback_steps: int = setting(100, "rollback: steps to go back at least, if there is such a checkpoint")
    spike_skip_batches: int = setting(
        200, "rollback: batches to leave out from the checkpoint on; always up to the one that spiked"
    )
    max_rollbacks: int = setting(3, "rollback: times that a run goes back; the next one stops it")
    check_weight_hash_across_dp_replicas_interval: Optional[int] = setting(
        None, "steps between comparisons of the weights of all replicas, by a hash of their bits; default never"
    )
    manual_gc: bool = setting(False, "collect garbage only every --manual-gc-interval steps, on all ranks at once")
    manual_gc_interval: int = setting(0, "steps between collections with --manual-gc; 0 is never")
    empty_unused_memory_level: int = setting(
        0, "empty the CUDA cache: 1 after evaluation, 2 after each step", choices=(0, 1, 2)
    )
    num_threads: Optional[int] = setting(
        None, "CPU threads per rank; default the cores shared evenly by the ranks here"
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Saving and loading."""

    save: Optional[str] = setting(None, "folder for checkpoints, records and the configuration of this run")
    load: Optional[str] = setting(None, "folder to resume from; a folder without checkpoints starts anew")
    save_interval: Optional[int] = setting(None, "steps between checkpoints; the last step is always saved")
    ckpt_keep: Optional[int] = setting(None, "newest checkpoints to keep, older ones are deleted; default all")
    non_persistent_save_interval: Optional[int] = setting(
        None, "steps between checkpoints of a second kind, of which only the newest is kept"
    )
    non_persistent_ckpt_type: str = setting(
        "global", "where they lie: in one folder that all ranks share", choices=("global", "local")
    )
    non_persistent_global_ckpt_dir: Optional[str] = setting(
        None, "folder for them, such as one in memory; default non_persistent/ in --save"
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
    pretrained_checkpoint: Optional[str] = setting(None, "folder whose weights start a run that has nothing to resume")
    exit_on_missing_checkpoint: bool = setting(False, "stop when --load holds no checkpoint")
    ckpt_format: str = setting("torch_dist", "checkpoint format", choices=("torch_dist",))
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


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Records of a run."""

    log_interval: int = setting(100, "steps between console lines; every step is recorded")
    tensorboard_dir: Optional[str] = setting(None, "folder for TensorBoard; default tensorboard/ in --save")
    tensorboard_log_interval: int = setting(1, "steps between TensorBoard points")
    wandb_project: Optional[str] = setting(None, "Weights & Biases project (needs wandb)")
    wandb_entity: Optional[str] = setting(None, "Weights & Biases entity")
    wandb_exp_name: Optional[str] = setting(None, "Weights & Biases run name")
    wandb_save_dir: Optional[str] = setting(None, "Weights & Biases local folder")
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
        flags=("--override",), many=True, metavar="SECTION.FIELD=VALUE",
    )
