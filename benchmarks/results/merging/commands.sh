#!/usr/bin/env bash
# A constant rate, its decayed end and its merged ends, for one recipe and seed: bash commands.sh "--bf16" 1 runs/merging
set -euo pipefail
precision=$1 seed=$2 out=$3/$2
flags=(
  --num-layers 8 --hidden-size 576 --num-attention-heads 9 --ffn-hidden-size 1536 --seq-length 1024
  --max-position-embeddings 1024 --position-embedding-type rope --normalization RMSNorm --swiglu --qk-layernorm
  --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
  --use-distributed-optimizer --micro-batch-size 32 --global-batch-size 32 --train-iters 800 --lr 1e-3 --min-lr 0
  --lr-warmup-iters 40 --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --eval-iters 16 --eval-interval 800
  --num-workers 1 --split 98,2,0 --tokenizer-type SentencePieceTokenizer
  --tokenizer-model runs/loss_report/data/tokenizer.model # of `examples/loss_report_h200.sh data`
  --data-path runs/loss_report/data/packages_text_document --seed "$seed"
)
read -ra precision <<<"$precision"
constant=(--lr-decay-style constant)
decayed=(--lr-decay-style WSD --lr-wsd-decay-style linear --lr-wsd-decay-iters 240 --override-opt-param-scheduler)
run() { megafp8 pretrain "${flags[@]}" "${precision[@]}" "$@"; }
run "${constant[@]}" --exit-interval 560 --save-interval 560 --save "$out/start"
run "${constant[@]}" --load "$out/start" --save "$out/constant" --save-interval 40
run "${decayed[@]}" --load "$out/start" --save "$out/decayed"
for weights in uniform 1-sqrt; do
  megafp8 checkpoint merge "$out/constant" --ckpt-step 600 640 680 720 760 800 --weights $weights --output "$out/$weights"
done
megafp8 evaluate --load "$out"/{uniform,1-sqrt,constant,decayed} --json --output "$out/losses.json"
megafp8 evaluate --load "$out"/{uniform,1-sqrt,constant,decayed} --precision high --json --output "$out/high.json"

# NVFP4 with a BF16 end, from the first step on
E=(--bf16 --recipe nvfp4 --transformer-impl emulated)
megafp8 pretrain "${flags[@]}" "${E[@]}" "${decayed[@]}" --save "$out/bf16_end" --precision "layers.7.*=bf16" \
  --fp8-schedule "fp4:720,fp4[*:fprop=bf16]"
