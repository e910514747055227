# Everything runs in this checkout's virtual environment; no target requires another one to be run first.
PYTHON ?= python3
VENV ?= .venv
# The versions to install; constraints-oldest.txt has the oldest that pyproject.toml allows, constraints-newest.txt no bounds
# of its own but for torch.
CONSTRAINTS ?= constraints.txt
ROUNDS ?= 20
# Processes that run tests; much of a test's time is waiting. 0: one, without pytest-xdist.
JOBS ?= 3

BIN := $(VENV)/bin
# Files in the order of their folders, not those with the most tests first: those at the end take little each.
PYTEST_JOBS = $(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder
STAMP := $(VENV)/.installed

SMOKE_TESTS := tests/test_import.py tests/model tests/session tests/planning tests/runtime \
  tests/integration/test_ordinary_modules.py tests/integration/test_exact.py
FAILURE_TESTS := tests/integration tests/chaos tests/callbacks tests/control tests/runtime tests/data

# Every process that runs or is started by tests imports them and the package: compiled once, whatever the environment wants.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install demo test test-device test-long test-all test-works-with test-oldest test-newest test-exhaustive test-slurm test-ray gpu test-repeat chaos bench docs check clean

help: ## show the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 18

install: $(STAMP) ## create the virtual environment and install the package with its tested versions

$(STAMP): pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[dev,milp]'
	touch $@

# The demo needs none of the tools of `make install`: without these it has an environment with the package alone.
DEMO_VENV := $(if $(wildcard $(STAMP)),$(VENV),.venv-demo)

.venv-demo/.installed: pyproject.toml $(CONSTRAINTS)
	test -x .venv-demo/bin/python || $(PYTHON) -m venv .venv-demo
	@echo "Installing the package with torch and Lightning into .venv-demo"
	.venv-demo/bin/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e .
	touch $@

demo: $(DEMO_VENV)/.installed ## train a small GPT on 2 x 2 CPU workers with and without a failure, compare what it costs
	$(DEMO_VENV)/bin/python examples/train_gpt.py experiment=demo $(ARGS)

test: $(STAMP) ## run the tests, JOBS files at a time, 3 by default (ARGS are passed on to pytest)
	$(PYTEST_JOBS) $(ARGS)

test-long: $(STAMP) ## run all tests that take long, half an hour; `make test` has a few of them
	$(PYTEST_JOBS) -m "long and not exhaustive" $(ARGS)

test-all: $(STAMP) ## run what test and test-long run, each test once
	$(PYTEST_JOBS) --long $(ARGS)

test-device: $(STAMP) ## run what runs on accelerators on simulated ones, compiled here, and 100 random failure scenarios
	PYTHONPATH=tests $(subst -m pytest,-m simulated_device -m pytest,$(PYTEST_JOBS)) \
	  tests/simulated_device tests/integration tests/parity tests/callbacks $(ARGS)
	PYTHONPATH=tests $(BIN)/python -m simulated_device -m chaos --scenarios 100 --seed 1 --jobs 2

test-ray: $(STAMP) ## run the tests on Ray clusters of several nodes, some minutes; needs the extra ray
	$(BIN)/python -m pytest -q -m ray_cluster tests/raylets $(ARGS)

test-works-with: $(STAMP) ## run docs/works_with.md with loggers, loaders and models of other projects, which it installs
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -r tests/works_with/requirements.txt
	$(BIN)/python -m pytest -q tests/works_with -m "long or not long" $(ARGS)

test-oldest: ## run a smoke set with the oldest versions that are allowed (PYTHON=python3.10 for the oldest Python)
	$(MAKE) test VENV=.venv-oldest CONSTRAINTS=constraints-oldest.txt ARGS="$(SMOKE_TESTS) $(ARGS)"

test-newest: ## run the smoke set, planners and commands with the newest versions that are allowed, whatever constraints.txt says
	$(MAKE) test VENV=.venv-newest CONSTRAINTS=constraints-newest.txt ARGS="$(SMOKE_TESTS) tests/commands $(ARGS)"

test-exhaustive: $(STAMP) ## run every case of the matrices that `make test` samples
	$(BIN)/python -m pytest -q -m exhaustive $(ARGS)

gpu: $(STAMP) ## run what needs a CUDA device, one is enough, and say what could not run (some minutes)
	failed=0; \
	$(BIN)/python benchmarks/gpu.py --only nccl || failed=1; \
	$(BIN)/python -m pytest -q -rsP -m gpu tests $(ARGS) || failed=1; \
	$(BIN)/python tests/sanitized.py || failed=1; \
	$(BIN)/python benchmarks/gpu.py --quick || failed=1; \
	exit $$failed

test-slurm: $(STAMP) ## run jobs on a SLURM cluster of this machine's own (apt-get install slurmctld slurmd slurm-client munge)
	$(BIN)/python -m pytest -q -m slurm tests/engines $(ARGS)

test-repeat: $(STAMP) ## run the tests with real processes and failures ROUNDS times, up to the first failure
	for round in $$(seq $(ROUNDS)); do \
	  echo "Round $$round of $(ROUNDS)"; $(BIN)/python -m pytest -q $(FAILURE_TESTS) $(ARGS) || exit 1; \
	done

chaos: $(STAMP) ## run 300 random failure scenarios, checked to the last bit, file and process (ARGS="--only SEED")
	PYTHONPATH=tests $(BIN)/python -m chaos --scenarios 100 --seed 1 2 3 --jobs 2 $(ARGS)

bench: $(STAMP) ## run all benchmarks, one and a half hours; needs an idle machine (TORCHFT=its python: compare with torchft)
	$(BIN)/python benchmarks/emulated.py
	$(BIN)/python benchmarks/recovery.py $(if $(TORCHFT),--torchft $(TORCHFT))
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/step_calls.py
	$(BIN)/python benchmarks/reduction.py
	$(BIN)/python benchmarks/drift.py
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/soak.py
	$(BIN)/python benchmarks/checkpoint_kills.py
	$(BIN)/python benchmarks/simulated_against_real.py
	$(BIN)/python benchmarks/planner.py

docs: $(STAMP) ## build the documentation into build/site; a broken link or reference fails
	$(BIN)/mkdocs build --strict

check: $(STAMP) ## check lint, formatting, types, direction of imports; print the sizes of the rooms
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python tests/room_sizes.py

clean: ## remove the virtual environment, caches, build and run outputs
	rm -rf $(VENV) .venv-demo build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	rm -rf outputs multirun lightning_logs
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
