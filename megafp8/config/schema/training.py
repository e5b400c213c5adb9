"""Settings of training and of the optimizer."""

from dataclasses import dataclass
from typing import ClassVar, Optional

from megafp8.config.schema.setting import (
    AT_LEAST_1,
    COEFFICIENT,
    COMMON,
    DEPRECATED,
    FRACTION_ABOVE_0,
    FRACTION_BELOW_1,
    LIMIT,
    NO_ROLE,
    NOT_NEGATIVE,
    OWN,
    POSITIVE_COEFFICIENT,
    POSITIVE_LIMIT,
    Range,
    Role,
    former_setting,
    setting,
)

PLANTED_ELSEWHERE = "a run plants no faults; use benchmarks/planted_faults.py"
OFFLOAD_MODULES = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act")


# A table: default and help of each setting, then what else is known about it.
# fmt: off


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Length, batch, evaluation, recomputation, when to stop."""

    ROLE: ClassVar[Role] = Role.LEARNING

    micro_batch_size: Optional[int] = setting(
        None, "sequences per forward pass of a data-parallel rank; auto: the fastest size that fits in memory, found "
        "by trials before the first step",
        auto=True, metavar="N|auto", range=AT_LEAST_1, role=Role.LEARNING | Role.SAMPLES, unit="sequences",
        audience=COMMON,
    )
    micro_batch_size_memory_limit: Optional[float] = setting(
        None, "memory limit per rank for --micro-batch-size auto, in GiB",
        metavar="GIB", range=POSITIVE_LIMIT, requires="--micro-batch-size auto", role=NO_ROLE,
        unset="95% of the GPU's memory, or of the free memory of a CPU rank", unit="GiB", megatron=OWN,
    )
    micro_batch_size_max: Optional[int] = setting(
        None, "largest size that --micro-batch-size auto tries",
        range=AT_LEAST_1, requires="--micro-batch-size auto", role=NO_ROLE, unset="no limit", unit="sequences",
        megatron=OWN,
    )
    global_batch_size: Optional[int] = setting(
        None, "sequences per optimizer step",
        range=AT_LEAST_1, role=Role.LEARNING | Role.SAMPLES | Role.MEMORY,
        unset="micro-batch size x data-parallel size", unit="sequences", audience=COMMON,
    )
    rampup_batch_size: tuple[int, ...] = setting(
        (), "increase the global batch size from START in steps of INCREMENT sequences to --global-batch-size, over "
        "the first SAMPLES samples; needs --train-samples",
        many=True, metavar="START INCREMENT SAMPLES", role=Role.LEARNING | Role.SAMPLES | Role.MEMORY,
    )
    step_batch_size_schedule: tuple[str, ...] = setting(
        (), "global batch sizes by the number of tokens read before, instead of --global-batch-size, for example "
        "'0:384 200B:768 400B:1152'; suffixes K, M, B and T; needs --train-samples",
        many=True, metavar="TOKENS:SIZE", role=Role.LEARNING | Role.SAMPLES | Role.MEMORY,
        megatron="a last incomplete batch counts as a step",
    )
    decrease_batch_size_if_needed: bool = setting(
        False, "round the global batch size down to a multiple of micro-batch size x data-parallel size",
        role=Role.LEARNING | Role.SAMPLES, megatron="such a run ends before --train-samples",
    )
    train_iters: Optional[int] = setting(
        None, "number of optimizer steps",
        range=AT_LEAST_1, role=Role.LEARNING | Role.SAMPLES, unit="steps", audience=COMMON,
    )
    train_samples: Optional[int] = setting(
        None, "number of training sequences, instead of --train-iters",
        range=AT_LEAST_1, role=Role.LEARNING | Role.SAMPLES, unit="samples",
    )
    eval_interval: Optional[int] = setting(
        None, "steps between validations",
        range=AT_LEAST_1, role=NO_ROLE, unset="one validation, at the end", unit="steps", audience=COMMON,
    )
    start_eval_at_iter: Optional[int] = setting(
        None, "first step at which --eval-interval applies",
        needs="--eval-interval", range=AT_LEAST_1, role=NO_ROLE, unset="the first", unit="step",
    )
    eval_iters: int = setting(
        100, "global batches per validation; 0: no validation",
        range=NOT_NEGATIVE, role=Role.SAMPLES, unit="batches", audience=COMMON,
        megatron="a validation continues where the previous one ended; here each reads the same first batches",
    )
    eval_global_batch_size: Optional[int] = setting(
        None, "sequences per global batch of a validation",
        range=AT_LEAST_1, role=Role.SAMPLES, unset="the global batch size at the end of training", unit="sequences",
    )
    eval_high_precision: bool = setting(
        False, "validate a second time, with all GEMMs in the dtype of the weights", role=Role.OUTPUT, megatron=OWN
    )
    eval_ema: bool = setting(
        False, "validate a second time, with the moving average of the weights (--ema-decay) once it has had an update",
        requires="--ema-decay", role=Role.OUTPUT, megatron=OWN,
    )
    eval_tasks: tuple[str, ...] = setting(
        (), "files of questions as JSON lines, which validations answer; see megafp8 evaluate --tasks",
        many=True, path=True, requires="--eval-iters", role=NO_ROLE, metavar="FILE", megatron=OWN,
    )
    skip_train: bool = setting(False, "validate without training", role=Role.OUTPUT)
    exit_interval: Optional[int] = setting(
        None, "save and exit at the first step that is a multiple of this",
        range=AT_LEAST_1, role=Role.OUTPUT, unit="steps",
    )
    exit_duration_in_mins: Optional[int] = setting(
        None, "save and exit after this many minutes", range=AT_LEAST_1, role=Role.OUTPUT, unit="minutes"
    )
    exit_signal_handler: bool = setting(
        True, "on SIGTERM, SIGINT, SIGHUP or SIGUSR1 to any rank, all ranks save after the current step and exit with "
        "status 75",
        flags=("--exit-signal-handler",), off=("--no-exit-signal-handler",), role=Role.OUTPUT, group="reliability",
        megatron="off by default, for SIGTERM only, and checked after a step",
    )
    exit_signal_grace_s: Optional[float] = setting(
        None, "seconds between a signal and the kill that follows it; a rank that cannot finish in this time does not "
        "save",
        range=POSITIVE_LIMIT, role=Role.OUTPUT, unset="torchrun's TORCH_ELASTIC_SHUTDOWN_TIMEOUT, else 30",
        unit="seconds", group="reliability", megatron=OWN,
    )
    step_timeout_s: Optional[float] = setting(
        None, "timeout of a step or an evaluation batch, in seconds; 5 times as long for the first step; 0: none",
        range=LIMIT, role=Role.OUTPUT, unset="5 times the slowest of the last 50 steps, at least 120", unit="seconds",
        group="reliability", megatron=OWN,
    )
    checkpoint_timeout_s: float = setting(
        1800.0, "timeout of a save, a load and other work between steps, in seconds; 0: none",
        range=LIMIT, role=Role.OUTPUT, unit="seconds", group="reliability", megatron=OWN,
    )
    max_crashes: int = setting(
        10, "consecutive crashes without a new checkpoint after which the run stops with status 74; 0: no limit",
        range=NOT_NEGATIVE, role=Role.OUTPUT, group="reliability", megatron=OWN,
    )
    seed: int = setting(
        1234, "random seed of initialization, sample order and dropout",
        range=NOT_NEGATIVE, role=Role.LEARNING | Role.SAMPLES, audience=COMMON,
        megatron="initial weights also depend on the layout",
    )
    data_parallel_random_init: bool = setting(
        False, "initialize data-parallel ranks differently (not supported)", audience=DEPRECATED, megatron="supported"
    )
    recompute_activations: bool = setting(
        False, "same as --recompute-granularity selective", role=Role.MEMORY, group="recomputation"
    )
    recompute_granularity: Optional[str] = setting(
        None, "activation recomputation; full: complete layers, selective: --recompute-modules",
        choices=("full", "selective"), metavar="KIND", role=Role.MEMORY, group="recomputation", audience=COMMON,
    )
    recompute_method: Optional[str] = setting(
        None, "layers of full recomputation; uniform: all, in groups of --recompute-num-layers, block: the first "
        "--recompute-num-layers of each pipeline stage",
        choices=("uniform", "block"), needs="--recompute-granularity full", role=Role.MEMORY, group="recomputation",
    )
    recompute_num_layers: Optional[int] = setting(
        None, "layers per group (uniform) or per pipeline stage (block)",
        needs="--recompute-granularity full", range=AT_LEAST_1, role=Role.MEMORY, unit="layers", group="recomputation",
    )
    recompute_modules: tuple[str, ...] = setting(
        (), "modules of selective recomputation",
        many=True, choices=("core_attn", "mlp", "layernorm", "moe", "moe_act", "shared_experts", "mla_up_proj"),
        needs="--recompute-granularity selective", role=Role.MEMORY, unset="core_attn", group="recomputation",
    )
    moe_layer_recompute: bool = setting(
        False, "recompute mixture-of-experts layers; short for --recompute-modules moe",
        role=Role.MEMORY, group="recomputation",
    )
    fine_grained_activation_offloading: bool = setting(
        False, "copy the inputs of --offload-modules to the host until the backward pass (Transformer Engine's layers)",
        role=Role.MEMORY, group="recomputation",
    )
    offload_modules: tuple[str, ...] = setting(
        (), "modules whose inputs --fine-grained-activation-offloading copies",
        many=True, choices=OFFLOAD_MODULES, needs="--fine-grained-activation-offloading", role=Role.MEMORY,
        group="recomputation",
    )
    min_offloaded_tensor_size: int = setting(
        1024 * 1024, "elements of the smallest tensor that --fine-grained-activation-offloading copies",
        needs="--fine-grained-activation-offloading", range=NOT_NEGATIVE, role=Role.MEMORY, unit="elements",
        group="recomputation",
    )
    distribute_saved_activations: bool = setting(
        False, "shard saved activations over tensor-parallel ranks", role=Role.MEMORY, group="recomputation"
    )
    calculate_per_token_loss: bool = setting(
        True, "average the loss over all tokens of the global batch, not over the means of microbatches",
        flags=("--calculate-per-token-loss",),
        megatron="off by default, which averages the means of the microbatches; here always on",
    )
    check_for_nan_in_loss_and_grad: bool = setting(
        True, "check that loss and gradients are finite before each update (see --max-skipped-steps)",
        off=("--no-check-for-nan-in-loss-and-grad",), group="reliability",
        megatron="a rank that finds a bad value stops; here all ranks stop or skip the update together",
    )
    max_skipped_steps: int = setting(
        0, "maximum number of consecutive steps whose update is skipped because of non-finite values or spikes; one "
        "more stops the run",
        range=NOT_NEGATIVE, unit="steps", group="reliability", megatron=OWN,
    )
    on_nonfinite_activation: str = setting(
        "warn", "reaction to NaN or infinity in an input, weight or output gradient that a linear layer quantizes, "
        "which saturation can hide; warn: record it, stop: stop before the update, skip: skip the update, bf16: skip "
        "it and compute the layer in high precision from then on",
        choices=("warn", "stop", "skip", "bf16"), group="reliability", megatron=OWN,
    )
    fp8_guard: str = setting(
        "off", "reaction to statistics of layers that grow before a run in FP8 diverges; warn: record them, "
        "bf16-layer: compute the layer in high precision for the rest of the run, smooth-swiglu: give the input of "
        "linear_fc2 a scale per channel for the rest of the run, as Smooth-SwiGLU",
        choices=("off", "warn", "bf16-layer", "smooth-swiglu"), role=Role.LEARNING | Role.MEMORY, group="reliability",
        megatron=OWN,
    )
    fp8_guard_interval: int = setting(
        20, "steps between the statistics of --fp8-guard",
        range=AT_LEAST_1, unit="steps", group="reliability", megatron=OWN,
    )
    planted_fault: str = former_setting("none", PLANTED_ELSEWHERE)
    planted_fault_step: int = former_setting(1, PLANTED_ELSEWHERE)
    planted_fault_growth: float = former_setting(1.05, PLANTED_ELSEWHERE)
    spike_policy: str = setting(
        "off", "reaction to spikes of the loss or the gradient norm; skip: skip the update, rollback: return to a "
        "checkpoint and skip the batches after it",
        choices=("off", "skip", "rollback"), group="reliability", megatron=OWN,
    )
    spike_window: int = setting(
        32, "number of previous updates with which a step is compared to detect a spike",
        range=Range(3), requires="--spike-policy", unit="updates", group="reliability", megatron=OWN,
    )
    spike_sigma: float = setting(
        6.0, "threshold of the loss, in standard deviations above the line through the losses of --spike-window "
        "updates",
        range=POSITIVE_LIMIT, requires="--spike-policy", group="reliability", megatron=OWN,
    )
    spike_norm_factor: float = setting(
        100.0, "threshold of the gradient norm, over the median of --spike-window updates; norms of clean batches in "
        "runs of a small model were at most 52 times the median",
        range=POSITIVE_LIMIT, requires="--spike-policy", group="reliability", megatron=OWN,
    )
    spike_min_steps: int = setting(
        32, "minimum number of previous updates for spike detection",
        range=Range(3), requires="--spike-policy", unit="updates", group="reliability", megatron=OWN,
    )
    spike_rollback_steps: int = setting(
        100, "rollback: minimum number of steps to go back, if there is a checkpoint",
        range=AT_LEAST_1, requires="--spike-policy rollback", unit="steps", group="reliability", megatron=OWN,
    )
    spike_skip_batches: int = setting(
        200, "rollback: number of batches to skip after the checkpoint; at least all up to the spike",
        range=AT_LEAST_1, requires="--spike-policy rollback", unit="batches", group="reliability", megatron=OWN,
    )
    max_rollbacks: int = setting(
        3, "rollback: maximum number of rollbacks; one more spike stops the run",
        range=AT_LEAST_1, requires="--spike-policy rollback", group="reliability", megatron=OWN,
    )
    check_weight_hash_across_dp_replicas_interval: Optional[int] = setting(
        None, "steps between bitwise comparisons of the weights of all replicas",
        range=AT_LEAST_1, role=Role.OUTPUT, unset="never", unit="steps", group="reliability",
        megatron="compares SHA-1 hashes of data-parallel replicas on the host",
    )
    manual_gc: bool = setting(
        False, "run Python's garbage collection every --manual-gc-interval steps only, on all ranks in the same step",
        role=Role.OUTPUT, group="speed",
    )
    manual_gc_interval: int = setting(
        0, "steps between garbage collections with --manual-gc; 0: never",
        needs="--manual-gc", range=NOT_NEGATIVE, role=Role.OUTPUT, unit="steps", group="speed",
    )
    empty_unused_memory_level: int = setting(
        0, "empty the CUDA memory cache; 0: never, 1: after evaluation, 2: after each step",
        choices=(0, 1, 2), role=NO_ROLE, group="speed",
    )
    performance: str = setting(
        "exact", "automatic choice of performance settings; exact: those that do not change numerics, max: also the "
        "FP8 output layer, whose mean cost is 0.01% to 0.14% of the loss, and Adam's moments in BF16, without a "
        "measurable one",
        choices=("exact", "max"), role=NO_ROLE, group="speed", megatron=OWN,
    )
    cuda_graph_impl: str = setting(
        "auto", "CUDA graphs; local: run the forward and backward passes of a step as one graph, which removes launch "
        "overhead (emulated layers: one GPU or data-parallel ranks), auto: local where it was run on GPUs",
        choices=("auto", "none", "local"), role=Role.AUTOMATIC, group="speed",
        megatron="the default is none; local is a graph for each layer",
    )
    cuda_graph_scope: str = setting(
        "full_iteration", "contents of a CUDA graph; full_iteration: all forward and backward passes of a step",
        choices=("full_iteration",), role=NO_ROLE, group="speed", audience=DEPRECATED,
        megatron="the default is the layers",
    )
    cuda_graph_warmup_steps: int = setting(
        3, "steps before the CUDA graph is captured",
        needs="--cuda-graph-impl local", range=NOT_NEGATIVE, role=NO_ROLE, unit="steps", group="speed",
    )
    cuda_graph_evaluation: Optional[bool] = setting(
        None, "run the forward passes of evaluations as a CUDA graph too",
        flags=("--cuda-graph-evaluation",), off=("--no-cuda-graph-evaluation",), needs="--cuda-graph-impl local",
        role=Role.OUTPUT | Role.AUTOMATIC, unset="on with one GPU whose steps are a graph, for models without experts",
        group="speed", megatron=OWN,
    )
    num_threads: Optional[int] = setting(
        None, "CPU threads per rank",
        range=AT_LEAST_1, role=Role.OUTPUT,
        unset="OMP_NUM_THREADS, else an even share of the cores, limited by the size of the micro-batch", megatron=OWN,
    )


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer and learning-rate schedule."""

    ROLE: ClassVar[Role] = Role.LEARNING

    optimizer: str = setting(
        "adam", "optimizer; muon: Muon for the matrices of the layers, AdamW for embeddings, output layer, norms and "
        "biases",
        choices=("adam", "sgd", "muon"), role=Role.LEARNING | Role.MEMORY,
        megatron="muon also trains position embeddings, and needs the package emerging_optimizers",
    )
    lr: Optional[float] = setting(None, "peak learning rate", range=POSITIVE_COEFFICIENT, audience=COMMON)
    min_lr: float = setting(0.0, "final learning rate of the decay", range=COEFFICIENT, audience=COMMON)
    lr_warmup_init: float = setting(0.0, "initial learning rate of the warmup", range=COEFFICIENT)
    lr_decay_style: str = setting(
        "linear", "learning-rate schedule after warmup",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"), audience=COMMON,
    )
    lr_decay_iters: Optional[int] = setting(
        None, "steps of the learning-rate schedule", range=AT_LEAST_1, unset="all training steps", unit="steps"
    )
    lr_decay_samples: Optional[int] = setting(
        None, "samples of the learning-rate schedule, with --train-samples", range=AT_LEAST_1, unit="samples"
    )
    lr_warmup_iters: int = setting(0, "steps of linear warmup", range=NOT_NEGATIVE, unit="steps", audience=COMMON)
    lr_warmup_samples: int = setting(
        0, "samples of linear warmup, with --train-samples", range=NOT_NEGATIVE, unit="samples"
    )
    lr_warmup_fraction: Optional[float] = setting(
        None, "fraction of the learning-rate schedule used for warmup", range=FRACTION_BELOW_1
    )
    lr_wsd_decay_style: str = setting(
        "exponential", "shape of the final decay of WSD",
        choices=("exponential", "linear", "cosine", "minus_sqrt"), needs="--lr-decay-style WSD",
    )
    lr_wsd_decay_iters: Optional[int] = setting(
        None, "steps of the final decay of WSD", needs="--lr-decay-style WSD", range=AT_LEAST_1, unit="steps"
    )
    lr_wsd_decay_samples: Optional[int] = setting(
        None, "samples of the final decay of WSD, with --train-samples",
        needs="--lr-decay-style WSD", range=AT_LEAST_1, unit="samples",
    )
    decoupled_lr: Optional[float] = setting(
        None, "peak learning rate of the embedding and the output layer", range=POSITIVE_COEFFICIENT, unset="--lr"
    )
    decoupled_min_lr: Optional[float] = setting(
        None, "final learning rate of the embedding and the output layer",
        needs="--decoupled-lr", range=COEFFICIENT, unset="--min-lr",
    )
    weight_decay: float = setting(0.01, "decoupled weight decay", range=COEFFICIENT, audience=COMMON)
    start_weight_decay: Optional[float] = setting(
        None, "initial weight decay", range=COEFFICIENT, unset="--weight-decay"
    )
    end_weight_decay: Optional[float] = setting(None, "final weight decay", range=COEFFICIENT, unset="--weight-decay")
    weight_decay_incr_style: str = setting(
        "constant", "schedule from initial to final weight decay", choices=("constant", "linear", "cosine")
    )
    adam_beta1: float = setting(0.9, "Adam's beta1, the decay rate of the first moment", range=FRACTION_BELOW_1)
    adam_beta2: float = setting(0.999, "Adam's beta2, the decay rate of the second moment", range=FRACTION_BELOW_1)
    adam_eps: float = setting(1e-8, "Adam's epsilon", range=FRACTION_ABOVE_0)
    sgd_momentum: float = setting(0.9, "SGD's momentum", range=FRACTION_BELOW_1)
    muon_momentum: float = setting(
        0.9, "Muon's momentum, the decay rate of the mean of the gradients",
        needs="--optimizer muon", range=FRACTION_BELOW_1, group="muon",
    )
    muon_nesterov: bool = setting(
        False, "Nesterov momentum for Muon",
        flags=("--muon-nesterov", "--muon-use-nesterov"), needs="--optimizer muon", group="muon",
    )
    muon_split_qkv: bool = setting(
        True, "orthogonalize the query, key and value rows of linear_qkv as three matrices in Muon",
        off=("--muon-no-split-qkv",), needs="--optimizer muon", group="muon",
    )
    muon_scale_mode: str = setting(
        "spectral", "factor of Muon's update of an (out, in) matrix; spectral: sqrt(max(out, in)), unit_rms_norm: "
        "sqrt(out / in), shape_scaling: sqrt(max(1, out / in))",
        choices=("spectral", "unit_rms_norm", "shape_scaling"), needs="--optimizer muon", group="muon",
    )
    muon_extra_scale_factor: float = setting(
        1.0, "further factor of Muon's update; 0.2 gives about the size of AdamW's update",
        needs="--optimizer muon", range=POSITIVE_COEFFICIENT, group="muon",
    )
    muon_num_ns_steps: int = setting(
        5, "Newton-Schulz steps of Muon", needs="--optimizer muon", range=AT_LEAST_1, group="muon"
    )
    muon_coefficient_type: str = setting(
        "quintic", "coefficients of Muon's Newton-Schulz steps",
        choices=("simple", "quintic", "polar_express", "aol"), needs="--optimizer muon", group="muon",
    )
    muon_fp32_matmul_prec: str = setting(
        "medium", "precision of Muon's Newton-Schulz steps; medium: BF16, high: TF32 on a GPU and FP32 on a CPU, "
        "highest: FP32",
        choices=("low", "medium", "high", "highest"), needs="--optimizer muon", group="muon",
    )
    muon_tp_mode: str = setting(
        "duplicated", "Muon with tensor parallelism; duplicated: every rank orthogonalizes the complete matrix, "
        "distributed: the ranks do it together; otherwise each rank its own shard, as if it were a matrix",
        choices=("blockwise", "duplicated", "distributed"), needs="--optimizer muon", group="muon",
    )
    muon_scalar_optimizer: str = setting(
        "adam", "optimizer of all weights that Muon does not train; lion is not supported",
        choices=("adam", "lion"), needs="--optimizer muon", group="muon", audience=DEPRECATED, megatron="has lion",
    )
    clip_grad: float = setting(1.0, "clip gradients to this global norm; 0: no clipping", range=LIMIT)
    loss_scale: Optional[float] = setting(
        None, "constant loss scale",
        range=Range(0, 2.0**126, low_open=True), unset="dynamic with --fp16, else none",
        megatron="no effect with FP32 weights, unless the optimizer is sharded; here refused where it has no effect",
    )
    initial_loss_scale: float = setting(
        2.0**32, "initial dynamic loss scale with --fp16", range=Range(0, 2.0**126, low_open=True)
    )
    min_loss_scale: float = setting(
        1.0, "minimum dynamic loss scale with --fp16", range=Range(0, 2.0**126, low_open=True)
    )
    loss_scale_window: float = setting(
        1000, "consecutive steps without overflow after which the dynamic loss scale is doubled",
        range=POSITIVE_LIMIT, unit="steps",
    )
    hysteresis: int = setting(
        2, "overflows since the last doubling after which the dynamic loss scale is halved", range=AT_LEAST_1
    )
    use_precision_aware_optimizer: Optional[bool] = setting(
        None, "allow low-precision optimizer state (enables --main-grads-dtype, --main-params-dtype, --exp-avg-dtype "
        "and --exp-avg-sq-dtype)",
        flags=("--use-precision-aware-optimizer",), off=("--no-use-precision-aware-optimizer",),
        role=Role.LEARNING | Role.MEMORY, unset="on with --performance max", megatron="off by default",
    )
    one_pass_optimizer: bool = setting(
        True, "scale and clip gradients, apply Adam and cast the weights in one kernel (CUDA, --optimizer adam, "
        "distributed optimizer or FSDP2)",
        off=("--no-one-pass-optimizer",), role=Role.LEARNING | Role.MEMORY, megatron=OWN,
    )
    main_grads_dtype: str = setting(
        "fp32", "dtype of the gradients in the optimizer", choices=("fp32", "bf16"), role=Role.LEARNING | Role.MEMORY
    )
    main_params_dtype: str = setting(
        "fp32", "dtype of the master weights", choices=("fp32", "fp16"), role=Role.LEARNING | Role.MEMORY
    )
    exp_avg_dtype: str = setting(
        "fp32", "dtype of Adam's first moment",
        choices=("fp32", "fp16", "bf16", "fp8"), role=Role.LEARNING | Role.MEMORY,
    )
    exp_avg_sq_dtype: str = setting(
        "fp32", "dtype of Adam's second moment",
        choices=("fp32", "fp16", "bf16", "fp8"), role=Role.LEARNING | Role.MEMORY,
    )
    qk_clip: bool = setting(
        False, "after each update, shrink the weights of queries and keys whose attention logits are above "
        "--qk-clip-threshold; costs what --log-max-attention-logit costs", role=Role.LEARNING | Role.MEMORY,
    )
    qk_clip_threshold: float = setting(
        100.0, "the largest attention logit that --qk-clip leaves", requires="--qk-clip", range=POSITIVE_COEFFICIENT,
        role=Role.LEARNING,
    )
    qk_clip_alpha: float = setting(
        0.5, "share of queries in the factor of --qk-clip; 1 - alpha is that of keys", requires="--qk-clip",
        range=Range(0, 1), role=Role.LEARNING,
    )
    ema_decay: Optional[float] = setting(
        None, "keep a moving average of the weights with this decay per update, every --ema-interval steps; the first "
        "1 / (1 - decay) updates are a plain mean",
        range=Range(0, 1, low_open=True, high_open=True), role=Role.OUTPUT | Role.MEMORY, unset="none", megatron=OWN,
    )
    ema_interval: int = setting(
        10, "steps between updates of the moving average",
        requires="--ema-decay", range=AT_LEAST_1, role=Role.OUTPUT, unit="steps", megatron=OWN,
    )
    ema_dtype: str = setting(
        "fp32", "dtype of the moving average; bf16 is rounded at random, so that small updates are not lost",
        choices=("fp32", "bf16"), requires="--ema-decay", role=Role.OUTPUT | Role.MEMORY, megatron=OWN,
    )
