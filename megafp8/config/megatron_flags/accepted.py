"""Megatron-LM flags that change nothing here: neither model, numerics, schedule, data order nor saved state."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Union

MANY = "many"
Arity = Union[int, str]
"""Number of values after a flag: 0, 1, or `MANY` for one or more."""

_CHECKPOINT_SPEED = "it only affects the speed of checkpointing, and is not used"
_INFERENCE = "it is for inference; training does not use it in Megatron-LM either"
_OTHER_MODEL = "it is for another kind of model; GPT models do not use it in Megatron-LM either"
_STARTUP_SPEED = "it only affects how fast dataset indices are opened, and is not used"
_TOKENIZATION = "it only affects how text becomes tokens, and training reads tokens"
_EXPERT_OVERLAP = (
    "the exchange of tokens is not hidden behind other microbatches. The formulas are the same; only the gradients of "
    "shared experts and routers are added in another order"
)
_KERNEL = "it chooses a kernel, and kernels are chosen by --transformer-impl. The formulas are the same"

ACCEPTED_GROUPS: tuple[tuple[str, Arity, str], ...] = (
    ("--use-mcore-models", 0, "all models are megatron-core's"),
    ("--muon-use-syrk", 0, "it only affects the speed of Muon; the complete symmetric products are computed"),
    (
        "--no-use-layer-wise-param-layout --use-layer-wise-param-layout",
        0,
        "it only places gradients in memory; with --optimizer muon they are always reduced by all-reduce, and a weight "
        "is updated by one rank",
    ),
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
    (
        "--defer-embedding-wgrad-compute",
        0,
        "the weight gradient of the output layer is computed with the others, and is the same",
    ),
    ("--wgrad-deferral-limit", 1, "no weight gradient is deferred"),
    ("--auto-detect-ckpt-format --use-dist-ckpt", 0, "there is one checkpoint format"),
    (
        "--ckpt-fully-parallel-save --no-ckpt-fully-parallel-save",
        0,
        "every rank writes the part of the state that it updates, and the checkpoint is the same",
    ),
    ("--export-te-mcore-model", 0, "checkpoints have the names of Transformer Engine's layers with every layer type"),
    ("--async-strategy", 1, "with --async-save, threads of each rank write in the background"),
    ("--dist-ckpt-format", 1, "the format is chosen by --ckpt-format"),
    (
        "--use-persistent-ckpt-worker --ckpt-assume-constant-structure --ckpt-fully-parallel-load "
        "--async-ckpt-use-cpu-shm --ckpt-fully-parallel-load-per-rank-objects",
        0,
        _CHECKPOINT_SPEED,
    ),
    (
        "--async-ckpt-cpu-priority --async-ckpt-io-priority --ckpt-fully-parallel-load-exchange-algo "
        "--ckpt-fully-parallel-save-process-group --ckpt-fully-parallel-load-process-group --dist-ckpt-workers",
        1,
        _CHECKPOINT_SPEED,
    ),
    (
        "--no-ckpt-load-validate-sharding-integrity --disable-ckpt-load-validate-sharding-integrity",
        0,
        "a checkpoint is always checked when it is loaded; see --ckpt-verify",
    ),
    (
        "--no-save-tokenizer-assets --disable-save-tokenizer-assets",
        0,
        "checkpoints do not contain the files of the tokenizer",
    ),
    ("--dist-ckpt-optim-fully-reshardable", 0, "checkpoints can always be loaded under another layout"),
    ("--log-straggler", 0, "slow ranks are always reported, with the console lines, unless steps are CUDA graphs"),
    ("--straggler-ctrlr-port --straggler-minmax-count", 1, "slow ranks are reported without a server"),
    ("--exit-signal-handler-for-training", 0, "signals are handled; see --exit-signal-handler"),
    (
        "--exit-signal-handler-for-dataloader",
        0,
        "data loader processes always ignore signals, which the training process handles",
    ),
    (
        "--no-use-tokenizer-model-from-checkpoint-args --disable-use-tokenizer-model-from-checkpoint-args",
        0,
        "the tokenizer always comes from the flags",
    ),
    ("--log-validation-ppl-to-tensorboard", 0, "the validation loss is recorded; perplexity is exp(loss)"),
    (
        "--log-world-size-to-tensorboard --log-batch-size-to-tensorboard --log-loss-scale-to-tensorboard",
        0,
        "it is in the records of every run",
    ),
    (
        "--no-log-loss-scale-to-tensorboard --disable-log-loss-scale-to-tensorboard "
        "--no-log-learnig-rate-to-tensorboard",
        0,
        "the records of a run are always complete",
    ),
    ("--log-memory-interval", 1, "the records of a run have the peak memory of every step"),
    ("--log-device-memory-used", 0, "the records of a run have the peak memory of every step"),
    ("--log-max-attention-logit", 0, "it is not measured, and the records do not have it"),
    ("--otel-enabled", 0, "traces are not exported; see --log-timers-to-tensorboard and --profile"),
    ("--otel-service-name --otel-span-groups", 1, "traces are not exported"),
    ("--nvtx-ranges", 0, "--profile records a torch profile, which has no NVTX ranges"),
    ("--tensorboard-queue-size", 1, "values are written when they are logged"),
    ("--timing-log-level --timing-log-option", 1, "the parts of a step are timed with --log-timers-to-tensorboard"),
    ("--no-barrier-with-level-1-timing", 0, "timers use no barrier"),
    ("--moe-per-layer-logging", 0, "the records have the load of the experts of each layer"),
    ("--config-logger-dir", 1, "every run writes its complete configuration next to its records"),
    ("--use-pytorch-profiler", 0, "--profile always records a torch profile"),
    ("--no-one-logger", 0, "there is no one_logger here"),
    ("--one-logger-project --one-logger-run-name --app-tag-run-name --app-tag-run-version", 1, "it is not used"),
    ("--disable-gloo-process-groups", 0, "Gloo groups are created only where they are needed"),
    ("--DDP-impl", 1, "there is one implementation of data parallelism, megatron-core's"),
    ("--disable-msc --enable-msc", 0, "files are read from local paths only; other paths are refused"),
    ("--enable-experimental", 0, "there are no experimental features to enable"),
    ("--use-cpu-initialization", 0, "initial weights are equal on every device and under every layout"),
    ("--no-persist-layer-norm", 0, "the kernel of the norm is chosen by --transformer-impl"),
    (
        "--no-align-grad-reduce --disable-align-grad-reduce --no-align-param-gather --create-all-gather-group",
        0,
        "it only affects when a collective starts, and is not used",
    ),
    (
        "--te-rng-tracker --inference-rng-tracker",
        0,
        "random numbers come from megatron-core's generators, also with CUDA graphs, which have no dropout here",
    ),
    ("--cuda-graph-modules", MANY, "a CUDA graph holds all passes of a step; see --cuda-graph-impl"),
    (
        "--apply-residual-connection-post-layernorm",
        0,
        "megatron-core does not use it: residual connections are pre-norm",
    ),
    ("--use-sharp", 0, "NCCL has its default settings; tune it with NCCL_* environment variables"),
    (
        "--sharp-enabled-group --nccl-communicator-config-path",
        1,
        "NCCL has its default settings; tune it with NCCL_* environment variables",
    ),
    ("--high-priority-stream-groups", MANY, "all process groups have streams of the same priority"),
    (
        "--overlap-param-gather-with-optimizer-step",
        0,
        "the gather starts after the update and overlaps the forward pass; see --overlap-param-gather",
    ),
    ("--distrib-optim-fully-reshardable-mem-efficient", 0, _CHECKPOINT_SPEED),
    ("--optimizer-cuda-graph", 0, "the update is one kernel per buffer; see --cuda-graph-impl for the passes"),
    ("--no-manual-gc-eval --disable-manual-gc-eval", 0, "--manual-gc does not collect around validations"),
    (
        "--overlap-moe-expert-parallel-comm --delay-wgrad-compute --overlap-dispatch-backward-with-experts-wgrad "
        "--ep-overlap-early-attn-memory-release --high-priority-a2a-comm-stream",
        0,
        _EXPERT_OVERLAP,
    ),
    (
        "--use-fused-weighted-squared-relu --use-grouped-gemm-for-shared-expert --use-grouped-gemm-for-dense-mlp "
        "--use-te-activation-func",
        0,
        _KERNEL,
    ),
    ("--flash-attention-version", 1, "Transformer Engine chooses the version; see --attention-backend"),
    ("--symmetric-ar-type", 1, "NCCL has its default settings; tune it with NCCL_* environment variables"),
    ("--ddp-num-buckets", 1, "it only affects when gradients are reduced; see --ddp-bucket-size"),
    ("--reuse-grad-buf-for-mxfp8-param-ag", 0, "it only saves memory; gathered weights have their own buffer"),
    ("--eval-micro-batch-size", 1, "validation reads the same samples with the micro-batch size of training"),
    (
        "--check-for-spiky-loss --check-for-large-grads",
        0,
        "Megatron-LM repeats such a step to tell whether the hardware caused it. Steps are not repeated here; "
        "--spike-policy finds spikes of loss and gradient norm",
    ),
    (
        "--result-rejected-tracker-filename",
        1,
        "steps are not repeated and rejected; the records have the steps whose update was skipped",
    ),
    (
        "--activation-offload-fraction --delta-offload-bytes-across-pp-ranks "
        "--fine-grained-offloading-max-inflight-offloads",
        1,
        "all activations of --offload-modules are offloaded",
    ),
    ("--delay-offload-until-cuda-graph", 0, "CUDA graphs exclude --fine-grained-activation-offloading"),
    ("--ckpt-pg-tensors-cache-path", 1, _CHECKPOINT_SPEED),
    ("--ckpt-pg-tensors-cache-create", 0, _CHECKPOINT_SPEED),
    (
        "--tokenizer-hf-include-special-tokens --tokenizer-hf-no-include-special-tokens "
        "--no-tokenizer-sentencepiece-ignore-extra-whitespaces "
        "--disable-tokenizer-sentencepiece-ignore-extra-whitespaces",
        0,
        _TOKENIZATION,
    ),
    ("--object-storage-cache-path", 1, "data is read from local paths, which need no cache"),
    ("--record-memory-history", 0, "no snapshot is written; the records of a run have the peak memory of every step"),
    ("--memory-snapshot-path", 1, "no snapshot is written; the records of a run have the peak memory of every step"),
    ("--pytorch-profiler-collect-chakra", 0, "--profile writes a trace for Chrome or Perfetto, without that of Chakra"),
    (
        "--disable-straggler-on-startup --run-workload-inspector-server",
        0,
        "slow ranks are reported from the first step, without a server",
    ),
    ("--onnx-safe", 1, "it is for the export of a model"),
    ("--one-logger-async", 0, "it is not used"),
    ("--num-dataset-builder-threads", 1, "dataset indices are built by one thread"),
    ("--dataloader-fast-cache-load --dataloader-defer-npy-index-mmap", 0, _STARTUP_SPEED),
    ("--per-dataset-sequences-path", 1, _STARTUP_SPEED),
    ("--train-sync-interval", 1, "every step is synchronized for its record"),
    (
        "--legacy-tokenizer --tokenizer-hf-use-fast --tokenizer-hf-no-use-fast",
        0,
        "there is one implementation of each tokenizer",
    ),
    ("--use-gigatoken", 0, "text is tokenized before training, by megafp8 preprocess"),
    ("--chat-template", 1, "it is for instruction tuning; pretraining reads tokens from shards"),
    (
        "--trust-remote-code",
        0,
        "code that comes with a tokenizer is never run; a tokenizer that needs it is refused when it is loaded",
    ),
    (
        "--disable-tp-comm-split-ag --disable-tp-comm-split-rs --no-tp-comm-split-ag --no-tp-comm-split-rs",
        0,
        "Transformer Engine no longer has a split overlap; see --disable-tp-comm-overlap-ag and -rs",
    ),
    (
        "--error-injection-rate --error-injection-type",
        1,
        "its errors test the repeated steps of --rerun-mode, which do not exist here: none is injected, and none stops "
        "the run; MEGAFP8_FAULTS plans faults of a run",
    ),
    (
        "--flash-decode --nccl-all-reduce-for-prefill --use-legacy-static-engine --decode-only-cuda-graphs "
        "--enable-chunked-prefill --use-same-sampling-seed-across-dp-ranks --output-bert-embeddings",
        0,
        _INFERENCE,
    ),
    ("--mlp-chunks-for-prefill --max-tokens-to-oom --num-speculative-tokens", 1, _INFERENCE),
    (
        "--use-one-sent-docs --no-data-sharding --dino-norm-last-layer --bert-no-binary-head "
        "--biencoder-shared-query-context-model --retriever-score-scaling",
        0,
        _OTHER_MODEL,
    ),
    ("--retriever-report-topk-accuracies", MANY, _OTHER_MODEL),
    (
        "--dino-local-img-size --dino-local-crops-number --dino-head-hidden-size --dino-bottleneck-size "
        "--dino-freeze-last-layer --dino-warmup-teacher-temp --dino-teacher-temp --dino-warmup-teacher-temp-epochs "
        "--vision-backbone-type --swin-backbone-type --img-h --img-w --bert-load --bert-embedder-type --ict-head-size "
        "--ict-load --biencoder-projection-dim --indexer-batch-size --indexer-log-interval --mask-prob --mask-type "
        "--mask-factor --relative-attention-num-buckets --relative-attention-max-distance "
        "--titles-data-path --query-in-block-prob --evidence-data-path --block-data-path --embedding-path "
        "--short-seq-prob --num-classes --num-channels --patch-dim --classes-fraction --data-per-class-fraction "
        "--iter-per-epoch",
        1,
        _OTHER_MODEL,
    ),
)
"""Flags, how many values they take, and why they change nothing."""

ACCEPTED_PREFIXES: tuple[tuple[str, str], ...] = (
    ("--inference- --no-inference-", _INFERENCE),
    ("--lion-", "it is for another optimizer, which --optimizer refuses"),
)
"""Beginnings of flags with any values, and why they change nothing. `refused.py` has exceptions."""

_ALWAYS = "this is always the case"
_RERUN = (
    "loss, gradients and gradient norm are checked in every step, and a bad value stops all ranks; a step is not "
    "repeated to tell whether the hardware caused it"
)

ACCEPTED_VALUES: Mapping[str, tuple[tuple[str, ...], str]] = MappingProxyType(
    {
        "--data-parallel-sharding-strategy": (("no_shard",), _ALWAYS),
        "--outer-dp-sharding-strategy": (("no_shard",), _ALWAYS),
        "--rerun-mode": (("disabled", "validate_results", "report_determinism_stats", "report_stats"), _RERUN),
        "--exit-signal": (("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"), "each of these signals is handled"),
        "--cpu-offloading-num-layers": (("0",), _ALWAYS),
        "--mlp-chunks-for-training": (("1",), _ALWAYS),
        "--mid-level-dataset-surplus": (("0.005",), _ALWAYS),
        "--null-tokenizer-pad-id": (("-1",), _ALWAYS),
        "--head-lr-mult": (("1", "1.0"), _ALWAYS),
        "--non-persistent-local-ckpt-algo": (
            ("fully_parallel", "atomic"),
            "non-persistent checkpoints are in one folder, not on local disks",
        ),
        "--vocab-extra-ids": (("0",), _ALWAYS),
        "--sample-rate": (("1", "1.0"), _ALWAYS),
        "--hybrid-attention-ratio": (("0", "0.0"), _ALWAYS),
        "--hybrid-mlp-ratio": (("0", "0.0"), _ALWAYS),
    }
)
"""Refused flags that are accepted with these values, and why they change nothing."""
