#!/usr/bin/env bash
# Written by megafp8 torchrun; edit it as you like.
set -euo pipefail

cd /shared/megafp8
. .venv/bin/activate
# Set once, for all ranks. Transformer Engine's variables of the submitting shell are removed.
unset "${!NVTE_@}"
export OMP_NUM_THREADS=1
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=300  # seconds from a signal until ranks are killed
export NCCL_DEBUG=WARN

training=(
  --model-preset llama-1b --seq-length 2048 --bf16 --fp8-format hybrid --fp8-recipe tensorwise --lr 4e-4
  --micro-batch-size 8 --global-batch-size 512 --train-iters 27000 --data-path data/fineweb_text_document
  --tokenizer-type HuggingFaceTokenizer --tokenizer-model data/tokenizer --save runs/llama-1b --load runs/llama-1b
)

# What a rank writes goes to files of its own under
# runs/llama-1b/logs/ranks/NODE, and that of this machine's first rank also here.
torchrun=(
  python3 -m torch.distributed.run --nproc-per-node 8 --redirects 3 --tee 0:3
  --nnodes 2 --rdzv-backend c10d --rdzv-endpoint first:29500 --rdzv-id llama-1b
  --log-dir runs/llama-1b/logs/ranks/"$(hostname)"
)
exec "${torchrun[@]}" pretrain_gpt.py "${training[@]}"
