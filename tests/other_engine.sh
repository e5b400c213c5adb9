#!/usr/bin/env bash
# Chosen tests with the supported version of megatron-core that is not installed:  bash tests/other_engine.sh
# Its Python files come first on the path of the same Python, below .venv/engines. It asks for Python 3.12, but its files
# also run with 3.11, for which there is a CPU build of torch.
set -euo pipefail
cd "$(dirname "$0")/.."
MEGAFP8_EXTRAS=dev . tools/setup_venv.sh
version=0.19.2
engine=$PWD/.venv/engines/$version

not_tested() {
  echo "NOT TESTED with megatron-core $version: $1"
  exit 0
}

installed=$("$PYTHON" -c 'from importlib.metadata import version; print(version("megatron-core"))')
[ "$installed" = 0.16.1 ] || not_tested "$installed is installed, and the other one is tested beside 0.16.1 only"
[ -d .venv ] || not_tested "there is no .venv, where it would be put"
if [ ! -d "$engine" ]; then
  mkdir -p .venv/engines
  new=$(mktemp -d .venv/engines/new.XXXXXX)
  trap 'rm -rf "$new"' EXIT
  "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-deps --ignore-requires-python \
    --only-binary :all: --implementation cp --python-version 3.12 --platform manylinux_2_28_x86_64 \
    --target "$new" "megatron-core==$version" || not_tested "there is no wheel of it"
  # The compiled dataset index: the installed one, if it is of the same source.
  datasets=$("$PYTHON" -c 'import importlib.util as u; print(u.find_spec("megatron.core").submodule_search_locations[0])')/datasets
  cmp --silent "$datasets/helpers.cpp" "$new/megatron/core/datasets/helpers.cpp" \
    || not_tested "its compiled dataset index has another source"
  cp "$datasets"/helpers_cpp.*.so "$new/megatron/core/datasets/"
  mv "$new" "$engine"
  trap - EXIT
fi

export PYTHONPATH=$PWD:$engine${PYTHONPATH:+:$PYTHONPATH}
found=$("$PYTHON" -c 'from importlib.metadata import version; print(version("megatron-core"))')
[ "$found" = "$version" ] || not_tested "Python finds $found before it"
echo "tests with megatron-core $version:"
exec "$PYTHON" -m pytest -p no:cacheprovider "$@" tests/unit/mcore tests/unit/optimizer tests/unit/checkpoint \
  tests/unit/models/test_attention.py tests/unit/models/test_initialization.py tests/unit/data/test_gpt_dataset.py \
  tests/parity/test_run_of_an_earlier_version.py tests/distributed/test_loop.py tests/distributed/test_megatron_core_pitfalls.py \
  tests/distributed/test_checkpoint.py \
  tests/both_engines.py
