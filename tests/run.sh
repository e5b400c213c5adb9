#!/usr/bin/env bash
# Set up and run the tests:  bash tests/run.sh [PYTEST ARGUMENTS]
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/setup_venv.sh dev
"$PYTHON" -m ruff check .
exec "$PYTHON" -m pytest "$@"
