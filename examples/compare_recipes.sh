#!/usr/bin/env bash
# Compare the loss of all FP8 and FP4 recipes. A small Llama-style GPT is trained on real text on this machine, in every
# recipe and with the same three seeds. The report compares runs of the same seed:
#
#   bash examples/compare_recipes.sh [FOLDER]        (default runs/recipes)
#
# The text is the source of the Python standard library of this machine. With emulation on a CPU it takes about twenty
# minutes on one core; the same commands run on a GPU. If it is interrupted, run it again to resume.
# Environment variables: STEPS, SEEDS, RECIPES, EVAL_ITERS, PARALLEL (concurrent runs) and MAX_BYTES (of text).
set -euo pipefail
[ $# -le 1 ] || { echo "usage: bash examples/compare_recipes.sh [FOLDER]" >&2; exit 64; }
cd "$(dirname "$0")/.."
. tools/setup_venv.sh

out=${1:-runs/recipes}
data=$out/data
mkdir -p "$data"
tokenizer=(--tokenizer-type SentencePieceTokenizer --tokenizer-model "$data/tokenizer.model")

"$PYTHON" tools/build_stdlib_corpus.py --output "$data/corpus.jsonl" --max-bytes "${MAX_BYTES:-10000000}"
"$PYTHON" tools/train_tokenizer.py --input "$data/corpus.jsonl" --vocab-size 2048 --model-prefix "$data/tokenizer"
"$PYTHON" tools/preprocess_data.py --input "$data/corpus.jsonl" --output-prefix "$data/stdlib" --append-eod "${tokenizer[@]}"

model=(
  --num-layers 2 --hidden-size 128 --num-attention-heads 4 --group-query-attention --num-query-groups 2
  --ffn-hidden-size 384 --seq-length 128 --max-position-embeddings 128
  --position-embedding-type rope --normalization RMSNorm --swiglu --qk-layernorm
  --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
)
# A tenth of the text is for validation. Optimizer state is not saved, because only resuming needs it.
training=(
  --micro-batch-size 16 --global-batch-size 16 --train-iters "${STEPS:-300}" --seed 1
  --lr 1.5e-3 --min-lr 1.5e-4 --lr-decay-style cosine --lr-warmup-fraction 0.07
  --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0
  --eval-interval 50 --eval-iters "${EVAL_ITERS:-32}" --log-interval 50 --num-threads 1 --num-workers 0 --no-save-optim --no-save-rng
)

"$PYTHON" tools/run_comparison.py --output-dir "$out" --seeds "${SEEDS:-3}" --parallel "${PARALLEL:-1}" --bound 0.5 \
  --title "What each recipe costs in loss" \
  --recipes "${RECIPES:-bf16,bf16-control,tensorwise,delayed,blockwise,mxfp8,nvfp4}" -- \
  "${model[@]}" "${training[@]}" "${tokenizer[@]}" \
  --data-path "$data/stdlib_text_document" --split 90,10,0 --data-cache-path "$data/cache"
