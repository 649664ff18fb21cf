# Everything a contributor or a new user runs. `make help` lists the targets.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
COMPILED := build/compiled
SUITE := BIN=$(BIN) bash ops/suite.sh
AGAIN :=
JOBS := 2

.DEFAULT_GOAL := help
.PHONY: help setup up test test-again check compiled test-compiled dist format clean \
	chaos-tests engine-tests service-tests system-tests test-engines

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sort | awk -F':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

setup: $(STAMP) ## Create .venv and install the pinned dependencies

$(STAMP): pyproject.toml constraints.txt ops/setup.sh
	@PYTHON=$(PYTHON) VENV=$(VENV) bash ops/setup.sh
	@touch $@

up: $(STAMP) ## Run a fleet in three cities on this machine (ONESHOT=1: chat once, then exit)
	@exec $(BIN)/python -m ops.fleet $(if $(ONESHOT),--oneshot,)

# Two at a time, the longest first: what waits for processes runs beside what computes. What each has
# to say comes whole when it has ended, and one that fails does not keep the others from running.
test: $(STAMP) ## Run every check and every test
	@$(MAKE) --no-print-directory --keep-going --jobs=$(JOBS) --output-sync=target \
		chaos-tests engine-tests service-tests system-tests check

test-again: ## Run the checks and the tests that failed in `make test` once more, one suite at a time
	@$(MAKE) --no-print-directory test AGAIN=--again JOBS=1

chaos-tests: $(STAMP)
	$(SUITE) chaos $(AGAIN) tests/chaos

engine-tests: $(STAMP)
	$(SUITE) engine $(AGAIN) tests/integration/engine

service-tests: $(STAMP)
	$(SUITE) service $(AGAIN) tests/integration --ignore=tests/integration/engine

system-tests: $(STAMP)
	$(SUITE) system $(AGAIN) tests/system

test-engines: $(STAMP) ## Install engines of other vendors into .engines (4 GB) and test with them
	$(BIN)/python -m ops.engines.vllm_cpu
	$(BIN)/pytest tests/engines

check: $(STAMP) ## Format, lint, import contracts, types, unit and style tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/mypy
	$(SUITE) unit $(AGAIN) -q tests/unit tests/test_style.py

compiled: $(STAMP) ## Compile the router's hot path, in a copy at build/compiled (takes a minute)
	@mkdir -p $(COMPILED) && find $(COMPILED) -name '*.py' -not -path '$(COMPILED)/build/*' -delete
	@git ls-files -co --exclude-standard -z | xargs -0 cp --parents -p -t $(COMPILED)
	cd $(COMPILED) && ISOCHRONE_COMPILED=1 PYTHONPATH=$(CURDIR)/$(COMPILED) \
	$(abspath $(BIN))/python setup.py -q build_ext --inplace

test-compiled: compiled ## Run the router's tests and a minute of fuzzing on that copy
	cd $(COMPILED) && export PYTHONPATH=$(CURDIR)/$(COMPILED) && \
	$(abspath $(BIN))/pytest -q tests/unit/router tests/integration/router tests/test_style.py && \
	$(abspath $(BIN))/python -m ops.fuzz.requests 60

dist: $(STAMP) ## Build the wheel: compiled request path, prebuilt kernels (PYTHONS="python3.11 python3.13")
	$(BIN)/pip install -q -c constraints.txt ziglang
	$(BIN)/python -m ops.packaging.build_wheel $(foreach python,$(PYTHONS),--python $(python))

format: $(STAMP) ## Rewrite the code in the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## Remove the virtual environment and all local state
	rm -rf $(VENV) build dist .state .mypy_cache .ruff_cache .pytest_cache .hypothesis
