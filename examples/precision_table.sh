#!/usr/bin/env bash
# The classical table: a GPT of GPT-2 medium's shape (320 million parameters with a vocabulary of 16,384) in FP32, BF16,
# each FP8 recipe that is native on this device, and FP4 (emulated where it is not native): throughput, peak memory,
# loss after STEPS steps, and the largest micro-batch that fits:
#
#   bash examples/precision_table.sh [FOLDER]        (default runs/precision_table)
#
# The text is the source of the Python standard library of this machine. It writes precision_table.md and
# precision_table.json. If it is interrupted, run it again to resume. It is meant for one GPU; on a CPU take a small
# model, by environment variables: LAYERS, HIDDEN, HEADS, SEQUENCE, MICRO_BATCH, GLOBAL_BATCH, STEPS, SEARCH_BATCH (0: no
# search for the largest micro-batch), MEMORY_LIMIT (GiB, for that search), PRECISIONS and MAX_BYTES (of text).
set -euo pipefail
[ $# -le 1 ] || { echo "usage: bash examples/precision_table.sh [FOLDER]" >&2; exit 64; }
cd "$(dirname "$0")/.."
. tools/setup_venv.sh

out=${1:-runs/precision_table}
data=$out/data
hidden=${HIDDEN:-1024}
sequence=${SEQUENCE:-1024}
mkdir -p "$data"
tokenizer=(--tokenizer-type SentencePieceTokenizer --tokenizer-model "$data/tokenizer.model")

if [ ! -e "$data/done" ]; then
  "$PYTHON" tools/build_stdlib_corpus.py --output "$data/corpus.jsonl" --max-bytes "${MAX_BYTES:-30000000}"
  "$PYTHON" tools/train_tokenizer.py --input "$data/corpus.jsonl" --vocab-size "${VOCAB:-16384}" \
    --model-prefix "$data/tokenizer"
  "$PYTHON" tools/preprocess_data.py --input "$data/corpus.jsonl" --output-prefix "$data/stdlib" --append-eod \
    "${tokenizer[@]}"
  touch "$data/done"
fi

model=(
  --num-layers "${LAYERS:-24}" --hidden-size "$hidden" --num-attention-heads "${HEADS:-16}"
  --ffn-hidden-size $((4 * hidden)) --seq-length "$sequence" --max-position-embeddings "$sequence"
  --attention-dropout 0 --hidden-dropout 0
)
training=(
  --micro-batch-size "${MICRO_BATCH:-8}" --global-batch-size "${GLOBAL_BATCH:-32}" --train-iters "${STEPS:-200}"
  --seed 1 --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-fraction 0.1 --weight-decay 0.1
  --adam-beta2 0.95 --clip-grad 1.0 --eval-iters 0 --log-interval 10 --no-save-optim --no-save-rng
)
# exec: signals to this script reach the command, whose runs then stop.
exec "$PYTHON" tools/precision_table.py --output-dir "$out" --search-batch "${SEARCH_BATCH:-512}" \
  --title "A GPT in several precisions" ${PRECISIONS:+--precisions "$PRECISIONS"} \
  ${MEMORY_LIMIT:+--memory-limit "$MEMORY_LIMIT"} -- \
  "${model[@]}" "${training[@]}" "${tokenizer[@]}" \
  --data-path "$data/stdlib_text_document" --split 97,3,0 --data-cache-path "$data/cache"
