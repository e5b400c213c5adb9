#!/usr/bin/env bash
# Train with torchrun on this machine, from the same job files and flags as launcher/slurm.py:
#
#   bash launcher/torchrun.sh --name first --gpus-per-node 8 -- FLAGS
#   bash launcher/torchrun.sh JOB.yaml --dry-run                      prints the script and starts nothing
#
# On several machines, without Slurm, the same command on each of them:
#
#   bash launcher/torchrun.sh JOB.yaml --nodes 4 --endpoint first-machine:29500
#
# There nothing starts the run again; the same command on all of them resumes from the newest checkpoint.
#
# Options: --help. PYTHON is the Python that reads the job (default .venv/bin/python, else python3).
set -euo pipefail
project=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$([ -x "$project/.venv/bin/python" ] && echo "$project/.venv/bin/python" || echo python3)}
exec "$python" "$project/launcher/slurm.py" --torchrun "$@"
