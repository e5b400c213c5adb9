#!/usr/bin/env bash
# Test whether FP8 recipes train as stably as BF16: paired seeds, learning rates to divergence and known-bad controls, on
# this machine and without data of your own. The page is FOLDER/report/stability.html.
#
#   bash examples/stability.sh [FOLDER]        (default runs/stability)
#
# If it is interrupted, run it again to resume. Environment variables: SIZE (tiny, small or gpu-hour), RECIPES, PARTS,
# SEEDS (of pairs and controls) and PARALLEL (concurrent runs).
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/setup_venv.sh

"$PYTHON" launcher/stability.py --output-dir "${1:-runs/stability}" --size "${SIZE:-tiny}" \
  --recipes "${RECIPES:-tensorwise,mxfp8}" --parts "${PARTS:-pairs,sweep,controls}" \
  ${SEEDS:+--seeds "$SEEDS"} --parallel "${PARALLEL:-1}"
