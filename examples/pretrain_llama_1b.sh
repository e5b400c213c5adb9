#!/usr/bin/env bash
# A Llama-style GPT with 1.4 billion parameters in FP8 with tensorwise scaling, on all GPUs of one machine.
#
# First print the plan, on any machine: the ranks, their memory, and the precision of every GEMM.
#
#   bash examples/pretrain_llama_1b.sh --dry-run --world-size 8 --target h200
#
# Then start the run, on token shards from megafp8 preprocess. If it is interrupted, start it again to resume from its
# last checkpoint.
#
#   DATA_PATH=data/corpus_text_document TOKENIZER_MODEL=data/tokenizer.model bash examples/pretrain_llama_1b.sh
#
# DATA_PATH        prefix of the shards, or "weight prefix weight prefix ...". Without it, the run uses synthetic tokens
#                  to measure the speed, and saves nothing.
# TOKENIZER_MODEL  the tokenizer with which the shards were created
# TOKENIZER_TYPE   its type (default SentencePieceTokenizer)
# SAVE             folder for checkpoints, records and TensorBoard (default runs/llama-1b)
# GPUS_PER_NODE    ranks to start (default: one per GPU)
# PYTHON           Python interpreter with megafp8 (default .venv/bin/python, else python3)
#
# Arguments are further flags of megafp8 pretrain, which override those below. --performance max is faster, because the
# output layer is also in FP8 and Adam's moments are in BF16; docs/performance.md has the cost in loss.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
save=${SAVE:-runs/llama-1b}

if [ -n "${DATA_PATH:-}" ]; then
  read -ra shards <<<"$DATA_PATH"
  data=(
    --data-path "${shards[@]}" --split '99,1,0' --save "$save" --load "$save" --save-interval 1000
    --tokenizer-type "${TOKENIZER_TYPE:-SentencePieceTokenizer}" --tokenizer-model "${TOKENIZER_MODEL:?is not set}"
    --eval-interval 1000 --eval-iters 20
  )
else
  echo "DATA_PATH is not set: using synthetic tokens, nothing is saved" >&2
  data=(--mock-data --tokenizer-type NullTokenizer --vocab-size 50303 --eval-iters 0)
fi

model=(--model-preset llama-1b --seq-length 2048)
precision=(--recipe tensorwise)
# 512 sequences are a million tokens per step; 27,000 steps are 28 billion tokens, 20 per parameter.
training=(
  --micro-batch-size 8 --global-batch-size 512 --train-iters 27000
  --lr 4e-4 --min-lr 4e-5 --lr-decay-style cosine --lr-warmup-fraction 0.02
  --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --log-interval 10
)

launcher=("$python")
# A dry run needs one process and no GPU.
if [[ " $* " != *" --dry-run "* ]]; then
  ranks=${GPUS_PER_NODE:-$("$python" -c 'import torch; print(max(1, torch.cuda.device_count()))')}
  # torchrun sets this for several ranks and warns that it does.
  [ "$ranks" = 1 ] || export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
  launcher+=(-m torch.distributed.run --standalone --nproc-per-node "$ranks")
fi

# After a SIGTERM, torchrun waits this long for its ranks to save, instead of 30 s.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300}"
exec "${launcher[@]}" pretrain_gpt.py \
  "${model[@]}" "${precision[@]}" "${training[@]}" "${data[@]}" "$@"
