# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test test-all test-gpu lint bench clean

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable ".[dev]"
	touch $@

demo: $(INSTALLED)
	$(BIN)/python benchmarks/plasticity.py --demo

test: $(INSTALLED) lint
	$(BIN)/pytest --cov --cov-report=term

test-all: $(INSTALLED) lint
	$(BIN)/pytest --cov --cov-report=term -m "not gpu"

test-gpu: $(INSTALLED)
	$(BIN)/pytest -m gpu

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Every benchmark in its quick form; each script's --help tells how to run it in full.
bench: $(INSTALLED)
	$(BIN)/python benchmarks/optim_speed.py
	$(BIN)/python benchmarks/vgs.py --quick
	$(BIN)/python benchmarks/plasticity.py --quick
	$(BIN)/python benchmarks/throughput.py --quick
	$(BIN)/python benchmarks/learning.py --quick
	$(BIN)/python benchmarks/checkpoint.py --quick
	$(BIN)/python benchmarks/drift.py --quick
	$(BIN)/python benchmarks/market.py --quick
	$(BIN)/python benchmarks/infer.py --quick

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
