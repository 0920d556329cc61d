# `make test` is all a fresh machine with python3.11 (or a newer python3) needs: it builds .venv once and runs every check.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := test
.PHONY: setup test test-full lint format typecheck demo demo-keep bench clean

setup: $(STAMP)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The stamp is newer than what decides the installation, so nothing is installed twice.
# torch and the build backend come first: the package itself then builds without isolation.
$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install -c constraints.txt torch setuptools
	$(PIP) install -c constraints.txt --no-build-isolation -e '.[dev]'
	touch $@

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: $(STAMP)
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The models are small: a second OpenMP thread costs more than it gives, a second process does not.
test: export OMP_NUM_THREADS = 1
test: lint typecheck
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist worksteal

test-full: lint typecheck
	$(BIN)/python -m pytest

demo: $(STAMP)
	$(BIN)/python -m examples.demo

# The same, and what it measured becomes README's table, its plot and benchmarks/results/demo.json.
demo-keep: $(STAMP)
	$(BIN)/python -m examples.demo --keep

bench: $(STAMP)
	$(BIN)/python benchmarks/step_time.py

clean:
	rm -rf build dist .demo .mypy_cache .ruff_cache .pytest_cache .hypothesis src/*.egg-info
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
