"""Megatron-LM flags that would change training, or ask for an unsupported feature: the reason and what to use."""

from __future__ import annotations

_NEWER_MOE = "not supported, as a feature of newer versions of megatron-core; remove it"
_UPCYCLING = "weights are not copied into experts; train from scratch, or from a model with experts"
_FSDP = (
    "Megatron-FSDP is not supported: on two H200s it needed 48 GiB where the distributed optimizer needs 35, and 1.03 "
    "of its time; use --use-distributed-optimizer, or --use-torch-fsdp2 for less memory"
)
_OTHER_MODEL = "for another kind of model; megafp8 trains GPT models on text"
_LAUNCHER = "flags of torchrun come before the training script; or start with megafp8 torchrun"
_OTHER_ATTENTION = (
    "neither linear attention (gated delta net) nor sparse attention (DSA) is supported, and without it another model "
    "would be trained"
)
_OLD = "no longer valid in Megatron-LM either; use "

REFUSED_PREFIXES: tuple[tuple[str, str], ...] = (
    ("--moe-hybridep-pad- --moe-hybridep-num-blocks- --moe-hybridep-num-sms- --moe-ncclep-", _NEWER_MOE),
    ("--moe-upcycling-", _UPCYCLING),
    ("--moe-routing-trace-", "routing is not traced; the records have the load of the experts"),
    ("--moe-paged-stash-", _NEWER_MOE),
    ("--megatron-fsdp- --fsdp-", _FSDP),
    ("--kitchen-", "NVIDIA's internal quantization library is not used; use --fp8-format and --fp8-recipe"),
    ("--tp-comm-split --tp-comm-atomic", "Transformer Engine no longer has this overlap; use --tp-comm-overlap"),
    ("--optimizer-offload-", "the optimizer stays on the device; remove it, or shard with --use-distributed-optimizer"),
    (
        "--non-persistent-local-",
        "non-persistent checkpoints are in one shared folder; use --non-persistent-ckpt-type global",
    ),
    ("--replication", "checkpoints are not replicated; use --save on a shared file system"),
    ("--ckpt-convert-", "checkpoints are not converted on load or save; use megafp8 convert from-megatron"),
    ("--inprocess-", "a failed run is restarted by its launcher; use torchrun --max-restarts"),
    ("--rl- --no-rl- --grpo- --langrl-", "this pretrains; no reinforcement learning"),
    ("--mup- --use-mup", "maximal update parametrization is not supported; set --lr and --init-method-std"),
    ("--mhc- --enable-mhc-connections", "residual connections have one stream; remove it"),
    ("--gtp-", "weights are not sharded over tensor-parallel ranks a second time; use --use-distributed-optimizer"),
    ("--qk-clip", "attention logits are not clipped; --qk-layernorm bounds them"),
    ("--logits-save- --logits-load-", "there is no distillation: logits are neither saved nor loaded"),
    ("--fault-injector-", "plan faults with the environment variable MEGAFP8_FAULTS (docs/reliability.md)"),
    (
        "--flight-recorder- --no-flight-recorder- --disable-flight-recorder-",
        "set PyTorch's environment variables: TORCH_NCCL_TRACE_BUFFER_SIZE, TORCH_NCCL_DUMP_ON_TIMEOUT and "
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
    ),
    ("--fim-", "samples are read from the shards unchanged, without fill-in-the-middle; remove it"),
    ("--experimental-attention-variant --linear- --gdp- --dsa- --no-dsa- --disable-dsa-", _OTHER_ATTENTION),
    ("--heterogeneous-", "all layers are equal; remove it"),
    ("--nproc --nnodes --node-rank --node_rank --master --rdzv", _LAUNCHER),
    (
        "--retro- --mamba- --hybrid- --vision-pretraining --decoder-seq- --sft- --mrope-",
        _OTHER_MODEL,
    ),
)

REFUSED_GROUPS: tuple[tuple[str, str], ...] = (
    (
        "--activation-func-fp8-input-store",
        "it casts the activation's input to FP8 without a scale; use --fp8-saved-activations activation",
    ),
    ("--mtp-standalone", "the layers of multi-token prediction are on the last pipeline stage; remove it"),
    (
        "--mtp-use-repeated-layer --mtp-detach-heads --mtp-hsm --mtp-hybrid-override-pattern",
        "this multi-token prediction is not in megatron-core 0.16.1; remove it",
    ),
    (
        "--export-kd-teacher-load --export-kd-cfg --export-quant-cfg --export-real-quant-cfg "
        "--export-num-medusa-heads --export-num-eagle-layers --export-model-type --export-force-local-attention",
        "for post-training with NVIDIA's Model Optimizer; this pretrains",
    ),
    ("--moe-use-legacy-grouped-gemm", "it needs the grouped_gemm package, and its experts are in BF16; remove it"),
    ("--moe-extended-tp", _OLD + "--expert-tensor-parallel-size"),
    (
        "--moe-router-topk-limited-devices",
        "deprecated in megatron-core; use --moe-router-group-topk with that number, and --moe-router-num-groups with "
        "that of --expert-model-parallel-size",
    ),
    ("--moe-permute-fusion-into-hybridep", _NEWER_MOE),
    ("--moe-use-upcycling", _UPCYCLING),
    (
        "--moe-shared-expert-glu-interleave-size --moe-router-quantile-balancing-ema --moe-router-force-biased "
        "--moe-use-grouped-tensor --moe-single-grouped-weight --moe-single-grouped-bias "
        "--moe-pad-experts-for-cuda-graph-inference --moe-dispatch-fwd-dtype --moe-combine-bwd-dtype "
        "--moe-paged-stash --moe-mlp-glu-interleave-size --moe-expert-rank-capacity-factor",
        _NEWER_MOE,
    ),
    ("--moe-latent-size", "experts have the hidden size of the model; remove it"),
    ("--moe-enable-routing-replay", "tokens are routed again in every forward pass; remove it"),
    ("--save-tokens-per-expert-interval", "the records have the load of the experts; remove it"),
    (
        "--use-megatron-fsdp --use-custom-fsdp --data-parallel-sharding-strategy "
        "--init-model-with-meta-device --keep-fp8-transpose-cache --enable-full-sharding-in-hsdp "
        "--outer-dp-sharding-strategy --no-gradient-reduce-div-fusion --disable-strict-fsdp-dtensor-load "
        "--suggested-communication-unit-size --no-strict-fsdp-dtensor-load",
        _FSDP,
    ),
    ("--fp8-quantizer-factory", "quantizers are chosen by --fp8-recipe"),
    ("--fp4-quantizer-factory", "quantizers are chosen by --fp4-recipe"),
    ("--fp4-param-gather", "weights are quantized after their gather; remove it (weights in FP4: docs/upstream.md)"),
    ("--te-precision-config-file", "its file format is not supported: use --precision-map FILE (docs/precision.md)"),
    (
        "--fp8-multi-head-attention",
        "the rotary embedding between linear_qkv and attention is in BF16; use --fp8-dot-product-attention",
    ),
    ("--fp8-output-proj", "give --precision output_layer=RECIPE"),
    ("--use-kitchen-attention", "attention is chosen by --attention-backend"),
    ("--use-ring-exchange-p2p", "it needs a build of PyTorch with torch.distributed.ring_exchange; remove it"),
    ("--distributed-timeout-seconds-after-init", "use --distributed-timeout-minutes"),
    ("--lazy-mpu-init", "process groups are created at startup; remove it"),
    (
        "--optimizer-cpu-offload --use-torch-optimizer-for-cpu-offload --overlap-cpu-optimizer-d2h-h2d "
        "--no-pin-cpu-grads --no-pin-cpu-params --cpu-offloading-num-layers "
        "--cpu-offloading-retain-pinned-cpu-buffers",
        "nothing is offloaded to the host; use --use-distributed-optimizer, --recompute-granularity or more ranks",
    ),
    (
        "--ckpt-drop-redundant-extra-state --dist-ckpt-save-pre-mcore-014",
        "there is only one way to write a checkpoint, in the layout of megatron-core 0.14 and newer; remove it",
    ),
    ("--load-main-params-from-ckpt", "master weights are loaded without --no-load-optim and --finetune; remove those"),
    (
        "--no-initialization",
        "weights are always initialized: gradient clipping needs attributes that this sets; remove it",
    ),
    ("--yaml-cfg", "settings come from flags and from JSON: --config FILE"),
    ("--spec --use-legacy-models", "models are megatron-core's; layers are chosen by --transformer-impl"),
    (
        "--phase-transition-iterations",
        "a phase with other data is a run of its own: end each with --exit-interval, and start the next with its "
        "--data-path, --load and --override-sample-order",
    ),
    (
        "--iterations-to-skip",
        "steps cannot be skipped by their number; --max-skipped-steps and --spike-policy skip steps by their values",
    ),
    (
        "--rerun-mode",
        "steps are not repeated for comparison; loss and gradient norm are checked in every step",
    ),
    (
        "--adlr-autoresume --adlr-autoresume-interval --enable-ft-package --calc-ft-timeouts --ft-num-warmup-iters",
        "for NVIDIA's own cluster software; use --save with --load, and --exit-duration-in-mins",
    ),
    (
        "--full-validation --multiple-validation-sets --validation-set-names",
        "validation during a run reads --eval-iters global batches of one set; evaluate others with megafp8 evaluate",
    ),
    ("--data-args-path --per-split-data-args-path", "give the list itself: --data-path $(cat FILE)"),
    (
        "--mid-level-dataset-surplus --sample-rate --allow-ambiguous-pad-tokens",
        "samples are read from the shards unchanged; remove it",
    ),
    (
        "--tokenizer-metadata --tiktoken-special-tokens --vocab-extra-ids --tokenizer-special-tokens "
        "--tokenizer-sentencepiece-legacy --null-tokenizer-eod-id --null-tokenizer-pad-id",
        "tokenizers are defined by their files alone; see --tokenizer-type and --tokenizer-model",
    ),
    (
        "--cache-mla-latents",
        "it is for inference, with a cache that megatron-core has on GPUs only; megafp8 generate keeps keys and values",
    ),
    (
        "--fp32-residual-connection",
        "megatron-core 0.16.1 converts only the embeddings to FP32; residual connections have the dtype of the weights",
    ),
    ("--fp16-lm-cross-entropy", "the loss is computed in FP32; remove it"),
    (
        "--init-method-xavier-uniform",
        "weights are initialized from a normal distribution with --init-method-std and --embedding-init-method-std",
    ),
    ("--distribute-checkpointed-activations", _OLD + "--distribute-saved-activations"),
    ("--batch-size", _OLD + "--micro-batch-size"),
    ("--warmup", _OLD + "--lr-warmup-fraction"),
    ("--model-parallel-size", _OLD + "--tensor-model-parallel-size"),
    ("--perform-rl-step --refit-method", "this pretrains; no reinforcement learning"),
    (
        "--tensor-parallel-num-weight-shards --expert-tensor-parallel-num-weight-shards",
        "tensor-parallel ranks hold complete shards of the weights; use --use-distributed-optimizer",
    ),
    (
        "--hybrid-context-parallel --max-seqlen-per-dp-cp-rank",
        "all sequences have the same length, and context parallelism splits each; use --context-parallel-size",
    ),
    (
        "--attention-output-gate --mla-down-proj-fusion",
        "attention is multi-head, grouped-query or multi-latent, without gates and joined projections; remove it",
    ),
    ("--fused-residual-rmsnorm", "use --residual-norm-fusion with --use-transformer-engine-op-fuser"),
    ("--disable-jit-fuser", "set the environment variable TORCH_COMPILE_DISABLE=1"),
    ("--batch-invariant-mode --batch-invariant-backend", "use --deterministic-mode"),
    ("--mlp-chunks-for-training", "the MLP computes all tokens at once; lower --micro-batch-size"),
    ("--freeze-all-layers", "all weights are trained; remove it"),
    ("--no-weight-decay-cond-type", "biases and norms have no weight decay, and all other weights do; remove it"),
    (
        "--output-logit-dtype",
        "logits have the dtype of the weights, and the loss is computed in FP32; remove it",
    ),
    (
        "--ddp-param-name-patterns-for-fp32-local-accumulation",
        "all gradients have one dtype and one layout; see --accumulate-allreduce-grads-in-fp32",
    ),
    ("--exit-signal", "SIGTERM, SIGINT, SIGHUP and SIGUSR1 are handled; see --exit-signal-handler"),
    (
        "--gpu-sniff-test-interval",
        "use --check-weight-hash-across-dp-replicas-interval, or megafp8 doctor before a run",
    ),
    ("--fake-process-group", "plan a run without its ranks: --dry-run --world-size N"),
    (
        "--save-params-interval --save-activations-interval --save-wgrads-interval --save-dgrads-interval "
        "--dump-param-to-param-group-map",
        "tensors are not written to files; --fp8-log-interval records their statistics",
    ),
    ("--dataloader-inter-document-masking", "use --reset-attention-mask"),
    (
        "--no-pad-vocab-size --disable-pad-vocab-size",
        "use --make-vocab-size-divisible-by 1; the vocabulary is then only padded as tensor parallelism and FP8 need",
    ),
    ("--override-ckpt-iteration", "choose the checkpoint with --ckpt-step; --finetune starts at step 0"),
    ("--sft", "this pretrains on text; no instruction tuning"),
    (
        "--decoder-num-layers --head-lr-mult --is-hybrid-model --disable-mamba-mem-eff-path",
        _OTHER_MODEL,
    ),
)
