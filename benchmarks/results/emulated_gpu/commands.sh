#!/usr/bin/env bash
# The commands of the page.

python benchmarks/gpu_steps.py --shape A --rounds 2 --modes bf16=bf16 mxfp8=emulated-mxfp8 \
    tensorwise=emulated-tensorwise blockwise=emulated-blockwise delayed=emulated-delayed nvfp4=emulated-nvfp4 \
    --profile mxfp8 tensorwise nvfp4

# Rowwise scaling
megafp8 pretrain --model-preset llama-1b --vocab-size 50303 --seq-length 2048 --micro-batch-size 8 \
    --global-batch-size 8 --train-iters 40 --lr 1e-4 --bf16 --mock-data --tokenizer-type NullTokenizer --num-workers 0 \
    --use-distributed-optimizer --cross-entropy-loss-fusion --cross-entropy-fusion-impl te --eval-iters 0 --log-interval 10
