#!/usr/bin/env bash
# From nothing to a trained model and a comparison of FP8 with high precision, on real text:
#
#   bash examples/quickstart.sh [FOLDER]        (default runs/quickstart)
#
# Sets up .venv, writes a corpus from this machine's own Python standard library (no network), trains a tokenizer,
# makes token shards, and pretrains one small Llama-style GPT twice over two ranks with the same seed and data order:
# in high precision and in FP8. Then: a table, loss curves, TensorBoard logs, and a text that the FP8 model writes.
# Started again, it resumes where it stopped. With CUDA and Transformer Engine the same commands use the GPU.
# STEPS=100 in the environment makes it shorter.
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/setup_venv.sh

# gigatoken gives the tokenizer's ids faster. Where it cannot be installed, the tokenizer's own library encodes the text.
if [[ $PYTHON == */.venv/bin/python ]] && ! "$PYTHON" -c 'import gigatoken' 2> /dev/null; then
  "$PYTHON" -m pip install --quiet --disable-pip-version-check -c constraints.txt gigatoken 2> /dev/null ||
    echo "gigatoken cannot be installed here: the tokenizer's own library encodes the text"
fi

out=${1:-runs/quickstart}
mkdir -p "$out"
corpus=$out/corpus.jsonl
tokenizer=$out/tokenizer
shards=$out/stdlib

section() { printf '\n== %s\n' "$*"; }

section "corpus: source and docstrings of the Python standard library"
"$PYTHON" tools/build_stdlib_corpus.py --output "$corpus"

section "tokenizer: SentencePiece BPE with byte fallback"
"$PYTHON" tools/train_tokenizer.py --input "$corpus" --vocab-size 4096 --model-prefix "$tokenizer"

section "token shards"
data=(--tokenizer-type SentencePieceTokenizer --tokenizer-model "$tokenizer.model")
"$PYTHON" tools/preprocess_data.py --input "$corpus" --output-prefix "$shards" --append-eod --workers 2 "${data[@]}"

model=(
  --num-layers 4 --hidden-size 256 --num-attention-heads 4 --group-query-attention --num-query-groups 2
  --ffn-hidden-size 704 --seq-length 256 --max-position-embeddings 256
  --position-embedding-type rope --normalization RMSNorm --swiglu --qk-layernorm
  --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
)
training=(
  --micro-batch-size 8 --global-batch-size 16 --train-iters "${STEPS:-300}" --use-distributed-optimizer
  --lr 1.5e-3 --min-lr 1.5e-4 --lr-decay-style cosine --lr-warmup-fraction 0.07
  --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --seed 1234
  --eval-interval 50 --eval-iters 8 --save-interval 100 --log-interval 20
)
fp8=(--fp8-format hybrid --fp8-recipe tensorwise)

# High precision is BF16 where the machine multiplies BF16, else FP32: emulated by the CPU, BF16 would be the slower one.
if command -v nvidia-smi > /dev/null || grep -qE 'avx512_bf16|amx_bf16' /proc/cpuinfo; then
  training+=(--bf16)
fi

# One rank a GPU, at most two; two ranks on a CPU.
ranks=$("$PYTHON" -c 'import torch; print(min(2, torch.cuda.device_count()) or 2)')

pretrain() {
  local name=$1
  shift
  if [ -e "$out/$name/done" ]; then
    echo "$out/$name is trained already"
    return
  fi
  OMP_NUM_THREADS=1 "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$ranks" pretrain_gpt.py \
    "${model[@]}" "${training[@]}" "${data[@]}" --data-path "${shards}_text_document" --split 95,5,0 \
    --data-cache-path "$out/data_cache" --save "$out/$name" --load "$out/$name" "$@"
  touch "$out/$name/done"
}

section "pretraining in high precision"
pretrain baseline

section "pretraining in FP8: ${fp8[*]}"
pretrain fp8 "${fp8[@]}"

section "comparison"
"$PYTHON" tools/compare_runs.py "$out/baseline" "$out/fp8" --output-dir "$out/comparison" \
  --title "FP8 against high precision on the Python standard library"

section "what the FP8 model writes"
"$PYTHON" tools/generate_text.py --load "$out/fp8" --prompt 'def read_lines(path):
    """' --max-new-tokens 120 --temperature 0.7 --seed 1 --output "$out/sample.txt"

section "done"
cat <<END
loss curves   $out/comparison/loss_curves.png
table         $out/comparison/comparison.md
sample        $out/sample.txt
TensorBoard   tensorboard --logdir $out        (both runs)
END
