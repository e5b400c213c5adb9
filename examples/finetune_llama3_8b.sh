#!/usr/bin/env bash
# Continue training Llama 3 8B in FP8, from its files on the Hugging Face Hub, on all GPUs of one machine.
#
#   hf download meta-llama/Meta-Llama-3-8B --local-dir Meta-Llama-3-8B --exclude "original/*"
#   HF_MODEL=Meta-Llama-3-8B DATA_PATH=data/corpus_text_document bash examples/finetune_llama3_8b.sh
#
# It needs the libraries of the extra hf: pip install -e '.[hf]'
#
# First the weights are converted to a checkpoint, once (megafp8 convert). Create the shards with the model's tokenizer:
# megafp8 preprocess --tokenizer-type HuggingFaceTokenizer --tokenizer-model Meta-Llama-3-8B.
# If the run is interrupted, start it again to resume from its last checkpoint. To convert the result back for
# transformers:
#
#   megafp8 convert to-hf runs/llama3-8b models/mine
#
# HF_MODEL       folder with config.json, safetensors and tokenizer
# DATA_PATH      prefix of the shards, or "weight prefix weight prefix ..."
# CONVERTED      folder for the converted checkpoint (default models/llama3-8b)
# SAVE           folder for checkpoints, records and TensorBoard (default runs/llama3-8b)
# GPUS_PER_NODE  ranks to start (default: one per GPU)
# PYTHON         Python interpreter with megafp8 (default .venv/bin/python, else python3)
#
# Arguments are further flags of megafp8 pretrain, which override those below. HF_MODEL may be any Llama model: the
# model settings are taken from its files.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
converted=${CONVERTED:-models/llama3-8b}
save=${SAVE:-runs/llama3-8b}
: "${HF_MODEL:?is not set}" "${DATA_PATH:?is not set}"
read -ra shards <<<"$DATA_PATH"

[ -d "$converted" ] || "$python" tools/convert_checkpoint.py from-hf "$HF_MODEL" "$converted"

training=(
  --seq-length 8192 --micro-batch-size 1 --global-batch-size 128 --train-iters 1000
  --lr 2e-5 --lr-decay-style cosine --min-lr 2e-6 --lr-warmup-iters 50 --weight-decay 0.1 --adam-beta2 0.95
  --recompute-granularity selective --recompute-modules core_attn
)
ranks=${GPUS_PER_NODE:-$("$python" -c 'import torch; print(max(1, torch.cuda.device_count()))')}
# torchrun sets this for several ranks and warns that it does.
[ "$ranks" = 1 ] || export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

# After a SIGTERM, torchrun waits this long for its ranks to save, instead of 30 s.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300}"
exec "$python" -m torch.distributed.run --standalone --nproc-per-node "$ranks" pretrain_gpt.py \
  --config "$converted/config.json" --pretrained-checkpoint "$converted" \
  --recipe tensorwise "${training[@]}" \
  --data-path "${shards[@]}" --split 99,1,0 --save "$save" --load "$save" --save-interval 200 "$@"
