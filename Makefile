# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CORE := $(VENV)/.core
INSTALLED := $(VENV)/.installed
# Two processes of one torch thread each: thread pools that share cores stall each other.
PARALLEL := -n 2
test test-all test-busy: export OMP_NUM_THREADS := 1

export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo demo-drift demo-plasticity test test-all test-busy test-gpu test-oldest lint browser docs site bench dist clean

$(CORE): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable ".[cli,report,tensorboard]"
	touch $@

$(INSTALLED): $(CORE)
	$(BIN)/pip install --quiet --editable ".[dev]"
	touch $@

# Trains a population in a market with hidden regimes, evaluates its best member against buy-and-hold and staying flat in
# held-out markets, computes signals for a file of prices, and writes the report.
demo: $(CORE)
	rm -rf runs/demo
	$(BIN)/driftproof tune configs/regime_market_population.yaml --name demo
	$(BIN)/driftproof evaluate demo --episodes 256
	$(BIN)/python examples/made_up_prices.py runs/demo/prices.csv
	$(BIN)/driftproof infer demo runs/demo/prices.csv
	@echo; tail -n 4 runs/demo/signals.csv; echo
	$(BIN)/driftproof report demo
	@echo "Open runs/demo/report.html in a browser."

# An agent with the drift kit and Stable-Baselines3's PPO on a CartPole whose sensors are moved, live, and one picture.
demo-drift: $(INSTALLED)
	$(BIN)/python examples/drift_demo.py --output runs/drift_demo.png

# Sixty tasks in a row, three optimizers, one picture.
demo-plasticity: $(INSTALLED)
	$(BIN)/python benchmarks/plasticity.py --demo

test: $(INSTALLED) lint browser
	$(BIN)/pytest $(PARALLEL)

test-all: $(INSTALLED) lint browser
	$(BIN)/pytest $(PARALLEL) --cov --cov-report=term -m "not gpu"

# Tests that start processes, beside eight busy loops on two cores: `make test-busy TIMES=50 TESTS=tests/cli/test_interrupts.py`.
# The loops end with this shell, however it ends; afterwards, no process that a test started may be left.
TIMES ?= 1
TESTS ?= tests/cli tests/pbt tests/config/test_build.py tests/ppo/test_resume.py tests/state/test_async_writer.py \
	tests/state/test_store.py
TWO_CORES := $(shell command -v taskset >/dev/null && echo taskset -c 0,1)
test-busy: $(INSTALLED)
	@shell=$$$$; loops=; trap 'kill $$loops 2>/dev/null' EXIT; trap 'exit 130' HUP INT TERM; \
	for loop in 1 2 3 4 5 6 7 8; do \
		$(TWO_CORES) sh -c "while kill -0 $$shell 2>/dev/null; do :; done" & loops="$$loops $$!"; \
	done; \
	for time in $$(seq $(TIMES)); do \
		echo "time $$time of $(TIMES)"; \
		DRIFTPROOF_BUSY=$$shell $(TWO_CORES) $(BIN)/pytest -q --timeout=3000 $(TESTS) || exit 1; \
		left=$$(grep -ls "DRIFTPROOF_BUSY=$$shell" /proc/[0-9]*/environ); \
		if [ -n "$$left" ]; then echo "processes are left: $$left"; exit 1; fi; \
	done

test-gpu: $(INSTALLED)
	$(BIN)/pytest -m gpu

# A selection of tests with the oldest versions that pyproject.toml promises, for which Python 3.10 and 3.11 have wheels.
# `TORCH=torch==2.13.0` takes another torch with the other oldest versions. On a machine without CUDA, torch's CPU build can be
# had from an index of its own, PIP_EXTRA_INDEX_URL.
OLDEST := build/oldest
TORCH ?=
SELECTED := tests/test_front.py tests/test_requirements.py tests/optim/test_ecosystem.py tests/state/test_files.py \
	tests/config/test_files.py tests/pbt/test_scheduler.py tests/pbt/test_pb2.py tests/ppo/test_surface.py \
	tests/ppo/test_persistence.py tests/export tests/report/test_report.py tests/cli/test_products.py
test-oldest: export OMP_NUM_THREADS := 1
test-oldest: export PIP_CONSTRAINT := $(CURDIR)/$(OLDEST)/constraints.txt
test-oldest:
	$(PYTHON) -m venv --clear $(OLDEST)
	PIP_CONSTRAINT= $(OLDEST)/bin/pip install --quiet hypothesis pytest pytest-timeout
	$(OLDEST)/bin/python scripts/oldest.py $(TORCH) > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/pip install --quiet --editable ".[all]"
	$(OLDEST)/bin/pytest -q -W ignore::DeprecationWarning $(SELECTED)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The page of settings is made of the models, and configs/ holds copies of the package's starting values.
docs: $(CORE)
	$(BIN)/python -m driftproof.config.page > docs/configuration.md
	cp src/driftproof/config/starting_values/*.yaml configs/

# The documentation as a site that needs no network: open build/site/index.html.
site: export NO_MKDOCS_2_WARNING := 1
site: $(INSTALLED)
	$(BIN)/mkdocs build --strict

# A browser for the tests of the report, where one may be installed; the tests say so if there is none.
browser:
	@if { command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ]; then sudo=; elif sudo -n true 2>/dev/null; then sudo="sudo -n"; else exit 0; fi; \
	command -v apt-get >/dev/null || exit 0; \
	echo "Installing chromium for the tests of the report"; \
	$$sudo apt-get install -qq -y chromium >/dev/null 2>&1 || \
	{ $$sudo apt-get update -qq && $$sudo apt-get install -qq -y chromium; } >/dev/null 2>&1 || true

# Every benchmark in its quick form; each script's --help tells how to run it in full.
bench: $(INSTALLED)
	$(BIN)/python benchmarks/optim_speed.py
	$(BIN)/python benchmarks/vgs.py --quick
	$(BIN)/python benchmarks/plasticity.py --quick
	$(BIN)/python benchmarks/throughput.py --quick
	$(BIN)/python benchmarks/learning.py --quick
	$(BIN)/python benchmarks/short.py --quick
	$(BIN)/python benchmarks/checkpoint.py --quick
	$(BIN)/python benchmarks/drift.py --quick
	$(BIN)/python benchmarks/drift_suite.py --quick
	$(BIN)/python benchmarks/market.py --quick
	$(BIN)/python benchmarks/pbt.py --quick
	$(BIN)/python benchmarks/population.py --quick
	$(BIN)/python benchmarks/robustness.py --quick
	$(BIN)/python benchmarks/infer.py --quick
	$(BIN)/python benchmarks/starting_values.py --quick

# The wheel and the sdist in dist/, checked, and the wheel tried in an empty environment.
dist:
	$(PYTHON) -m venv build/release
	build/release/bin/pip install --quiet build twine
	build/release/bin/python scripts/dist.py

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
