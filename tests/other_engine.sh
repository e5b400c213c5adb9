#!/usr/bin/env bash
# Chosen tests with the newer version of megatron-core:  bash tests/other_engine.sh [PYTEST ARGUMENTS]
# Its files come first on the path of a Python 3.12 or 3.13 for which pip has a build of torch in a local folder. Where
# there is none, they come first on the path of the Python in use, although they ask for 3.12. It ends with an error where
# that version cannot be downloaded or installed.
set -euo pipefail
cd "$(dirname "$0")/.."
MEGAFP8_EXTRAS=dev . tools/setup_venv.sh
version=0.19.2
target=3.12
native=$PWD/.venv/engines/native
notice=

not_tested() {
  echo "NOT TESTED with megatron-core $version: $1"
  exit 0
}

failed() {
  echo "cannot be tested with megatron-core $version: $1" >&2
  exit 1
}

native_python() {
  local candidate
  for candidate in python3.13 python3.12; do
    if "$candidate" -m pip install --dry-run --no-index --no-deps --ignore-installed torch > /dev/null 2>&1; then
      echo "$candidate"
      return
    fi
  done
  return 1
}

# install_native PYTHON: an environment as .venv, also with 0.16.1, which the tests compare with.
install_native() {
  local install=("$native/bin/python" -m pip install --quiet --disable-pip-version-check -c "$native/constraints.txt")
  rm -rf "$native" && "$1" -m venv "$native" \
    && grep -v '^megatron-core==' constraints.txt > "$native/constraints.txt" \
    && "${install[@]}" torch setuptools wheel \
    && "${install[@]}" --no-build-isolation -e '.[dev]' megatron-core==0.16.1 \
    && touch "$native/ready"
}

[ -d .venv ] || not_tested "there is no .venv, where it would be put"
if found=$(native_python); then
  target=${found#python}
  [ -e "$native/ready" ] || install_native "$found" || failed "it cannot be installed for $found"
  PYTHON=$native/bin/python
else
  notice="NOT TESTED natively: there is no Python 3.12 or 3.13 for which pip has a local build of torch"
fi
engine=$PWD/.venv/engines/$version-$target

installed=$("$PYTHON" -c 'from importlib.metadata import version; print(version("megatron-core"))')
[ "$installed" = 0.16.1 ] || not_tested "$installed is installed, and the other one is tested beside 0.16.1 only"
if [ ! -d "$engine" ]; then
  mkdir -p .venv/engines
  new=$(mktemp -d .venv/engines/new.XXXXXX)
  trap 'rm -rf "$new"' EXIT
  "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-deps --ignore-requires-python \
    --only-binary :all: --implementation cp --python-version "$target" --platform manylinux_2_28_x86_64 \
    --target "$new" "megatron-core==$version" || failed "its wheel cannot be downloaded"
  # The compiled dataset index: the installed one, if it is of the same source.
  datasets=$("$PYTHON" -c 'import importlib.util as u; print(u.find_spec("megatron.core").submodule_search_locations[0])')/datasets
  cmp --silent "$datasets/helpers.cpp" "$new/megatron/core/datasets/helpers.cpp" \
    || failed "its compiled dataset index has another source"
  cp "$datasets"/helpers_cpp.*.so "$new/megatron/core/datasets/"
  mv "$new" "$engine"
  trap - EXIT
fi

export PYTHONPATH=$PWD:$engine${PYTHONPATH:+:$PYTHONPATH}
found=$("$PYTHON" -c 'from importlib.metadata import version; print(version("megatron-core"))')
[ "$found" = "$version" ] || failed "Python finds $found before it"
echo "tests with megatron-core $version, $("$PYTHON" --version):"
# Of tests/unit: the files whose tests call megatron-core or read its source.
# Left out for their time, in seconds on a busy machine; they passed when they were run by hand: tests/faults (more than
# 300), of tests/parity test_resharding.py (50) and test_fp8_layouts.py (60), of tests/distributed test_quantizer_state.py
# (40) and test_fp8_param_gather.py (45). both_engines.py has checkpoints of FSDP2. The second model's layouts take
# another 20. With --all-cases also the models, which take 100.
tests=(
  tests/unit/mcore tests/unit/data/test_gpt_dataset.py tests/unit/config/test_batch_schedule.py
  tests/unit/optimizer/test_schedules.py tests/unit/nonfinite/test_gradient_checks.py
  tests/unit/checkpoint/test_serialization.py tests/unit/checkpoint/test_serialization_enums.py
  tests/unit/checkpoint/test_fingerprint.py tests/unit/checkpoint/test_standalone_tensors.py
  tests/unit/checkpoint/test_compatibility_strictness.py
  tests/unit/checkpoint/convert/test_megatron_folder.py
  tests/parity/test_layouts.py "--deselect=tests/parity/test_layouts.py::test_layout_follows_one_rank[gpt2"
  tests/parity/test_earlier_version.py
  # A resume in the layout of the save is in both_engines.py, with the losses and weights of the unbroken run.
  tests/distributed/test_checkpoint.py::test_resume_in_another_layout_follows_one_rank
  tests/distributed/test_optimizer_shards.py tests/distributed/test_megatron_core_pitfalls.py tests/both_engines.py
  # Layouts in which megatron-core's versions have faults of their own.
  "tests/parity/test_mixture_layouts.py::test_a_mixture_follows_one_rank[losses-cp2]"
  "tests/parity/test_mixture_layouts.py::test_a_mixture_follows_one_rank[sequence-loss-shared-experts-ep2-tp2-etp1]"
  "tests/parity/test_latent_attention_layouts.py::test_latent_attention_follows_one_rank[experts-tp2]"
  "tests/parity/test_multi_token_layouts.py::test_multi_token_prediction_follows_one_rank[dense-cp2]"
  "tests/distributed/test_flex_dispatcher.py::test_a_run_follows_that_of_alltoall[deepep-ep2-tp2]"
  tests/distributed/test_megatron_checkpoints.py::test_an_import_and_its_export_have_the_same_tensors
)
case " $* ${more:-} " in *" --all-cases "*) tests+=(tests/unit/models tests/unit/checkpoint/convert/test_against_transformers.py) ;; esac
"$PYTHON" -m pytest -p no:cacheprovider "$@" "${tests[@]}" &
trap 'kill "$!"' INT TERM
status=0
wait "$!" || status=$?
echo "$notice"
exit "$status"
