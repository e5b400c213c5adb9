#!/usr/bin/env bash
# The commands of the page, by its sections.

# Attention and long sequences
G="--cuda-graph-impl local" R="--recompute-granularity selective --recompute-modules mlp"
L="--seq-length 32768 --max-position-embeddings 32768 --micro-batch-size 1 --global-batch-size 1"
python benchmarks/gpu_steps.py --rounds 1 --shape B --extra="$L" --warm-up 4 --steps 8 --modes "bf16=bf16 $G" \
    "delayed=delayed $G" "attention=delayed $G --fp8-dot-product-attention" "recompute=delayed $G $R"
megafp8 pretrain --model-preset llama3-8b --num-layers 8 --vocab-size 50303 --mock-data --bf16 \
    --tokenizer-type NullTokenizer --seq-length 131072 --max-position-embeddings 131072 --micro-batch-size 1 \
    --global-batch-size 1 --train-iters 4 --lr 3e-5 --lr-decay-style constant --eval-iters 0 --log-interval 1 \
    --log-energy --recompute-granularity selective --recompute-modules mlp

# Attention alone
python benchmarks/gpu_attention.py --shapes A B --json FILE
