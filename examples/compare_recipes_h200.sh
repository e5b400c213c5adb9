#!/usr/bin/env bash
# Compare loss and speed of Hopper's FP8 recipes. A Llama-style GPT with 374 million parameters is trained on real text
# in BF16, delayed, tensorwise and blockwise with the same seeds, one run per GPU, on several GPUs concurrently:
#
#   bash examples/compare_recipes_h200.sh [FOLDER]       (default runs/recipes_h200)
#
# The text is the source of the Python packages on this machine, 80 MB: 1000 steps of 16,384 tokens read it about once.
# Machines with other packages have other text, so their losses are not comparable: copy FOLDER/data to train on the
# same text. All recipes, including BF16, use the loss and the optimizer that are fastest on one GPU, and CUDA graphs,
# since layers of this size are bound by kernel launches; without graphs a run took about three minutes on one H200.
# All recipes of a seed run before the next seed. If it is interrupted, also by a SIGTERM, run it again to resume.
# Environment variables: STEPS, SEEDS (default 3), RECIPES (default: native ones and a control), PARALLEL
# (default: one run per GPU), NO_REPORT=1 to train only. The report can be created again from the records on any
# machine:
#
#   megafp8 compare FOLDER/*/seed* --baseline bf16 --output-dir FOLDER/report
set -euo pipefail
[ $# -le 1 ] || { echo "usage: bash examples/compare_recipes_h200.sh [FOLDER]" >&2; exit 64; }
cd "$(dirname "$0")/.."
. tools/setup_venv.sh

out=${1:-runs/recipes_h200}
data=$out/data
mkdir -p "$data"
tokenizer=(--tokenizer-type SentencePieceTokenizer --tokenizer-model "$data/tokenizer.model")

if [ ! -e "$data/done" ]; then
  packages=$("$PYTHON" -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))')
  "$PYTHON" tools/build_stdlib_corpus.py --output "$data/corpus.jsonl" --folder "$packages" --max-bytes 80000000
  "$PYTHON" tools/train_tokenizer.py --input "$data/corpus.jsonl" --vocab-size 32000 --max-text-bytes 20000000 \
    --model-prefix "$data/tokenizer"
  "$PYTHON" tools/preprocess_data.py --input "$data/corpus.jsonl" --output-prefix "$data/packages" --append-eod \
    --workers "$(nproc)" "${tokenizer[@]}"
  touch "$data/done"
fi

model=(
  --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --ffn-hidden-size 2816
  --seq-length 1024 --max-position-embeddings 1024
  --position-embedding-type rope --normalization RMSNorm --swiglu --qk-layernorm
  --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
)
training=(
  --micro-batch-size 16 --global-batch-size 16 --train-iters "${STEPS:-1000}" --seed 1
  --lr 6e-4 --min-lr 6e-5 --lr-decay-style cosine --lr-warmup-fraction 0.1
  --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0
  --eval-interval 100 --eval-iters 20 --log-interval 100
)
gpus=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count() or 1)')

# exec: signals to this script reach the comparison, whose runs then save.
exec "$PYTHON" tools/run_comparison.py --output-dir "$out" --seeds "${SEEDS:-3}" --parallel "${PARALLEL:-$gpus}" \
  --bound 0.5 --title "What Hopper's recipes cost in loss" ${NO_REPORT:+--no-report} \
  --recipes "${RECIPES:-bf16,delayed,tensorwise,blockwise,bf16-control}" -- \
  "${model[@]}" "${training[@]}" "${tokenizer[@]}" \
  --data-path "$data/packages_text_document" --split 97,3,0 --data-cache-path "$data/cache"
