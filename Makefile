# `make serve` and `make test` are all a fresh clone needs. Both are fast the second time: the stamp's name holds a hash of
# what decides an installation, so it does not depend on file times.
SHELL := /bin/bash
PYTHON ?= python3
CONSTRAINTS ?= constraints-cpu.txt
HOST ?= 127.0.0.1
PORT ?= 8000
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed-$(shell cat pyproject.toml $(CONSTRAINTS) Makefile | sha256sum | cut -c1-16)
# Idle OpenMP threads that spin slow every other process of a small machine down.
export OMP_WAIT_POLICY := PASSIVE
export GOMP_SPINCOUNT := 0

.PHONY: serve install check test test-all clean

serve: install
	exec $(BIN)/trimaran serve --host $(HOST) --port $(PORT) $(ARGS)

install: $(STAMP)

$(STAMP):
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	rm -f $(VENV)/installed-*
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS) --editable '.[dev]'
	# A client that the tests run. It asks for an older jiter than openai does, and works with the newer.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps instructor==1.17.0 docstring_parser==0.18.0
	$(BIN)/trimaran demo install
	touch $@

check: install
	$(BIN)/python tools/check

test: install check
	$(BIN)/python tools/run_tests.py -m "not long and not gpu" $(ARGS)

test-all: install check
	$(BIN)/python -m pytest -m "not gpu" $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
