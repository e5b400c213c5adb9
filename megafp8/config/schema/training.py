"""Settings of training and of the optimizer."""

from dataclasses import dataclass
from typing import Optional

from megafp8.config.schema.setting import setting


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Length, batch, evaluation, recomputation, when to stop."""

    micro_batch_size: Optional[int] = setting(
        None,
        "sequences in one forward pass of one data-parallel rank; auto: the fastest size that fits, found by "
        "trying before the first step",
        auto=True,
        metavar="N|auto",
    )
    micro_batch_size_memory_limit: Optional[float] = setting(
        None,
        "GiB that a rank may take with --micro-batch-size auto; default 95% of its GPU, or of the free memory "
        "shared by the ranks here",
        metavar="GIB",
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
        True,
        "SIGTERM, SIGINT, SIGHUP or SIGUSR1 to any rank: all save after the step and end with status 75",
        flags=("--exit-signal-handler",),
        off=("--no-exit-signal-handler",),
    )
    exit_signal_grace_s: Optional[float] = setting(
        None,
        "seconds from a signal to the kill that follows it; a rank that is not done before gives up saving; "
        "default torchrun's (TORCH_ELASTIC_SHUTDOWN_TIMEOUT), else 30",
    )
    step_timeout_s: Optional[float] = setting(
        None,
        "seconds after which a step or a batch of an evaluation counts as hung, the first 5 times as long; 0 is "
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
        (),
        "what selective recompute takes; default core_attn",
        many=True,
        choices=("core_attn", "mlp", "layernorm"),
    )
    distribute_saved_activations: bool = setting(False, "spread saved activations over tensor-parallel ranks")
    calculate_per_token_loss: bool = setting(
        True,
        "loss is the mean over all tokens of the global batch (Megatron's default is a mean of means)",
        flags=("--calculate-per-token-loss",),
    )
    check_for_nan_in_loss_and_grad: bool = setting(
        True,
        "no update is made when loss or gradient norm is not finite (see --max-skipped-steps)",
        off=("--no-check-for-nan-in-loss-and-grad",),
    )
    max_skipped_steps: int = setting(
        0,
        "steps in a row whose update may be left out because numbers are not finite, or spike; the next one stops "
        "the run",
    )
    spike_policy: str = setting(
        "off",
        "loss or gradient norm far above those before: skip leaves out the update, rollback goes back to a "
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
    performance: str = setting(
        "exact",
        "exact: the fastest settings that keep the numerics; max: also the FP8 output layer and the fused residual "
        "norm, which cost less than 0.25% of loss; a run prints what it chose",
        choices=("exact", "max"),
    )
    cuda_graph_impl: str = setting(
        "auto",
        "local: launch a step's forward and backward passes as one CUDA graph, so that the GPU does not wait "
        "for the host kernel by kernel; Transformer Engine's layers only; auto: local where nothing prevents it",
        choices=("auto", "none", "local"),
    )
    cuda_graph_scope: str = setting(
        "full_iteration", "what a graph holds: all forward and backward passes of a step", choices=("full_iteration",)
    )
    cuda_graph_warmup_steps: int = setting(3, "steps without the graph before it is captured")
    num_threads: Optional[int] = setting(
        None,
        "CPU threads per rank; default OMP_NUM_THREADS, or without it an even share of the cores, as far as the "
        "micro-batch can use it",
    )


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
        True,
        "one kernel for scaling and clipping gradients, Adam and the copy to the model's weights (CUDA, adam, "
        "distributed optimizer)",
        off=("--no-one-pass-optimizer",),
    )
    main_grads_dtype: str = setting("fp32", "gradients that the optimizer reads", choices=("fp32", "bf16"))
    main_params_dtype: str = setting("fp32", "master weights", choices=("fp32", "fp16"))
    exp_avg_dtype: str = setting("fp32", "Adam's first moment", choices=("fp32", "fp16", "bf16", "fp8"))
    exp_avg_sq_dtype: str = setting("fp32", "Adam's second moment", choices=("fp32", "fp16", "bf16", "fp8"))
