#!/usr/bin/env bash
# The commands of the page, by its tables.

# Transformer Engine's layers
python benchmarks/gpu_te_layers.py --json FILE

# Attention
python benchmarks/gpu_attention.py --json FILE -- --model-preset gpt2-124m --seq-length 2048 \
    --max-position-embeddings 2048 --micro-batch-size 8

# The stack
G="--group-query-attention --num-query-groups 4"
python benchmarks/gpu_steps.py --shape A --rounds 1 --warm-up 6 --steps 20 \
    --extra="--micro-batch-size 4 --global-batch-size 4" --modes \
    "plain=bf16 --attention-backend unfused --cuda-graph-impl none" "attention=bf16 --cuda-graph-impl none" \
    "fp8=delayed --cuda-graph-impl none" "graph=delayed" "gqa=delayed $G" "max=delayed $G --performance max"

# FP8-LM
python benchmarks/gpu_steps.py --shape A --rounds 1 --warm-up 5 --steps 12 --modes bf16 \
    "O1=bf16 --fp8-lm-level O1" "O2=bf16 --fp8-lm-level O2" "O3=bf16 --fp8-lm-level O3"

# 320M parameters in several precisions; with two GPUs PRECISIONS=bf16,fp16
for batch in 8 32; do
    PRECISIONS=fp32,fp16,bf16,tensorwise,delayed,blockwise,nvfp4 MICRO_BATCH=$batch STEPS=20 SEARCH_BATCH=0 \
        bash examples/precision_table.sh runs/precision_table_$batch
done

# An FP8 output layer
O="output=delayed --precision output_layer=tensorwise"
M="moments=delayed --use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
S=(--rounds 1 --warm-up 6 --steps 20)
python benchmarks/gpu_steps.py --shape gpt2-124m "${S[@]}" --modes bf16 delayed "$O" "$M" \
    --extra="--seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 8 --global-batch-size 8"
python benchmarks/gpu_steps.py --shape gpt2-350m "${S[@]}" --modes bf16 delayed "$O" "$M" --extra="--global-batch-size 16"
python benchmarks/gpu_steps.py --shape D "${S[@]}" --modes delayed "$O"

# GPT-2 124M: 300 MB of the source of installed packages, then 150 steps
C=configs/gpt2_124m_fineweb_edu_h200.yaml
packages=$(python -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))')
python tools/build_stdlib_corpus.py --output runs/fw/corpus.jsonl --folder "$packages" --max-bytes 300000000
OUT=runs/fw TEXT=runs/fw/corpus.jsonl CONFIG=$C STOP_AFTER=shards bash examples/fineweb_edu/run.sh
for recipe in delayed bf16; do
    megafp8 pretrain $C --recipe $recipe --train-iters 150 --lr-warmup-iters 15 --split 990,10,0 \
        --data-path runs/fw/fineweb_edu_text_document --tokenizer-model runs/fw/tokenizer --save runs/$recipe \
        --load runs/$recipe --eval-interval 50 --eval-iters 4 --log-interval 5 --log-energy --sample-interval 50
done
megafp8 report runs/bf16 runs/delayed --baseline bf16 --output-dir runs/curve
