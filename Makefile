# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test test-all test-gpu lint browser bench clean

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable ".[dev]"
	touch $@

demo: $(INSTALLED)
	$(BIN)/python benchmarks/plasticity.py --demo

test: $(INSTALLED) lint browser
	$(BIN)/pytest --cov --cov-report=term

test-all: $(INSTALLED) lint browser
	$(BIN)/pytest --cov --cov-report=term -m "not gpu"

test-gpu: $(INSTALLED)
	$(BIN)/pytest -m gpu

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

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
	$(BIN)/python benchmarks/checkpoint.py --quick

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
