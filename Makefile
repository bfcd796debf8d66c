.DEFAULT_GOAL := help
.PHONY: help setup demo test test-fast coverage check format docs bench bench-peers reproduce routing gpu soak fuzz ci

PY := .venv/bin/python
STAMP := .venv/.setup-stamp
# Two at a time: an engine's start is one long import, and two engines fit in memory.
PYTEST := $(PY) -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder
NATIVE := $(shell find src/kvist/native -name '*.cpp' -o -name '*.hpp' 2>/dev/null)

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' Makefile

setup: $(STAMP)  ## make .venv with Kvist, an engine and the tools of development
	@:

$(STAMP): pyproject.toml $(wildcard CMakeLists.txt) $(NATIVE) scripts/setup.sh
	@bash scripts/setup.sh

demo: setup  ## show on this machine what Kvist saves
	@.venv/bin/kvist demo

test: setup  ## run every test that needs no GPU
	@$(PYTEST) -m "not gpu"

test-fast: setup  ## run the tests that need no engine and are quick
	@$(PYTEST) -m "not gpu and not engines and not slow"

coverage: setup  ## branch coverage of what decides and stores; below 90 % is a failure
	@$(PY) -m pytest -q -m "not gpu and not engines and not slow" \
	  tests/unit tests/contract tests/property tests/golden tests/parity \
	  --cov=kvist.core --cov=kvist.policy --cov=kvist.store --cov=kvist.tiers \
	  --cov=kvist.connectors.plan --cov-branch --cov-report=term:skip-covered --cov-fail-under=90

check: setup  ## lint, types, layers, house rules
	@.venv/bin/ruff check -q .
	@.venv/bin/ruff format -q --check .
	@.venv/bin/mypy
	@.venv/bin/lint-imports
	@$(PY) -m pytest -q tests/tidy

format: setup  ## format the code and apply the safe fixes
	@.venv/bin/ruff format -q .
	@.venv/bin/ruff check -q --fix .

docs: setup  ## write the reference pages in docs/
	@$(PY) -m kvist.cli.docs_gen

bench: setup  ## measure the store and Kvist against recomputing
	@$(PY) -m kvist.bench --page docs/benchmarks.md

bench-peers: setup  ## measure Kvist against its peers
	@bash scripts/bench_peers_setup.sh || echo "measuring without what could not be set up"
	@$(PY) -m kvist.bench --peers --page docs/benchmarks.md

reproduce: setup  ## run Mooncake's experiments in the simulator
	@$(PY) -m kvist.sim.reproduce

routing: setup  ## judge routing and admission on public traces in the simulator
	@$(PY) -m kvist.sim.routing

gpu: setup  ## run the tests that need a GPU
	@$(PY) -m pytest -q -m gpu

soak: setup  ## run the crash, fault, stress and property tests for long
	@KVIST_CRASH_ROUNDS=1000 KVIST_CHAOS_SEEDS=500 KVIST_STRESS_S=600 KVIST_CLUSTER_SEEDS=1000 \
	  HYPOTHESIS_PROFILE=soak \
	  $(PY) -m pytest -q --timeout 7200 tests/property tests/faults tests/stress

fuzz: setup  ## throw damaged payloads at every codec, and a million messages at nodes
	@KVIST_FUZZ_S=150 $(PY) -m pytest -q --timeout 1200 tests/faults/test_payload_fuzz.py
	@KVIST_FUZZ_MUTATIONS=1000000 $(PY) -m pytest -q --timeout 3600 \
	  tests/node/test_fuzz.py tests/node/test_fuzz_conversations.py tests/node/test_peers_fuzz.py

ci: check test  ## what must pass before a change is merged
