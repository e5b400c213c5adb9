#!/usr/bin/env bash
# The smallest GPT-2, trained twice on the same data in the same order to compare the loss of FP8 and BF16.
#
#   export DATA_PATH=data/corpus_text_document VOCAB_FILE=data/vocab.json MERGE_FILE=data/merges.txt
#   SAVE=runs/gpt2/bf16 bash examples/pretrain_gpt2_124m.sh
#   SAVE=runs/gpt2/fp8 bash examples/pretrain_gpt2_124m.sh --recipe tensorwise
#   megafp8 compare runs/gpt2/bf16 runs/gpt2/fp8 --output-dir runs/gpt2/comparison
#
# It uses Transformer Engine on a GPU with FP8, and emulated FP8 elsewhere. To print the plan on any machine:
#
#   bash examples/pretrain_gpt2_124m.sh --dry-run --world-size 8 --target h200
#
# DATA_PATH               prefix of the shards, or "weight prefix weight prefix ...". Without it, the run uses synthetic
#                         tokens to measure the speed, and saves nothing.
# VOCAB_FILE, MERGE_FILE  GPT-2's vocab.json and merges.txt, with which the shards were created
# SAVE                    folder for checkpoints, records and TensorBoard (default runs/gpt2-124m)
# GPUS_PER_NODE           ranks to start (default: one per GPU; one without a GPU)
# PYTHON                  Python interpreter with megafp8 (default .venv/bin/python, else python3)
#
# Arguments are further flags of megafp8 pretrain, which override those below.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
save=${SAVE:-runs/gpt2-124m}

if [ -n "${DATA_PATH:-}" ]; then
  read -ra shards <<<"$DATA_PATH"
  data=(
    --data-path "${shards[@]}" --split '99,1,0' --save "$save" --load "$save" --save-interval 1000
    --tokenizer-type GPT2BPETokenizer --vocab-file "${VOCAB_FILE:?is not set}" --merge-file "${MERGE_FILE:?is not set}"
    --eval-interval 1000 --eval-iters 20
  )
else
  echo "DATA_PATH is not set: using synthetic tokens, nothing is saved" >&2
  data=(--mock-data --tokenizer-type NullTokenizer --vocab-size 50256 --eval-iters 0)
fi

# The preset is the published model: learned positions, LayerNorm, GELU, biases, tied embeddings, dropout 0.1.
model=(--model-preset gpt2-124m --seq-length 1024 --attention-dropout 0 --hidden-dropout 0)
# 512 sequences are half a million tokens per step; 19,000 steps are 10 billion tokens.
training=(
  --bf16 --micro-batch-size 8 --global-batch-size 512 --train-iters 19000 --seed 1234
  --lr 6e-4 --min-lr 6e-5 --lr-decay-style cosine --lr-warmup-fraction 0.04
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
exec "${launcher[@]}" pretrain_gpt.py "${model[@]}" "${training[@]}" "${data[@]}" "$@"
