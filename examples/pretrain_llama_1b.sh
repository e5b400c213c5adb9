#!/usr/bin/env bash
# A Llama-style GPT of 1.4 billion parameters in FP8 with tensorwise scaling, on all GPUs of one machine.
#
# First the plan, on any machine: which rank holds what, the memory it needs, the precision of every GEMM.
#
#   bash examples/pretrain_llama_1b.sh --dry-run --world-size 8 --target h200
#
# Then the run, on token shards from tools/preprocess_data.py. Started again, it resumes from its last checkpoint.
#
#   DATA_PATH=data/corpus_text_document TOKENIZER_MODEL=data/tokenizer.model bash examples/pretrain_llama_1b.sh
#
# DATA_PATH        prefix of the shards, or "weight prefix weight prefix ...". Without it tokens are made up and nothing
#                  is saved: enough to see the speed.
# TOKENIZER_MODEL  the tokenizer that made the shards
# TOKENIZER_TYPE   its type (default SentencePieceTokenizer)
# SAVE             folder for checkpoints, records and TensorBoard (default runs/llama-1b)
# GPUS_PER_NODE    ranks to start (default: one for each GPU)
# PYTHON           the Python that has megafp8 (default .venv/bin/python, else python3)
#
# Arguments are more flags of pretrain_gpt.py; they win over those below. --performance max is faster: it also runs the
# output layer in FP8.
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
  echo "DATA_PATH is not set: made-up tokens, nothing is saved" >&2
  data=(--mock-data --tokenizer-type NullTokenizer --vocab-size 50303 --eval-iters 0)
fi

model=(--model-preset llama-1b --seq-length 2048)
precision=(--bf16 --fp8-format hybrid --fp8-recipe tensorwise)
# 512 sequences are a million tokens a step; 27,000 steps are 28 billion tokens, 20 for each parameter.
training=(
  --micro-batch-size 8 --global-batch-size 512 --train-iters 27000
  --lr 4e-4 --min-lr 4e-5 --lr-decay-style cosine --lr-warmup-fraction 0.02
  --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --log-interval 10
)

launcher=("$python")
# A dry run is one process and needs no GPU.
if [[ " $* " != *" --dry-run "* ]]; then
  ranks=${GPUS_PER_NODE:-$("$python" -c 'import torch; print(max(1, torch.cuda.device_count()))')}
  # torchrun sets this for several ranks and warns that it does.
  [ "$ranks" = 1 ] || export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
  launcher+=(-m torch.distributed.run --standalone --nproc-per-node "$ranks")
fi

# After a SIGTERM torchrun waits so long for its ranks to save, instead of 30 s.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300}"
exec "${launcher[@]}" pretrain_gpt.py \
  "${model[@]}" "${precision[@]}" "${training[@]}" "${data[@]}" "$@"
