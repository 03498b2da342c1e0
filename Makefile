# Every target sets everything up first: a virtual environment in $(VENV) with the exact versions
# of constraints.txt. The second time that is a look at one file. Needs python3 (3.11 or later).
#
#   make quickstart   fine-tune a small language model on this machine and ask it a question
#   make test         the whole test suite
#   make check        format, lint, types, import contracts
#   make docs         the documentation as a site, in build/docs; a warning is an error
#   make accept       what is slower than a test may be, and the benchmark
#   make mutants      drop each wait and guard of a small schedule, break mechanisms, show what noticed
#   make dist         build a wheel, install it in a fresh environment, run the README's example

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.NOTPARALLEL:
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
CODE   := $(wildcard src tests benchmarks scripts docs/conf.py examples/*.ipynb)

# One thread for each PyTorch: tests start several devices (and several processes) on few cores.
ONE_THREAD := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
PYTEST_ARGS ?=

.PHONY: quickstart test check docs accept mutants dist setup clean

quickstart: $(READY)
	@$(BIN)/roundpipe train examples/quickstart.yaml

test: $(READY)
	@$(ONE_THREAD) $(BIN)/python -m pytest -q -n 2 --dist loadfile $(PYTEST_ARGS)

check: $(READY)
	@$(BIN)/ruff format --check $(CODE)
	@$(BIN)/ruff check $(CODE)
	@$(BIN)/mypy
	@$(BIN)/lint-imports

docs: $(READY)
	@$(BIN)/python -m sphinx -q -E -W --keep-going -c docs . build/docs
	@echo "docs: build/docs/index.html"

accept: $(READY)
	@$(ONE_THREAD) $(BIN)/python -m pytest -m accept --timeout=3600 -o faulthandler_timeout=1200 -q -s $(PYTEST_ARGS)
	@$(BIN)/python benchmarks/two_devices.py

mutants: $(READY)
	@$(ONE_THREAD) $(BIN)/python scripts/mutants.py

dist: $(READY)
	@rm -rf dist
	@echo "dist: building the sdist, and the wheel from it"
	@$(BIN)/python -m build --no-isolation --outdir dist . > $(VENV)/build.log 2>&1 \
	  || { cat $(VENV)/build.log; exit 1; }
	@$(BIN)/python scripts/check_dist.py dist

setup: $(READY)

clean:
	rm -rf dist build out .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

# Done once, and again when a version changes.
$(READY): pyproject.toml constraints.txt
	@bash scripts/setup.sh "$(PYTHON)" "$(VENV)"
	@touch $@
