#!/usr/bin/env bash
# The commands of the page, by its sections.

# Planted faults, the guard and known-bad controls
python benchmarks/planted_faults.py --fault-seeds 3 --arms inflated-qk,aligned-swiglu,outlier-channel
python benchmarks/planted_faults.py --clean-seeds 20 --fault-seeds 0
python benchmarks/guard_calibration.py --seeds 2 --steps 20

# Known-bad controls
python benchmarks/known_bad_controls.py

# The stability suite
megafp8 stability --output-dir D --size tiny --recipes tensorwise --parts pairs,sweep,controls
CUDA_VISIBLE_DEVICES=0,1,0,1,0,1,0,1 megafp8 stability --output-dir D --size gpu-hour --recipes tensorwise
