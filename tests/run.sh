#!/usr/bin/env bash
# Set up and run the tests:  bash tests/run.sh [PYTEST ARGUMENTS]
set -euo pipefail
cd "$(dirname "$0")/.."
# Bytecode is written when a module is first imported, also where the environment forbids it: hundreds of processes read
# it. pip would compile all modules of all packages, which takes a minute, and most are never imported.
unset PYTHONDONTWRITEBYTECODE
PIP_COMPILE=0 MEGAFP8_EXTRAS=dev . tools/setup_venv.sh
# Transformer Engine's references in Python, out of its wheel, which is not installed (tests/conformance/te_references.py)
if [ -d .venv ] && ! compgen -G ".venv/oracles/transformer_engine-*.whl" >/dev/null; then
  "$PYTHON" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --dest .venv/oracles \
    transformer-engine==2.20.2 || echo "no wheel of Transformer Engine: the tests against its references are skipped"
fi
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
"$PYTHON" -m mypy
# Huge pages for the heap, where the kernel gives them on request: forked ranks then spend a seventh less of their time,
# most of it on page faults. See glibc's manual; other C libraries ignore it.
export GLIBC_TUNABLES=glibc.malloc.hugetlb=1${GLIBC_TUNABLES:+:$GLIBC_TUNABLES}
[ $# = 0 ] || exec "$PYTHON" -m pytest "$@"

# All tests. Those that mostly compute, and those with the other version of megatron-core, run at low priority,
# concurrently with the others, which wait for processes and read clocks.
computing=(tests/unit tests/conformance tests/parity tests/policy)
# Those of tests/distributed that only compare numbers follow the other version's, which take less time.
comparing=(tests/distributed/test_{checkpoint,expert,fp8,fsdp,mixture,muon,planted}*.py
  tests/distributed/test_{optimizer_shards,precision_map_runs,quantizer_state,saved_activation_runs}.py)
low_priority=(nice -n 10 "$PYTHON" -m pytest -p no:cacheprovider)

other_version_and_comparing() {
  local status=0
  trap 'kill "$!" 2>/dev/null; exit 143' TERM
  nice -n 10 bash tests/other_engine.sh &
  wait "$!" || status=$?
  "${low_priority[@]}" "${comparing[@]}" &
  wait "$!" || status=$?
  exit "$status"
}

logs=$(mktemp -d)
"${low_priority[@]}" "${computing[@]}" > "$logs/1" 2>&1 &
beside=("$!")
other_version_and_comparing > "$logs/2" 2>&1 &
beside+=("$!")
echo "running concurrently, reported at the end: ${computing[*]} tests/other_engine.sh ${comparing[*]}"
trap 'kill "${beside[@]}" 2>/dev/null || true; rm -rf "$logs"' EXIT
status=0
elsewhere=("${computing[@]}" "${comparing[@]}")
"$PYTHON" -m pytest "${elsewhere[@]/#/--ignore=}" || status=$?
[ "$status" != 2 ] || exit 2 # interrupted
for each in "${beside[@]}"; do
  wait "$each" || status=$?
done
cat "$logs"/*
exit "$status"
