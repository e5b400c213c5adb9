#!/usr/bin/env bash
# The commands of the page, by its sections.

# Mixtures of experts
G="--cuda-graph-impl local" P="moe_router_fusion"
OURS=("bf16=bf16 $G" "fp8=tensorwise-e4m3 $G") PEERS=("peer=@bf16 $P" "peer-fp8=@delayed $P")
STEPS="python benchmarks/gpu_steps.py --rounds 1 --build-s 300"
$STEPS --shape M3 --warm-up 5 --steps 100 --modes "${OURS[@]}" "${PEERS[@]}"
$STEPS --shape M1 --warm-up 5 --steps 100 --modes "${OURS[@]}"
for _ in 1 2; do $STEPS --shape M2 --warm-up 3 --steps 51 --modes "${OURS[@]}"; done

# One layer
python benchmarks/gpu_experts.py --shape M1 M2 M3 --profile

# Several GPUs
torchrun --nproc-per-node 2 pretrain_gpt.py --model-preset mixtral-8x7b --num-layers 1 --seq-length 4096 \
    --max-position-embeddings 4096 --micro-batch-size 2 --global-batch-size 32 --expert-model-parallel-size 2 \
    --moe-expert-kernels triton --moe-token-dispatcher-type alltoall --moe-grouped-gemm --moe-permute-fusion \
    --vocab-size 50303 --num-workers 2 --lr 3e-5 --lr-decay-style constant --weight-decay 0.1 --adam-beta2 0.95 --bf16 \
    --fp8-format e4m3 --fp8-recipe tensorwise --mock-data --tokenizer-type NullTokenizer --eval-iters 0 \
    --log-interval 5 --train-iters 30 --cuda-graph-impl none

# Steps of 65,536 tokens a GPU
LAYOUTS="python benchmarks/gpu_layouts.py --warm-up 8 --steps 30"
$LAYOUTS --layouts "1 GPU" --shape M1 --modes bf16 tensorwise-e4m3 delayed blockwise
$LAYOUTS --layouts "1 GPU" --shape M3 --modes bf16 tensorwise-e4m3 delayed blockwise
P="--moe-token-dispatcher-type peer"
$LAYOUTS --layouts "EP 2" --shape M1 --rounds 2 --modes "bf16 $P" "tensorwise-e4m3 $P" "delayed $P"
$LAYOUTS --layouts "EP 2" --shape M1 --skewed --modes "bf16 $P" "tensorwise-e4m3 $P"
$LAYOUTS --layouts "EP 2" --shape M3 --rounds 2 --modes "bf16 $P" "delayed $P"
$LAYOUTS --layouts "1 GPU" --shape M2 --modes bf16 delayed

# The matrix: again and again, nine minutes each, until nothing is missing
python benchmarks/expert_matrix.py --shard 1/1 --json benchmarks/results/experts/matrix.jsonl

# Beside megatron-core 0.19.2 with cuBLASLt 13.10 in place of the one that PyTorch brings
A=NVTE_CUTEDSL_FUSED_GROUPED_MLP=1 B=NVTE_GROUPED_LINEAR_USE_FUSED_GROUPED_GEMM=1 N=moe_router_fusion
python benchmarks/gpu_layouts.py --shape M1 --layouts "EP 2" --warm-up 3 --steps 6 \
    --modes "$A @bf16" "$B @bf16" @bf16 "$A @tensorwise $N"
