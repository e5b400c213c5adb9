#!/usr/bin/env bash
# Set up and run the tests:  bash tests/run.sh [PYTEST ARGUMENTS]
set -euo pipefail
cd "$(dirname "$0")/.."
MEGAFP8_EXTRAS=dev . tools/setup_venv.sh
# Transformer Engine's references in Python, out of its wheel, which is not installed (tests/conformance/te_references.py)
if [ -d .venv ] && ! compgen -G ".venv/oracles/transformer_engine-*.whl" >/dev/null; then
  "$PYTHON" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --dest .venv/oracles \
    transformer-engine==2.20.2 || echo "no wheel of Transformer Engine: the tests against its references are skipped"
fi
"$PYTHON" -m ruff check .
exec "$PYTHON" -m pytest "$@"
