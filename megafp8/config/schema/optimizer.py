"""Settings: optimizer and learning-rate schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from megafp8.config.schema.setting import setting


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
        "distributed optimizer)", off=("--no-one-pass-optimizer",),
    )
    main_grads_dtype: str = setting("fp32", "gradients that the optimizer reads", choices=("fp32", "bf16"))
    main_params_dtype: str = setting("fp32", "master weights", choices=("fp32", "fp16"))
    exp_avg_dtype: str = setting("fp32", "Adam's first moment", choices=("fp32", "fp16", "bf16", "fp8"))
    exp_avg_sq_dtype: str = setting("fp32", "Adam's second moment", choices=("fp32", "fp16", "bf16", "fp8"))
