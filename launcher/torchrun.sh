#!/usr/bin/env bash
# `megafp8 torchrun`, from a checkout: train with torchrun on this machine, from job files and flags.
#
#   bash launcher/torchrun.sh --gpus-per-node 8 -- FLAGS
#   bash launcher/torchrun.sh JOB.yaml --dry-run                      prints the script and starts nothing
#
# Options: --help. PYTHON is the Python that trains (default .venv/bin/python, else python3).
set -euo pipefail
project=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$([ -x "$project/.venv/bin/python" ] && echo "$project/.venv/bin/python" || echo python3)}
exec "$python" "$project/launcher/torchrun.py" "$@"
