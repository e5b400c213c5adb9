#!/usr/bin/env bash
# Set up and run the tests:
#   bash tests/run.sh                    the first set (tests/first_set.txt)
#   bash tests/run.sh --all [--all-cases] [--long]  the first set, then ruff, mypy and the other tests; with --all-cases
#                                        also those that repeat others (tests/more_cases.txt), with --long long ones
#   bash tests/run.sh PYTEST ARGUMENTS   chosen tests
set -euo pipefail
cd "$(dirname "$0")/.."
what=${1:---first}
more=${*:2} # options of pytest
export more
unset ignored # of a run.sh that tests this one
adds="ruff, mypy, layouts and faults on several ranks, all commands and pages, the second version of megatron-core"
case $what in
  --first) echo "The first set of tests: about 8 minutes on two cores, 2 of them for the installation (1.5 GB in .venv)." ;;
  --all) echo "All tests: about 30 minutes on two cores. First the first set, then $adds." ;;
esac
# Bytecode is written when a module is first imported, also where the environment forbids it: hundreds of processes read
# it. pip would compile all modules of all packages, which takes a minute, and most are never imported.
unset PYTHONDONTWRITEBYTECODE
start=$SECONDS
extras=dev
if [ "$what" = --first ] && ! grep -qse '-dev$' .venv/megafp8-stamps; then
  extras="test"
fi
PIP_COMPILE=0 MEGAFP8_EXTRAS=$extras . tools/setup_venv.sh
# Huge pages for the heap, where the kernel gives them on request: forked ranks then spend a seventh less of their time,
# most of it on page faults. See glibc's manual; other C libraries ignore it.
export GLIBC_TUNABLES=glibc.malloc.hugetlb=1${GLIBC_TUNABLES:+:$GLIBC_TUNABLES}
case $what in
  --first | --all) ;;
  *) exec "$PYTHON" -m pytest "$@" ;;
esac

logs=$(mktemp -d)
export logs
trap 'kill -- "-${parts:-0}" 2> /dev/null || true; rm -rf "$logs"' EXIT

# run_part NICENESS FILES: prints the last line of pytest's output; all of it after a failure.
# shellcheck disable=SC2317  # xargs calls it
run_part() {
  local niceness=$1 words=${*:2} log start=$SECONDS status=0
  # shellcheck disable=SC2206  # words
  local command=("$PYTHON" -m pytest -p no:cacheprovider $more ${ignored:-})
  log=$(mktemp "$logs/XXXXXX")
  shift
  case $1 in
    lint) command=(bash -c '"$PYTHON" -m ruff check . && "$PYTHON" -m ruff format --check . && "$PYTHON" -m mypy') ;;
    *.sh) command=(bash) ;;
  esac
  nice -n "$niceness" "${command[@]}" "$@" > "$log" 2>&1 || status=$?
  [ "$status" = 0 ] || cat "$log"
  grep -h '^NOT TESTED' "$log" || true
  echo "$((SECONDS - start)) s: $(grep -E '[0-9]+ (passed|failed|error)|Success' "$log" | tail -1)  ${words:0:100}"
  return "$status"
}
export -f run_part

# run_parts PROCESSES LINES: so many at a time. Fails if one does.
run_parts() {
  local processes=$1
  shift
  printf '%s\n' "$@" | setsid xargs -d '\n' -P "$processes" -I LINE bash -c 'run_part LINE' &
  parts=$!
  wait "$parts"
}

mapfile -t first < <(grep -v '^#' tests/first_set.txt)
status=0
run_parts "$(nproc)" "${first[@]/#/0 }" || status=1
took="$(((SECONDS - start) / 60)) min $(((SECONDS - start) % 60)) s"
if [ "$status" = 0 ]; then echo "The first set passed in $took."; else echo "The first set FAILED in $took."; fi
if [ "$what" = --first ]; then
  echo "bash tests/run.sh --all adds $adds: about 22 minutes."
  exit "$status"
fi

# Transformer Engine's references in Python, out of its wheel, which is not installed (tests/conformance/te_references.py)
if [ -d .venv ] && ! compgen -G ".venv/oracles/transformer_engine-*.whl" >/dev/null; then
  "$PYTHON" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --dest .venv/oracles \
    transformer-engine==2.20.2 || echo "no wheel of Transformer Engine: the tests against its references are skipped"
fi

# The others, one process more than processors, since many tests wait for processes. Those that mostly compute have low
# priority, beside those that read clocks. Short parts come last: then all processors work to the end.
computing=( # tests of several ranks that only compare numbers
  tests/distributed/test_{fp8,mixture}*.py
  tests/distributed/test_{checkpoint,expert,fsdp,muon,planted}*.py
  tests/distributed/test_{attention_layouts,dispatch_in_fp8,document_borders,evaluation,flex_dispatcher}.py
  tests/distributed/test_{loss_scale,megatron_checkpoints,node_reduction,nonfinite_values,nonfinite_operands}.py
  tests/distributed/test_{optimizer_shards,precision_map_runs,quantizer_state,saved_activation_runs}.py
  tests/distributed/test_traffic_in_graphs.py
)
paths=$(tr ' ' '\n' <<< "${first[*]}" | grep -v '^--') # a line each
left_out=$(tr ' ' '\n' <<< "${first[*]}" | sed -n 's/^--ignore=//p')
mapfile -t computing < <(printf '%s\n' "${computing[@]}" | grep -vxF "$paths")
half=$((${#computing[@]} / 2))
parts=(
  "0 tests/faults" "10 tests/other_engine.sh" "10 tests/unit tests/conformance tests/policy ${left_out//$'\n'/ }"
  "0 tests/cli --ignore-glob=tests/cli/test_[i-z]*" "10 ${computing[*]:half}" "0 tests/cli --ignore-glob=tests/cli/test_[a-h]*"
  "10 ${computing[*]:0:half}" "0 tests/distributed ${computing[*]/#/--ignore=}" "10 tests/parity"
  "0 tests/command_lines tests/frozen tests/gpu tests/test_*.py" "10 lint"
)
ignored=${paths//tests\//--ignore=tests/} # in folders: pytest collects what is named itself
export ignored
run_parts "$(($(nproc) + 1))" "${parts[@]}" || status=1
echo "All tests ended after $(((SECONDS - start) / 60)) min."
exit "$status"
