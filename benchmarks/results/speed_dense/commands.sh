#!/usr/bin/env bash
# The commands of the page, by its sections.

# Speed of dense models on one GPU
python benchmarks/gpu_steps.py --shape A --warm-up 5 --steps 12 --rounds 2 --modes delayed \
    "max=delayed --performance max" "out=delayed --precision output_layer=tensorwise" tensorwise blockwise bf16 @delayed

# Whole models
python benchmarks/gpu_train.py --shape llama3.2-3b --rounds 1 --train-iters 16 --steps 8 --modes bf16 delayed
python benchmarks/gpu_train.py --shape gpt2-124m --rounds 1 --train-iters 16 --steps 8 \
    --modes peer-delayed delayed tensorwise
accelerate launch --num_processes 1 benchmarks/accelerate_loop.py --shape gpt2-124m --mode delayed --steps 8
python benchmarks/gpu_train.py --shape llama3-8b --rounds 1 --train-iters 10 --steps 6 --modes delayed \
    --extra="--use-precision-aware-optimizer --exp-avg-dtype fp8 --exp-avg-sq-dtype fp16 --main-grads-dtype bf16 \
    --grad-reduce-in-bf16"
torchrun --nproc-per-node 2 pretrain_gpt.py --model-preset llama3-8b --vocab-size 128255 --mock-data --bf16 \
    --tokenizer-type NullTokenizer --seq-length 4096 --micro-batch-size 1 --global-batch-size 16 --train-iters 9 \
    --lr 3e-5 --lr-decay-style constant --eval-iters 0 --log-interval 1 --log-energy \
    --fp8-format hybrid --fp8-recipe delayed
