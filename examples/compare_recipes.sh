#!/usr/bin/env bash
# What does each FP8 and FP4 recipe cost in loss? One small Llama-style GPT on real text, trained on this machine in
# every recipe from the same three seeds, and a report that looks at the pairs:
#
#   bash examples/compare_recipes.sh [FOLDER]        (default runs/recipes)
#
# The text is the source of this machine's own Python standard library. Emulated on a CPU it takes about twenty minutes
# of one core, and the same commands run on a GPU. Started again, it resumes where it stopped.
# STEPS, SEEDS, RECIPES, EVAL_ITERS, PARALLEL (runs at a time) and MAX_BYTES (of text) in the environment change what is
# run.
set -euo pipefail
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
# Validation is a tenth of the text; weights are kept without the optimizer's state, which only a resumption needs.
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
