#!/usr/bin/env bash
# The commands of the page, by its sections.

# FP8 gradients, FP8-LM's levels and saved activations
python benchmarks/fp8_gradients.py --rates 1gbit --rounds 8 --seq-length 8 --vocab-size 1024 --hidden-size 640 \
    --num-attention-heads 10

# Loss
megafp8 run-comparison --output-dir runs/fp8_lm --recipes bf16 --seeds 5 --nproc-per-node 2 \
    --variant "fp8-gradients=--bf16 --grad-reduce-in-fp8" \
    --variant "O1=--fp8-lm-level O1" --variant "O2=--fp8-lm-level O2" --variant "O3=--fp8-lm-level O3" \
    -- MODEL AND TEXT OF benchmarks/stdlib_text.py --use-distributed-optimizer --overlap-grad-reduce --split 95,5,0 \
    --micro-batch-size 8 --global-batch-size 16 --train-iters 150 --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine \
    --lr-warmup-iters 10 --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0 --eval-interval 150 --eval-iters 12
GPUS=2 STEPS=800 bash examples/loss_report_h200.sh queue small "bf16 O1 O2 O3" "1 2" --eval-iters 8
