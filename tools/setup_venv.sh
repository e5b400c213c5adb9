#!/usr/bin/env bash
# Source this:  . tools/setup_venv.sh      (MEGAFP8_EXTRAS=dev adds what the tests need)
# It leaves $PYTHON pointing to a Python that has everything megafp8 needs:
#   - the Python in use, where it already has torch with CUDA, megatron-core and Transformer Engine (a GPU container);
#   - else .venv in this project, made if it is not there, with the versions of constraints.txt; beside an NVIDIA GPU with
#     those of constraints-gpu.txt and Transformer Engine.
# A second call finds its own stamp and does nothing.

megafp8_root=$(cd "$(dirname "${BASH_SOURCE[0]:-$0}")/.." && pwd) # $0 in zsh
megafp8_extras=${MEGAFP8_EXTRAS:-}

# megafp8_find_python PREFERRED: the first supported Python, the preferred one if it is there.
megafp8_find_python() {
  local candidate
  for candidate in "$1" python3.11 python3.12 python3.13 python3; do
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "megafp8 needs Python 3.11 to 3.13 with venv (Debian: apt-get install python3-venv)" >&2
  return 1
}

megafp8_is_ready() {
  python3 - 2>/dev/null <<'PYTHON'
import importlib.util, sys
import torch
names = (
    "transformer_engine", "megatron.core", "yaml", "psutil", "sentencepiece", "tensorboard", "google_crc32c", "matplotlib",
    "scipy", "jinja2", "tqdm", "pydantic"
)
sys.exit(not (torch.cuda.is_available() and all(importlib.util.find_spec(name) for name in names)))
PYTHON
}

megafp8_has_gpu() {
  command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU
}

# megafp8_install NAME ARGUMENTS: pip install in one step, with pip's own progress on a terminal.
megafp8_install() {
  local name=$1 start=$SECONDS verbosity=(--quiet)
  shift
  [ ! -t 1 ] || verbosity=()
  echo "installing $name"
  "$PYTHON" -m pip install "${verbosity[@]}" --disable-pip-version-check -c "$megafp8_root/$megafp8_constraints" "$@" || return 1
  echo "installed $name in $((SECONDS - start)) s"
}

megafp8_setup() {
  if megafp8_is_ready; then
    PYTHON=$(command -v python3)
    export PYTHONPATH=$megafp8_root${PYTHONPATH:+:$PYTHONPATH}
    # The package is not installed there, so the command is a function of this shell.
    megafp8() { "$PYTHON" -m megafp8.cli.main "$@"; }
    echo "using $PYTHON, which has CUDA, megatron-core and Transformer Engine"
    return
  fi
  local venv=$megafp8_root/.venv stamp extras=$megafp8_extras python preferred=python3.11
  local megafp8_constraints=constraints.txt
  PYTHON=$venv/bin/python
  if megafp8_has_gpu; then
    extras=${extras:+$extras,}te
    megafp8_constraints=constraints-gpu.txt preferred=python3.12 # the versions that the GPU tests ran with
  fi
  stamp=$(cat "$megafp8_root/setup.py" "$megafp8_root/$megafp8_constraints" | cksum | cut -d' ' -f1)-$extras
  if [ -x "$PYTHON" ] && grep -qsx -- "$stamp" "$venv/megafp8-stamps"; then
    return
  fi
  if [ ! -x "$PYTHON" ]; then
    python=$(megafp8_find_python "$preferred") || return 1
    echo "making .venv with $python"
    "$python" -m venv "$venv" || return 1
  fi
  # torch first and alone, so that nothing else chooses its version
  megafp8_install "torch (the largest download)" torch setuptools wheel || return 1
  if [ "$megafp8_constraints" = constraints-gpu.txt ]; then
    # Its torch part is built beside the installed torch; pip's build isolation would take the newest one.
    megafp8_install "what builds Transformer Engine" packaging pybind11 ninja nvidia-cudnn-frontend || return 1
    megafp8_install "Transformer Engine (compiled for 10 minutes or more if there is no wheel for this torch)" \
      --no-build-isolation 'transformer-engine[pytorch]' || return 1
  fi
  megafp8_install "megafp8 and the packages that it needs" --no-build-isolation -e "$megafp8_root" || return 1
  if [ -n "$extras" ]; then
    megafp8_install "the extras $extras" --no-build-isolation -e "${megafp8_root}[$extras]" || return 1
  fi
  echo "$stamp" >> "$venv/megafp8-stamps"
  echo "$venv is ready: . $venv/bin/activate, then megafp8 doctor"
}

# shellcheck disable=SC2317  # where this file is sourced `return` ends it, where it is run `exit` does
megafp8_setup || { echo "set-up failed" >&2; return 1 2>/dev/null || exit 1; }
export PYTHON
