#!/usr/bin/env bash
# The commands of the page, by its sections.

# GEMMs, casts and linears
python benchmarks/gpu_gemm.py --shapes A B C --json FILE
python benchmarks/gpu_kernels.py
python benchmarks/gpu_te_layers.py
