#!/usr/bin/env bash
# Set up and run the tests:  bash tests/run.sh [PYTEST ARGUMENTS]
set -euo pipefail
cd "$(dirname "$0")/.."
MEGAFP8_EXTRAS=dev . tools/setup_venv.sh
"$PYTHON" -m ruff check .
exec "$PYTHON" -m pytest "$@"
