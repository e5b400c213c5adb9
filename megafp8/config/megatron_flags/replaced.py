"""Megatron-LM flags that are read as others: old spellings, and flags that set a field of megatron-core."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

REPLACED: Mapping[str, str] = MappingProxyType(
    {
        "--use-rotary-position-embeddings": "--position-embedding-type rope",
        "--encoder-num-layers": "--num-layers",
        "--persistent-save-interval": "--save-interval",
        "--fp8-e4m3": "--fp8-format e4m3",
        "--fp8-hybrid": "--fp8-format hybrid",
        "--verify-integrity": "--ckpt-verify hash",
        "--optimizer dist_muon": "--optimizer muon --use-distributed-optimizer",
        # All hold the same state; the format of one file a rank only fits the layout that wrote it.
        "--ckpt-format torch": "--ckpt-format torch_dist",
        "--ckpt-format torch_dcp": "--ckpt-format torch_dist",
        # Megatron-LM then reduces gradients in BF16.
        "--main-grads-dtype bf16": "--main-grads-dtype bf16 --grad-reduce-in-bf16",
        # Of Megatron-LM before 2022: every layer was recomputed.
        "--checkpoint-activations": (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
        ),
        "--no-tp-comm-bulk-wgrad": "--disable-tp-comm-bulk-wgrad",
        "--no-tp-comm-bulk-dgrad": "--disable-tp-comm-bulk-dgrad",
        "--no-tp-comm-overlap-ag": "--disable-tp-comm-overlap-ag",
        "--no-tp-comm-overlap-rs": "--disable-tp-comm-overlap-rs",
        # A graph changes no numerics, so the request for one is the choice of the fastest way that works.
        "--cuda-graph-impl transformer_engine": "--cuda-graph-impl auto",
        "--cuda-graph-impl full_iteration": "--cuda-graph-impl local",
        "--enable-cuda-graph": "--cuda-graph-impl auto",
        "--external-cuda-graph": "--cuda-graph-impl auto",
        # Both set fields of the model, for checkpoints of Llama 4.
        "--export-qk-l2-norm": "--qk-l2-norm",
        "--export-moe-apply-probs-on-input": "--moe-apply-probs-on-input",
        "--enable-gpt-oss": (
            "--position-embedding-type yarn --rotary-scaling-factor 32 --yarn-original-max-position-embeddings 131072 "
            "--yarn-beta-fast 32 --yarn-beta-slow 1 --mscale 1 --mscale-all-dim 0 "
            "--no-yarn-correction-range-round-to-int"
        ),
        "--record-shapes": "--pytorch-profiler-collect-shapes",
        "--apply-wd-to-qk-layernorm": "--override optimizer.apply_wd_to_qk_layernorm=True",
        "--no-weight-decay-cond-type apply_wd_to_qk_layernorm": "--override optimizer.apply_wd_to_qk_layernorm=True",
        "--ddp-pad-buckets-for-high-nccl-busbw": "--override ddp.pad_buckets_for_high_nccl_busbw=True",
        "--ddp-reduce-scatter-with-fp32-accumulation": "--override ddp.reduce_scatter_with_fp32_accumulation=True",
        "--disable-bf16-reduced-precision-matmul": (
            "--override transformer.disable_bf16_reduced_precision_matmul=True"
        ),
        "--disable-clone-scatter-output-in-embedding": (
            "--override transformer.clone_scatter_output_in_embedding=False"
        ),
        "--disable-symmetric-registration": "--override ddp.disable_symmetric_registration=True",
        "--no-clone-scatter-output-in-embedding": "--override transformer.clone_scatter_output_in_embedding=False",
        "--test-mode": "--override transformer.test_mode=True",
    }
)
"""Flag, or flag and value -> the flags and values as which it is read. Values after a flag alone follow them."""

PARTS_OF_CUDA_GRAPH = frozenset(
    ("full", "attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba", "shared_experts")
)
"""Values of --cuda-graph-scope that Megatron-LM now gives with --cuda-graph-modules."""

OVERRIDES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "--export-qk-l2-norm": ("--qk-layernorm",),
        "--enable-gpt-oss": (
            "--position-embedding-type", "--rotary-scaling-factor", "--yarn-original-max-position-embeddings",
            "--yarn-beta-fast", "--yarn-beta-slow", "--mscale", "--mscale-all-dim",
            "--yarn-correction-range-round-to-int",
        ),
    }
)  # fmt: skip
"""Replaced flag -> flags that Megatron-LM does not use together with it, wherever they stand."""
