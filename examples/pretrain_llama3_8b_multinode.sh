#!/usr/bin/env bash
# Llama 3 8B in FP8 on several machines with 8 GPUs each.
#
# 1. Print the plan, on any machine. Change the layout until it fits in memory.
#
#      bash examples/pretrain_llama3_8b_multinode.sh --dry-run --world-size 64 --target h200
#      bash examples/pretrain_llama3_8b_multinode.sh --dry-run --world-size 512 --target h100 \
#        --tensor-model-parallel-size 4 --pipeline-model-parallel-size 1
#
# 2. Start the same command on every machine, here machine 3 of 8 (counted from 0):
#
#      NNODES=8 NODE_RANK=3 MASTER_ADDR=first-machine bash examples/pretrain_llama3_8b_multinode.sh
#
#    Under Slurm, NNODES, NODE_RANK and MASTER_ADDR are set automatically, in a job with one task per machine:
#
#      srun --nodes 8 --ntasks-per-node 1 --gpus-per-node 8 bash examples/pretrain_llama3_8b_multinode.sh
#
# If the run is interrupted, start it again to resume from its last checkpoint; the number of machines may change.
#
# DATA_PATH        prefix of the shards, or "weight prefix weight prefix ...". Without it, the run uses synthetic tokens
#                  to measure the speed, and saves nothing.
# TOKENIZER_MODEL  folder with the tokenizer.json with which the shards were created
# SAVE             folder for checkpoints, records and TensorBoard, shared by all machines (default runs/llama3-8b)
# GPUS_PER_NODE    ranks to start on this machine (default 8)
# MASTER_PORT      a free port on the first machine (default 29500)
# PYTHON           Python interpreter with megafp8 (default .venv/bin/python, else python3)
#
# Arguments are further flags of megafp8 pretrain, which override those below.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
save=${SAVE:-runs/llama3-8b}

if [ -n "${DATA_PATH:-}" ]; then
  read -ra shards <<<"$DATA_PATH"
  data=(
    --data-path "${shards[@]}" --split '999,1,0' --save "$save" --load "$save" --save-interval 1000
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "${TOKENIZER_MODEL:?is not set}"
    --eval-interval 1000 --eval-iters 10
  )
else
  echo "DATA_PATH is not set: using synthetic tokens, nothing is saved" >&2
  data=(--mock-data --tokenizer-type NullTokenizer --vocab-size 128255 --eval-iters 0)
fi

model=(--model-preset llama3-8b --seq-length 8192)
precision=(--recipe tensorwise)
# ranks = tensor x context x pipeline x data. Tensor-parallel ranks exchange activations in every layer: keep them
# within a machine. Pipeline stages exchange little data and may span machines. The remaining ranks are data-parallel.
# For longer sequences add --context-parallel-size.
parallel=(--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2)
# 512 sequences are 4.2 million tokens per step; 240,000 steps are a trillion tokens. All ranks collect Python's garbage
# in the same step, so that none waits for another.
training=(
  --micro-batch-size 1 --global-batch-size 512 --train-iters 240000
  --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-fraction 0.01
  --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --log-interval 10
  --manual-gc --manual-gc-interval 100
)

launcher=("$python")
# A dry run needs one process and no GPU.
if [[ " $* " != *" --dry-run "* ]]; then
  first_machine=${MASTER_ADDR:-$(scontrol show hostnames "${SLURM_JOB_NODELIST:-}" 2>/dev/null | head -n 1 || true)}
  ranks=${GPUS_PER_NODE:-8}
  # torchrun sets this for several ranks and warns that it does.
  [ "$ranks" = 1 ] || export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
  launcher+=(
    -m torch.distributed.run --nproc-per-node "$ranks"
    --nnodes "${NNODES:-${SLURM_NNODES:-1}}" --node-rank "${NODE_RANK:-${SLURM_NODEID:-0}}"
    --master-addr "${first_machine:-localhost}" --master-port "${MASTER_PORT:-29500}"
  )
fi

# After a SIGTERM, torchrun waits this long for its ranks to save, instead of 30 s.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300}"
exec "${launcher[@]}" pretrain_gpt.py \
  "${model[@]}" "${precision[@]}" "${parallel[@]}" "${training[@]}" "${data[@]}" "$@"
