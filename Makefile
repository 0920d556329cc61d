# `make test` is all a fresh machine with python3.11 (or a newer python3) needs: it builds .venv once and runs every check.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := test
NATIVE := setup.py $(wildcard native/*)

.PHONY: setup native test test-full lint format typecheck demo demo-keep bench bench-ranks peers-env clean

setup: $(STAMP)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The stamp is newer than what decides the installation, so nothing is installed twice.
# torch and the build backend come first: the package itself then builds without isolation, and
# with it the kernels, if there is a compiler.
$(STAMP): pyproject.toml constraints.txt $(NATIVE) | $(BIN)/python
	$(PIP) install -c constraints.txt torch setuptools
	$(PIP) install -c constraints.txt --no-build-isolation -e '.[dev]'
	touch $@

# The kernels again, in place.
native: | $(STAMP)
	$(BIN)/python setup.py build_ext --inplace --force

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: $(STAMP)
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The models are small: a second OpenMP thread costs more than it gives, a second process does not.
test test-full: export OMP_NUM_THREADS = 1
test: lint typecheck
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist worksteal

test-full: lint typecheck
	$(BIN)/python -m pytest -n 2 --dist worksteal

demo: $(STAMP)
	$(BIN)/python -m examples.demo

# The same, and what it measured becomes README's table, its plot and benchmarks/results/demo.json.
demo-keep: $(STAMP)
	$(BIN)/python -m examples.demo --keep

# The short form of every benchmark: that it runs, in a few minutes. Figures worth keeping come from
# the long forms on an idle machine: benchmarks/README.md.
BENCH_DISK ?= /var/tmp
bench: $(STAMP)
	$(BIN)/python benchmarks/practicality.py --short --disk $(BENCH_DISK)
	$(BIN)/python benchmarks/disk_speed.py --short --disk $(BENCH_DISK)
	$(BIN)/python benchmarks/bytes_moved.py --short --disk $(BENCH_DISK)
	$(BIN)/python benchmarks/beyond_memory.py --short --disk $(BENCH_DISK)
	$(BIN)/python benchmarks/long_run.py --short --disk $(BENCH_DISK)
	$(BIN)/python benchmarks/largest_model.py --short --disk $(BENCH_DISK)
	$(BIN)/python benchmarks/peers.py --short --disk $(BENCH_DISK)
	$(BIN)/python benchmarks/optimizer_speed.py --short
	$(BIN)/python benchmarks/state_curves.py --short --disk $(BENCH_DISK)

# DeepSpeed has an environment of its own, so that it decides nothing for this project; what it
# compiles at its first use is compiled here, and not while ranks wait for each other. Its NVMe
# offload needs libaio's headers (apt-get install libaio-dev).
PEERS := .peers
peers-env: $(PEERS)/.installed

$(PEERS)/.installed:
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install torch==2.13.0
	$(PEERS)/bin/python -m pip install setuptools wheel numpy
	DS_ACCELERATOR=cpu $(PEERS)/bin/python -m pip install --no-build-isolation deepspeed==0.19.8
	DS_ACCELERATOR=cpu TORCH_EXTENSIONS_DIR=$(CURDIR)/$(PEERS)/torch_extensions PATH="$(CURDIR)/$(PEERS)/bin:$$PATH" \
		$(PEERS)/bin/python -c "from deepspeed.ops.op_builder.cpu import *; [Builder().load() for Builder in (ShareMemCommBuilder, CPUAdamBuilder, AsyncIOBuilder)]"
	touch $@

bench-ranks: $(STAMP) peers-env
	$(BIN)/python benchmarks/rank_peers.py
	$(BIN)/python benchmarks/rank_peers.py --ranks 1,2,4

clean:
	rm -rf build dist src/zeepo/optim/_kernels* src/zeepo/memory/_block_io* .demo .mypy_cache .ruff_cache .pytest_cache .hypothesis src/*.egg-info
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
