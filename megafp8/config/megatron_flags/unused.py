"""Megatron-LM flags that change nothing without another flag, or with it, in Megatron-LM either."""

from __future__ import annotations

from collections.abc import Set

# Flags, or prefixes of flags that end with a dash, and the flags of which at least one gives them an effect.
UNUSED_WITHOUT: tuple[tuple[str, str], ...] = (
    (
        "--moe-upcycling- --moe-routing-trace- --moe-paged-stash- --moe-ncclep- "
        "--moe-hybridep-pad- --moe-hybridep-num-blocks- --moe-hybridep-num-sms- "
        "--moe-use-legacy-grouped-gemm --moe-extended-tp --moe-permute-fusion-into-hybridep "
        "--moe-router-topk-limited-devices "
        "--moe-shared-expert-glu-interleave-size --moe-router-quantile-balancing-ema "
        "--moe-router-force-biased --moe-use-grouped-tensor --moe-single-grouped-weight --moe-single-grouped-bias "
        "--moe-pad-experts-for-cuda-graph-inference --moe-dispatch-fwd-dtype --moe-combine-bwd-dtype "
        "--moe-mlp-glu-interleave-size --moe-expert-rank-capacity-factor --moe-latent-size "
        "--moe-enable-routing-replay --expert-tensor-parallel-num-weight-shards --save-tokens-per-expert-interval",
        "--num-experts --moe-use-upcycling",
    ),
    (
        "--mtp-use-repeated-layer --mtp-detach-heads --mtp-hsm --mtp-standalone",
        "--mtp-num-layers --mtp-hybrid-override-pattern",
    ),
    (
        "--cache-mla-latents --mla-down-proj-fusion",
        "--multi-latent-attention",
    ),
    ("--dsa- --no-dsa- --disable-dsa-", "--experimental-attention-variant"),
    (
        "--linear-conv-kernel-dim --linear-key-head-dim --linear-value-head-dim --linear-num-key-heads "
        "--linear-num-value-heads --linear-attention-freq --gdp-",
        "--experimental-attention-variant",
    ),
    (
        "--mamba- --disable-mamba-mem-eff-path",
        "--hybrid-layer-pattern --hybrid-override-pattern --is-hybrid-model --spec "
        "--hybrid-attention-ratio --hybrid-mlp-ratio",
    ),
    ("--mup-", "--use-mup"),
    ("--mhc-", "--enable-mhc-connections"),
    ("--qk-clip-", "--qk-clip"),
    ("--fim-rate --fim-spm-rate --fim-split-sample --fim-fragment-rate --fim-no-prefix", "--fim-data"),
    ("--fim-prefix-token --fim-middle-token --fim-suffix-token --fim-pad-token --fim-eod-token", "--fim-data"),
    ("--megatron-fsdp- --fsdp- --data-parallel-sharding-strategy", "--use-megatron-fsdp --use-custom-fsdp"),
    (
        "--outer-dp-sharding-strategy --suggested-communication-unit-size --no-gradient-reduce-div-fusion "
        "--enable-full-sharding-in-hsdp --keep-fp8-transpose-cache",
        "--use-megatron-fsdp --use-custom-fsdp",
    ),
    (
        "--optimizer-offload- --use-torch-optimizer-for-cpu-offload --overlap-cpu-optimizer-d2h-h2d "
        "--no-pin-cpu-grads --no-pin-cpu-params",
        "--optimizer-cpu-offload",
    ),
    ("--cpu-offloading-retain-pinned-cpu-buffers", "--cpu-offloading-num-layers"),
    (
        "--export-model-type --export-force-local-attention",
        "--export-kd-teacher-load --export-kd-cfg --export-quant-cfg --export-real-quant-cfg --export-num-medusa-heads "
        "--export-num-eagle-layers",
    ),
    ("--vision-pretraining-type", "--vision-pretraining"),
    ("--batch-invariant-backend", "--batch-invariant-mode"),
    ("--max-seqlen-per-dp-cp-rank", "--hybrid-context-parallel"),
    ("--flight-recorder- --no-flight-recorder- --disable-flight-recorder-", "--flight-recorder-dump-path"),
    ("--logits-save-", "--logits-save-dir"),
    ("--logits-load-", "--logits-load-dir"),
    ("--inprocess-", "--inprocess-restart"),
    ("--replication-", "--replication"),
    ("--fault-injector-", "--fault-injector-fault-types --fault-injector-ranks --fault-injector-num-ranks"),
    ("--ft-num-warmup-iters --calc-ft-timeouts", "--enable-ft-package"),
    ("--adlr-autoresume-interval", "--adlr-autoresume"),
    ("--validation-set-names", "--multiple-validation-sets"),
    ("--sft-tokenizer-prompt-format", "--sft"),
    ("--rl- --no-rl- --grpo- --langrl- --refit-method", "--perform-rl-step"),
    ("--kitchen-attention-backend", "--use-kitchen-attention"),
)


UNUSED_WITH: tuple[tuple[str, str], ...] = (("--fim- --mid-level-dataset-surplus", "--mock-data"),)
"""Flags, or prefixes of flags that end with a dash, and the flag with which they have no effect."""


def overriding_flag(flag: str, given: Set[str]) -> str:
    """The flag that is given and makes `flag` meaningless, or an empty string.

    Args:
        given: all flags of the command line.
    """
    return next((other for flags, other in UNUSED_WITH if other in given and _names(flags, flag)), "")


def missing_main_flags(flag: str, given: Set[str]) -> str:
    """The flags of which one would give `flag` an effect, if none of them is given; else an empty string.

    Args:
        given: all flags of the command line.
    """
    for flags, mains in UNUSED_WITHOUT:
        if _names(flags, flag) and flag not in mains.split() and not given & set(mains.split()):
            return " or ".join(mains.split())
    return ""


def _names(flags: str, flag: str) -> bool:
    """Whether a list of flags and prefixes of flags has this flag."""
    names = flags.split()
    return flag in names or any(name.endswith("-") and flag.startswith(name) for name in names)
