#!/usr/bin/env bash
# The commands of the page, by its sections.

# Two and four GPUs of one host
G="--cuda-graph-impl local"
B="python benchmarks/gpu_layouts.py --shape B --warm-up 5 --steps 12 --mode-s 50"
$B --layouts "1 GPU" "DP 2" "DP 4" --modes bf16 delayed tensorwise blockwise @bf16 @delayed
$B --layouts "TP 4" --modes bf16 delayed tensorwise blockwise @bf16 @delayed
$B --layouts "PP 4" --modes "bf16 $G" "delayed $G" "tensorwise $G"
$B --layouts "TP 2, DP 2" --modes bf16 delayed tensorwise @bf16 @delayed

# H200s
torchrun --nproc-per-node 4 pretrain_gpt.py --bf16 --model-preset llama3-8b --seq-length 8192 --vocab-size 128255 \
    --mock-data --tokenizer-type NullTokenizer --eval-iters 0 --micro-batch-size 1 --global-batch-size 16 \
    --train-iters 14 --lr 3e-4 --lr-decay-style constant --log-interval 1 --sequence-parallel \
    --tensor-model-parallel-size 2 --use-distributed-optimizer --fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather

# FSDP2, megatron-core's own
torchrun --nproc-per-node 2 benchmarks/megatron_fsdp.py --shape B
