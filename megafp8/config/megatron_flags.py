"""Megatron-LM flags that are not settings of megafp8, and how each is handled.

- replaced: an old spelling of a flag that exists; parsed as the new one, with a notice.
- accepted: has no effect on training, and needs none; a notice says so.
- refused: would change training, or asks for an unsupported feature; the reason names an alternative.

In doubt a flag is refused, so that no request is silently ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Optional, Union

MANY = "many"
Arity = Union[int, str]
"""Number of values after a flag: 0, 1, or `MANY` for one or more."""
NO_EFFECT = ": no effect; "
"""Between flag and reason in the notice of an accepted flag."""


@dataclass(frozen=True)
class Verdict:
    """How one Megatron-LM flag is handled.

    Attributes:
        accepted: whether `text` is a notice and not a problem.
        text: the message, which begins with the flag.
    """

    accepted: bool
    text: str


# ---- replaced -----------------------------------------------------------------------------------------------------

REPLACED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "--use-rotary-position-embeddings": ("--position-embedding-type", "rope"),
        "--encoder-num-layers": ("--num-layers",),
        "--persistent-save-interval": ("--save-interval",),
        "--fp8-e4m3": ("--fp8-format", "e4m3"),
        "--fp8-hybrid": ("--fp8-format", "hybrid"),
    }
)
"""Old flag -> new flag and values. Values after the old flag follow them."""


def replace(options: Sequence[Sequence[str]]) -> tuple[list[list[str]], list[str]]:
    """Substitute the new spelling of replaced flags.

    Args:
        options: one list per option: the flag and its values.

    Returns:
        The options and a notice for each replacement.
    """
    replaced, notices = [], []
    for flag, *words in options:
        new = REPLACED.get(flag)
        if new is not None:
            notices.append(f"{flag} is read as {' '.join(new)}")
        replaced.append([*(new or (flag,)), *words])
    return replaced, notices


# ---- accepted with a notice ---------------------------------------------------------------------------------------

_ACCEPTED_GROUPS: tuple[tuple[str, Arity, str], ...] = (
    ("--use-mcore-models", 0, "all models are megatron-core's"),
    (
        "--use-flash-attn",
        0,
        "kernels are chosen by --attention-backend; auto uses flash attention where it is supported",
    ),
    ("--no-async-tensor-model-parallel-allreduce", 0, "it has no effect in megatron-core either"),
    ("--no-scatter-gather-tensors-in-pipeline", 0, "it has no effect in megatron-core either"),
    ("--no-query-key-layer-scaling", 0, "that is the default"),
    ("--fp8-interval", 1, "FP8 scales are updated in every step, as in Transformer Engine since 1.8"),
    ("--local-rank --local_rank", 1, "the rank is read from torchrun's environment variables"),
    ("--auto-detect-ckpt-format --use-dist-ckpt --ckpt-fully-parallel-save", 0, "there is one checkpoint format"),
    ("--dist-ckpt-format", 1, "the format is chosen by --ckpt-format"),
    (
        "--use-persistent-ckpt-worker --ckpt-assume-constant-structure --ckpt-fully-parallel-load",
        0,
        "it only affects the speed of checkpointing, and is not used",
    ),
    ("--dist-ckpt-optim-fully-reshardable", 0, "checkpoints can always be loaded under another layout"),
    ("--log-straggler", 0, "slow ranks are always reported, with the console lines"),
    (
        "--exit-signal-handler-for-dataloader",
        0,
        "data loader processes always ignore signals, which the training process handles",
    ),
    ("--no-use-tokenizer-model-from-checkpoint-args", 0, "the tokenizer always comes from the flags"),
    ("--log-validation-ppl-to-tensorboard", 0, "the validation loss is recorded; perplexity is exp(loss)"),
    (
        "--log-world-size-to-tensorboard --log-batch-size-to-tensorboard --log-loss-scale-to-tensorboard",
        0,
        "it is in the records of every run",
    ),
    (
        "--no-log-loss-scale-to-tensorboard --no-log-learnig-rate-to-tensorboard",
        0,
        "the records of a run are always complete",
    ),
    ("--tensorboard-queue-size", 1, "values are written when they are logged"),
    ("--timing-log-level --timing-log-option", 1, "the parts of a step are timed with --log-timers-to-tensorboard"),
    ("--no-barrier-with-level-1-timing", 0, "timers use no barrier"),
    ("--config-logger-dir", 1, "every run writes its complete configuration next to its records"),
    ("--use-pytorch-profiler", 0, "--profile always records a torch profile"),
    ("--no-one-logger", 0, "there is no one_logger here"),
    ("--one-logger-project --one-logger-run-name --app-tag-run-name --app-tag-run-version", 1, "it is not used"),
    ("--disable-gloo-process-groups", 0, "Gloo groups are created only where they are needed"),
    ("--disable-msc", 0, "files are read from local paths only"),
    ("--enable-experimental", 0, "there are no experimental features to enable"),
    ("--use-cpu-initialization", 0, "initial weights are equal on every device and under every layout"),
    ("--no-persist-layer-norm", 0, "the kernel of the norm is chosen by --transformer-impl"),
    ("--no-align-grad-reduce --no-align-param-gather", 0, "it only affects when a collective starts, and is not used"),
    ("--num-dataset-builder-threads", 1, "dataset indices are built by one thread"),
    ("--train-sync-interval", 1, "every step is synchronized for its record"),
    ("--legacy-tokenizer --tokenizer-hf-use-fast", 0, "there is one implementation of each tokenizer"),
    (
        "--disable-tp-comm-split-ag --disable-tp-comm-split-rs",
        0,
        "Transformer Engine no longer has a split overlap; see --disable-tp-comm-overlap-ag and -rs",
    ),
)

_HARMLESS_VALUES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "--expert-model-parallel-size": ("1",),
        "--expert-tensor-parallel-size": ("1",),
        "--num-experts": ("0",),
        "--data-parallel-sharding-strategy": ("no_shard",),
        "--num-distributed-optimizer-instances": ("1",),
        "--rerun-mode": ("disabled",),
        "--error-injection-rate": ("0",),
        "--rope-type": ("rope",),
        "--softmax-type": ("vanilla",),
        "--cpu-offloading-num-layers": ("0",),
        "--mid-level-dataset-surplus": ("0.005",),
        "--vocab-extra-ids": ("0",),
        "--sample-rate": ("1", "1.0"),
        "--hybrid-attention-ratio": ("0", "0.0"),
        "--hybrid-mlp-ratio": ("0", "0.0"),
        "--moe-router-load-balancing-type": ("none",),
    }
)
"""Refused flags that are accepted with these values, because they ask for what holds anyway."""

# ---- refused ------------------------------------------------------------------------------------------------------

_MOE = "dense models only so far; remove the mixture-of-experts flags"
_FSDP = "fully sharded data parallelism is not supported; --use-distributed-optimizer shards the optimizer state"
_GRAPHS = "use --cuda-graph-impl local, which captures a complete step"
_OTHER_MODEL = "it is for another kind of model; megafp8 trains GPT models on text"
_EVEN_STAGES = "every pipeline stage has the same number of layers; choose a divisible --num-layers"
_LAUNCHER = "it is a flag of torchrun: put it before the training script, or start with megafp8 torchrun"
_CKPT_ARGS = "settings are not read from checkpoints; use --config FILE with the file that each run writes"
_NO_INIT_CHOICE = "weights are initialized from a normal distribution with --init-method-std"
_OLD = "no longer valid in Megatron-LM either; use "

_REFUSED_PREFIXES: tuple[tuple[str, str], ...] = (
    ("--moe- --expert-", _MOE),
    ("--megatron-fsdp- --torch-fsdp2- --fsdp-", _FSDP),
    ("--kitchen-", "NVIDIA's internal quantization library is not used; use --fp8-format and --fp8-recipe"),
    ("--tp-comm-split --tp-comm-atomic", "Transformer Engine no longer has this overlap; use --tp-comm-overlap"),
    ("--optimizer-offload-", "the optimizer stays on the device; remove it, or shard with --use-distributed-optimizer"),
    (
        "--non-persistent-local-",
        "non-persistent checkpoints are in one shared folder; use --non-persistent-ckpt-type global",
    ),
    ("--replication", "checkpoints are not replicated; use --save on a shared file system"),
    ("--ckpt-convert-", "checkpoints are not converted on load or save; see megafp8 convert"),
    ("--inprocess-", "a failed run is restarted by its launcher; use torchrun --max-restarts"),
    ("--muon-", "the supported optimizers are adam and sgd; see --optimizer"),
    ("--inference-", "it is for inference; megafp8 generate generates text from a checkpoint"),
    ("--rl- --grpo- --langrl-", "this pretrains; no reinforcement learning"),
    ("--mtp-", "multi-token prediction is not supported; remove it"),
    ("--heterogeneous-", "all layers are equal; remove it"),
    ("--straggler-", "no straggler detection; the JSONL records hold each step's time"),
    ("--nproc --nnodes --node-rank --node_rank --master --rdzv", _LAUNCHER),
    (
        "--retro- --mamba- --hybrid- --dino- --vision- --swin- --img- --bert- --ict- --biencoder- --retriever- "
        "--indexer- --mask- --decoder-seq- --relative-attention- --qk-pos-emb- --sft- --mrope-",
        _OTHER_MODEL,
    ),
)

_REFUSED_GROUPS: tuple[tuple[str, str], ...] = (
    ("--num-experts --overlap-moe-expert-parallel-comm --use-fused-weighted-squared-relu", _MOE),
    (
        "--use-megatron-fsdp --use-custom-fsdp --use-torch-fsdp2 --data-parallel-sharding-strategy "
        "--init-model-with-meta-device --keep-fp8-transpose-cache --enable-full-sharding-in-hsdp "
        "--suggested-communication-unit-size --no-strict-fsdp-dtensor-load",
        _FSDP,
    ),
    (
        "--use-sharp --sharp-enabled-group --symmetric-ar-type "
        "--nccl-communicator-config-path --high-priority-stream-groups --pipeline-model-parallel-comm-backend "
        "--use-ring-exchange-p2p",
        "NCCL has its default settings; tune it with NCCL_* environment variables",
    ),
    ("--enable-cuda-graph --external-cuda-graph", _GRAPHS),
    (
        "--te-rng-tracker",
        "random number generators are megatron-core's, and CUDA graphs do not support dropout; remove it",
    ),
    ("--fp8-quantizer-factory", "quantizers are chosen by --fp8-recipe"),
    ("--fp4-quantizer-factory", "quantizers are chosen by --fp4-recipe"),
    ("--fp4-param-gather", "weights are gathered in high precision and quantized after; remove it"),
    ("--te-precision-config-file", "its file format is not supported: use --precision-map FILE (docs/precision.md)"),
    ("--reuse-grad-buf-for-mxfp8-param-ag", "gathering weights in this format is not supported yet; remove it"),
    (
        "--fp8-multi-head-attention",
        "the rotary embedding between linear_qkv and attention is in BF16; use --fp8-dot-product-attention",
    ),
    ("--fp8-output-proj", "give --precision output_layer=RECIPE"),
    ("--use-kitchen-attention", "attention is chosen by --attention-backend"),
    ("--use-grouped-gemm-for-dense-mlp --use-te-activation-func", "kernels are chosen by --transformer-impl"),
    ("--num-distributed-optimizer-instances", "one distributed optimizer over all data-parallel ranks; remove it"),
    ("--overlap-param-gather-with-optimizer-step", "use --overlap-param-gather"),
    (
        "--decoder-first-pipeline-num-layers --decoder-last-pipeline-num-layers --pipeline-model-parallel-layout "
        "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
        _EVEN_STAGES,
    ),
    ("--use-tp-pp-dp-mapping", "ranks are always ordered tensor, context, data, pipeline (megatron-core's default)"),
    ("--hierarchical-context-parallel-sizes", "context parallelism has one level; use --context-parallel-size"),
    ("--distributed-timeout-seconds-after-init", "use --distributed-timeout-minutes"),
    ("--lazy-mpu-init", "process groups are created at startup; remove it"),
    (
        "--optimizer-cpu-offload --use-torch-optimizer-for-cpu-offload --overlap-cpu-optimizer-d2h-h2d "
        "--no-pin-cpu-grads --no-pin-cpu-params --cpu-offloading-num-layers",
        "nothing is offloaded to the host; use --use-distributed-optimizer, --recompute-granularity or more ranks",
    ),
    ("--save-retain-interval", "the newest checkpoints are kept, or all of them: give --ckpt-keep N, or remove it"),
    (
        "--distrib-optim-fully-reshardable-mem-efficient --dist-ckpt-save-pre-mcore-014 "
        "--ckpt-drop-redundant-extra-state --no-ckpt-fully-parallel-save",
        "there is only one way to write a checkpoint; remove it",
    ),
    ("--load-main-params-from-ckpt", "weights and master weights are loaded together; use --finetune for weights only"),
    (
        "--no-initialization",
        "weights are always initialized: gradient clipping needs attributes that this sets; remove it",
    ),
    ("--use-checkpoint-args --use-mp-args-from-checkpoint-args", _CKPT_ARGS),
    ("--yaml-cfg", "settings come from flags and from JSON: --config FILE"),
    ("--spec --use-legacy-models", "models are megatron-core's; layers are chosen by --transformer-impl"),
    ("--rampup-batch-size --decrease-batch-size-if-needed", "the global batch is constant; use --global-batch-size"),
    (
        "--iterations-to-skip --result-rejected-tracker-filename",
        "steps cannot be skipped by their number; --max-skipped-steps and --spike-policy skip steps by their values",
    ),
    (
        "--rerun-mode --error-injection-rate --error-injection-type",
        "steps are not repeated for comparison; loss and gradient norm are checked in every step",
    ),
    ("--check-for-spiky-loss --check-for-large-grads", "use --spike-policy skip or --spike-policy rollback"),
    (
        "--adlr-autoresume --adlr-autoresume-interval --enable-ft-package --calc-ft-timeouts",
        "it needs NVIDIA's own cluster software; use --save with --load, and --exit-duration-in-mins",
    ),
    (
        "--disable-straggler-on-startup --run-workload-inspector-server",
        "slow ranks are reported in the records from the first step; there is no server",
    ),
    ("--log-energy", "energy is not measured; remove it"),
    ("--record-memory-history --memory-snapshot-path", "use --profile and --log-memory-to-tensorboard"),
    ("--one-logger-async", "one_logger is not supported; remove it"),
    (
        "--full-validation --multiple-validation-sets",
        "validation reads --eval-iters global batches of one validation set",
    ),
    ("--data-args-path --per-split-data-args-path", "give the list itself: --data-path $(cat FILE)"),
    ("--object-storage-cache-path", "data is read from local paths; copy it first"),
    (
        "--mid-level-dataset-surplus --sample-rate --short-seq-prob --allow-ambiguous-pad-tokens",
        "samples are read from the shards unchanged; remove it",
    ),
    ("--padded-vocab-size", "padding follows --vocab-size, --make-vocab-size-divisible-by and the layout"),
    (
        "--tokenizer-metadata --tiktoken-special-tokens "
        "--tokenizer-hf-include-special-tokens --trust-remote-code --vocab-extra-ids",
        "tokenizers are defined by their files alone; see --tokenizer-type and --tokenizer-model",
    ),
    (
        "--multi-latent-attention --q-lora-rank --kv-lora-rank --qk-head-dim --v-head-dim --rotary-scaling-factor "
        "--mscale --mscale-all-dim --cache-mla-latents",
        "attention is multi-head or grouped-query; remove it",
    ),
    ("--no-position-embedding", "use --position-embedding-type rope, or none"),
    ("--rope-type", "rotary embeddings are plain or scaled as Llama 3.1's; see --use-rope-scaling"),
    (
        "--softmax-type --qk-l2-norm --no-rope-freq --window-attn-skip-freq",
        "all layers have the same attention, with a plain softmax",
    ),
    (
        "--openai-gelu --quick-geglu --activation-func-clamp-value --glu-linear-offset --onnx-safe",
        "activations are GELU, --swiglu and --squared-relu",
    ),
    (
        "--apply-residual-connection-post-layernorm --fp32-residual-connection",
        "residual connections are pre-norm, in the dtype of the weights",
    ),
    ("--fp16-lm-cross-entropy", "the loss is computed in FP32; remove it"),
    ("--init-method-xavier-uniform --embedding-init-method-std", _NO_INIT_CHOICE),
    ("--distribute-checkpointed-activations", _OLD + "--distribute-saved-activations"),
    ("--checkpoint-activations", _OLD + "--recompute-activations"),
    ("--batch-size", _OLD + "--micro-batch-size"),
    ("--warmup", _OLD + "--lr-warmup-fraction"),
    ("--model-parallel-size", _OLD + "--tensor-model-parallel-size"),
    ("--perform-rl-step", "this pretrains; no reinforcement learning"),
    ("--sft", "this pretrains on text; no instruction tuning"),
    (
        "--decoder-num-layers --titles-data-path --query-in-block-prob --use-one-sent-docs --evidence-data-path "
        "--block-data-path --embedding-path --num-classes --num-channels --patch-dim --classes-fraction "
        "--data-per-class-fraction --no-data-sharding --head-lr-mult --iter-per-epoch --is-hybrid-model "
        "--disable-mamba-mem-eff-path",
        _OTHER_MODEL,
    ),
)

_OVERRIDABLE: Mapping[str, str] = MappingProxyType(
    {
        "--microbatch-group-size-per-virtual-pipeline-stage": "transformer.microbatch_group_size_per_vp_stage=N",
        "--overlap-p2p-communication-warmup-flush": "transformer.overlap_p2p_comm_warmup_flush=True",
        "--no-clone-scatter-output-in-embedding": "transformer.clone_scatter_output_in_embedding=False",
        "--defer-embedding-wgrad-compute": "transformer.defer_embedding_wgrad_compute=True",
        "--wgrad-deferral-limit": "transformer.wgrad_deferral_limit=N",
        "--delay-wgrad-compute": "transformer.delay_wgrad_compute=True",
        "--disable-bf16-reduced-precision-matmul": "transformer.disable_bf16_reduced_precision_matmul=True",
        "--test-mode": "transformer.test_mode=True",
        "--ddp-num-buckets": "ddp.bucket_size=PARAMETERS",
        "--ddp-pad-buckets-for-high-nccl-busbw": "ddp.pad_buckets_for_high_nccl_busbw=True",
        "--ddp-reduce-scatter-with-fp32-accumulation": "ddp.reduce_scatter_with_fp32_accumulation=True",
        "--use-nccl-ub": "ddp.nccl_ub=True",
        "--disable-symmetric-registration": "ddp.disable_symmetric_registration=True",
        "--no-gradient-reduce-div-fusion": "ddp.gradient_reduce_div_fusion=False",
    }
)
"""Flags that only set a field of megatron-core's configuration, for which there is --override."""


# ---- lookup -------------------------------------------------------------------------------------------------------


def classify(flag: str, words: Sequence[str]) -> Optional[Verdict]:
    """How a flag that is not a setting is handled; None if Megatron-LM does not have it either."""
    for flags, arity, reason in _ACCEPTED_GROUPS:
        if flag in flags.split():
            fits = len(words) >= 1 if arity == MANY else len(words) == arity
            if not fits:
                takes = {0: "no value", 1: "one value", MANY: "one or more values"}[arity]
                return Verdict(False, f"{flag}: takes {takes}, got {' '.join(map(repr, words)) or 'none'}")
            return Verdict(True, f"{flag}{NO_EFFECT}{reason}")
    refusal = refusal_reason(flag)
    if refusal is None:
        return None
    if len(words) == 1 and words[0] in _HARMLESS_VALUES.get(flag, ()):
        return Verdict(True, f"{flag} {words[0]}{NO_EFFECT}this is always the case")
    return Verdict(False, f"{flag}: {refusal}")


def refusal_reason(flag: str) -> Optional[str]:
    """Why a flag is refused and what to use instead; None if it is not."""
    if flag in _OVERRIDABLE:
        return f"set megatron-core's field directly: --override {_OVERRIDABLE[flag]}"
    for flags, reason in _REFUSED_GROUPS:
        if flag in flags.split():
            return reason
    return next((reason for prefixes, reason in _REFUSED_PREFIXES if flag.startswith(tuple(prefixes.split()))), None)
