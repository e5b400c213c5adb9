#!/usr/bin/env bash
# The commands of the page.

python benchmarks/telemetry_overhead.py --recipe delayed --fp8-what-if blockwise,mxfp8,nvfp4 --num-layers 8 \
    --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --micro-batch-size 4 --global-batch-size 4
python benchmarks/gpu_counters.py --modes delayed tensorwise --shape A \
    --extra="--cuda-graph-impl local --micro-batch-size 4 --global-batch-size 4"
