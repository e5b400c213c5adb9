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

# Documents of a log-normal length distribution, 2,048 tokens on average. When these were measured, CP 2 gathered keys
# and values of documents; with documents it exchanges heads since.
D="--reset-attention-mask --eod-mask-loss" LAYOUTS="python benchmarks/gpu_layouts.py --document-tokens 2048"
$LAYOUTS --shape B32k --steps 12 --layouts "1 GPU" "CP 2 allgather" "CP 2 a2a" --modes bf16 delayed "bf16 $D" "delayed $D"
$LAYOUTS --shape B128k --layouts "CP 2 allgather" --warm-up 2 --steps 4 --modes delayed "delayed $D"
for shape in A B; do # with 200,000 tokens nearly all sequences are in one document
    $LAYOUTS --shape $shape --layouts "1 GPU" --steps 20 --modes delayed "delayed $D"
    $LAYOUTS --shape $shape --layouts "1 GPU" --steps 20 --document-tokens 200000 --modes delayed "delayed $D"
done

# Loss of FP8 attention at 32,768 tokens
python benchmarks/long_documents.py runs/long/corpus.jsonl
megafp8 preprocess --input runs/long/corpus.jsonl --tokenizer-type ByteLevelTokenizer --append-eod \
    --output-prefix runs/long/code
megafp8 run-comparison --recipes delayed --variant "fp8-attention=--recipe delayed --fp8-dot-product-attention" \
    --seeds 3 --parallel 2 --output-dir runs/long/attention -- --num-layers 8 --hidden-size 512 \
    --num-attention-heads 4 --kv-channels 128 --ffn-hidden-size 1408 --swiglu --normalization RMSNorm \
    --position-embedding-type rope --rotary-base 500000 --disable-bias-linear --untie-embeddings-and-output-weights \
    --attention-dropout 0 --hidden-dropout 0 --seq-length 32768 --max-position-embeddings 32768 \
    --micro-batch-size 1 --global-batch-size 2 --train-iters 200 --lr 1e-3 --lr-decay-style cosine \
    --lr-warmup-iters 30 --bf16 --eval-interval 100 --eval-iters 8 --tokenizer-type ByteLevelTokenizer \
    --data-path runs/long/code_text_document --split 95,5,0
