# `make demo` and `make test` work from a fresh clone on a machine with Python 3.11 or newer.
# Both build .venv first, from the versions in constraints.txt, and build it again when
# that file or pyproject.toml changes.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.14; do \
	"$$p" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 \
	&& { echo "$$p"; break; }; done)

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(WORKERS)

# One thread a process: tests and demo run several processes side by side.
export OMP_NUM_THREADS ?= 1
# Only what .venv holds counts.
unexport PYTHONPATH
unexport PYTHONHOME

.DEFAULT_GOAL := help
.PHONY: help demo test test-long test-campaign check format lock clean

help:
	@echo "make demo       set everything up and train the two-tower model on four workers"
	@echo "make test       set everything up, then all checks and tests"
	@echo "make test-long  the longer tests (random cuts, real models, fault injection)"
	@echo "make test-campaign  what takes an hour or more: every cut of every hard case, fuzzing"
	@echo "make format     let ruff format and mend the code"
	@echo "make clean      remove .venv, caches and outputs"

demo: $(VENV)/.ready
	$(BIN)/graphpipe demo

test: check
	$(PYTEST) -m "not long and not campaign"

test-long: $(VENV)/.ready-dev
	$(PYTEST) -m long --timeout 600

test-campaign: $(VENV)/.ready-dev
	$(PYTEST) -m campaign --timeout 1500

check: $(VENV)/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.ready-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# hatchling comes first and builds without isolation, so that its version is pinned too.
$(VENV)/.ready: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "GraphPipe needs Python 3.11 or newer with the venv module \
	(on Debian: apt install python3-venv), and found none. Install it, or name it: make PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP) install --quiet -c constraints.txt hatchling editables
	$(PIP) install --quiet -c constraints.txt --no-build-isolation -e .
	@touch $@

$(VENV)/.ready-dev: $(VENV)/.ready
	$(PIP) install --quiet -c constraints.txt --no-build-isolation -e ".[dev,docs,examples]"
	@touch $@

# Writes constraints.txt anew: the newest versions that work together, torch held at its pin.
lock:
	$(PYTHON) -m venv --clear $(VENV)-lock
	$(VENV)-lock/bin/pip install --quiet hatchling editables torch==2.13.0
	$(VENV)-lock/bin/pip install --quiet --no-build-isolation -e ".[dev,docs,examples]" torch==2.13.0
	{ sed -n '/^#/p' constraints.txt; \
	  $(VENV)-lock/bin/pip freeze --all --exclude pip --exclude-editable | sed 's/+cpu$$//'; } > constraints.new
	mv constraints.new constraints.txt
	rm -rf $(VENV)-lock

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache out
