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

# All tests. Those that mostly compute, and those with the other version of megatron-core, run at low priority, two parts
# at a time, beside the others, which wait for processes and read clocks. Short parts come last: then both processors work
# to the end.
distributed=( # those that only compare numbers
  "$(echo tests/distributed/test_{fp8,mixture}*.py)"
  "$(echo tests/distributed/test_{checkpoint,expert,fsdp,muon,planted}*.py)"
  "$(echo tests/distributed/test_{attention_layouts,dispatch_in_fp8,document_borders,evaluation,flex_dispatcher}.py \
    tests/distributed/test_{loss_scale,megatron_checkpoints,node_reduction,nonfinite_values,nonfinite_operands}.py \
    tests/distributed/test_{optimizer_shards,precision_map_runs,quantizer_state,saved_activation_runs}.py \
    tests/distributed/test_traffic_in_graphs.py)"
)
parts=(tests/unit tests/other_engine.sh tests/parity "${distributed[@]}" "tests/conformance tests/policy")
logs=$(mktemp -d)
export logs

# run_part NUMBER FILES
# shellcheck disable=SC2317  # xargs calls it
run_part() {
  local log=$logs/$1 command=("$PYTHON" -m pytest -p no:cacheprovider)
  shift
  [ "$1" != tests/other_engine.sh ] || command=(bash)
  "${command[@]}" "$@" > "$log" 2>&1
}
export -f run_part

for number in "${!parts[@]}"; do
  echo "$number ${parts[number]}"
done | setsid nice -n 10 xargs -d '\n' -n 1 -P 2 bash -c 'run_part $0' &
beside=$!
echo "running concurrently, reported at the end: ${parts[*]}"
trap 'kill -- "-$beside" 2>/dev/null || true; rm -rf "$logs"' EXIT
status=0
# shellcheck disable=SC2206  # a part has several files
elsewhere=(${parts[*]})
"$PYTHON" -m pytest "${elsewhere[@]/#/--ignore=}" || status=$?
[ "$status" != 2 ] || exit 2 # interrupted
wait "$beside" || status=$?
cat "$logs"/*
exit "$status"
