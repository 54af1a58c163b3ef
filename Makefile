# Two commands on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
SEEDS ?= 10000
N ?= 20
MINUTES ?= 30
JOBS ?= $(shell nproc)
WHAT ?= step startup allreduce
BIN := .venv/bin
# Tests are compiled once, whatever the shell says: it takes each process of theirs a quarter of a minute.
export PYTHONDONTWRITEBYTECODE :=
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo setup test test-core test-without test-services test-ray test-oldest-torch coverage test-long test-faults same-bits same-speed soak simulate mutants check format proto docs docs-serve setup-all bench bench-setup clean help

help:            ## show this
	@grep -hE '^[a-z-]+: *.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## ?/  make \1\t/' | expand -t 20

demo: .venv/.stamp-examples   ## train a CNN on handwritten digits, on several workers
	@$(BIN)/quorate train examples/digits.yaml --workers 2

setup: .venv/.stamp-examples  ## install Quorate and what the examples need

# On two cores one more than these: many tests wait for processes of theirs.
test: .venv/.stamp-dev        ## run the tests
	$(BIN)/pytest -n 3 --dist worksteal -m "not long and not services"

test-core: .venv/.stamp-dev   ## run the tests of the core: those that are about no option
	$(BIN)/pytest -n 3 --dist worksteal -m "not long and not services" --core

test-without: .venv/.stamp-dev   ## run them without an option, OPTION="servers stores", or without each in turn
	$(BIN)/python scripts/without_option.py $(OPTION)

test-services: .venv-services/.stamp   ## run the tests that need real services: MLflow, Prometheus, a browser
	.venv-services/bin/pytest -n 2 --dist loadfile -m "services and not ray" tests/services

# One cluster at a time: each node is ten processes.
test-ray: .venv-services/.stamp   ## run the tests with a Ray cluster of several nodes, all on this machine
	.venv-services/bin/pytest -m ray tests/services

# Most of what differs between versions of torch is in what gangs and compiled models use.
test-oldest-torch: .venv-oldest/.stamp   ## run the tests of gangs, bits and training with the oldest torch that is allowed
	.venv-oldest/bin/pytest -n 2 --dist worksteal -m "not long and not services" tests/bits tests/collectives tests/own_loop tests/replica tests/strategies tests/task tests/training tests/faults/test_fsdp_faults.py tests/faults/test_ddp_faults.py

coverage: .venv/.stamp-dev    ## run the tests, and see that they reach at least 90 % of the lines
	@rm -f .coverage .coverage.*
	$(BIN)/pytest -n 2 --dist worksteal -m "not long and not services" --cov --cov-report=term --cov-fail-under=90

test-long: .venv/.stamp-dev   ## run the tests that take minutes
	$(BIN)/pytest -m "(long or hypothesis) and not services" --hypothesis-profile long

test-faults: .venv/.stamp-dev ## run the fault tests N times in a row on a busy machine
	$(BIN)/python scripts/fault_rounds.py --rounds $(N)

same-bits: .venv/.stamp-dev   ## train small jobs with the tagged version before-core and with this one, and compare the bits
	$(BIN)/python scripts/same_bits.py

same-speed: .venv/.stamp-dev  ## measure the tagged version before-core and this one in turn: commands, starts, steps
	$(BIN)/python scripts/same_speed.py

soak: .venv/.stamp-dev        ## random faults upon several jobs for MINUTES, with the same bits and nothing left behind
	$(BIN)/python scripts/soak.py --minutes $(MINUTES)

simulate: .venv/.stamp-dev    ## simulate SEEDS jobs under faults, and check what must hold
	PYTHONPATH=tests $(BIN)/python -m simulation --seeds $(SEEDS)

mutants: .venv/.stamp-dev     ## make every small mistake in the decisions, and see that tests or simulation show it
	PYTHONPATH=tests $(BIN)/python -m simulation.mutation --jobs $(JOBS) --json mutants.json

check: .venv/.stamp-dev       ## linters, types, layers, and that the house has not grown
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/house.py --check

format: .venv/.stamp-dev      ## put the code into shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: .venv/.stamp-dev       ## generate the protobuf stubs again
	$(BIN)/python scripts/proto.py

docs: .venv/.stamp-docs       ## build the documentation into site/, and check its links
	$(BIN)/python scripts/reference.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

docs-serve: .venv/.stamp-docs   ## show the documentation in a browser, built again after each change
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

setup-all: .venv/.stamp-examples .venv/.stamp-dev   ## install every extra

bench: .venv/.stamp-core      ## measure Quorate and its peers; WHAT="scaling recovery" chooses other benchmarks
	@for what in $(WHAT); do $(BIN)/python -m benchmarks $$what || exit $$?; done

bench-setup: .venv/.stamp-core   ## install the peers that the benchmarks compare with
	@sh scripts/bench_setup.sh

clean:           ## remove what was built, but not the runs
	rm -rf .venv .venv-services .venv-bench .venv-oldest .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage .coverage.* build dist site src/*.egg-info

# Before anything is made: an environment of an old Python would be found again, and fail each time.
define NEEDS_PYTHON
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	echo "Quorate needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1)."; \
	echo "Name another, such as: make $(or $(firstword $(MAKECMDGOALS)),demo) PYTHON=python3.12"; exit 1; } >&2
endef

.venv/bin/pip:
	$(NEEDS_PYTHON)
	$(PYTHON) -m venv .venv

# setuptools is installed first, so that building the package itself needs nothing from outside the constraints.
.venv/.stamp-core: .venv/bin/pip pyproject.toml constraints.txt
	@echo "Installing Quorate into .venv (the first time takes a minute or two) ..."
	@$(PIP) setuptools
	@$(PIP) --no-build-isolation --editable .
	@touch $@

.venv/.stamp-examples: .venv/.stamp-core
	@$(PIP) --no-build-isolation --editable '.[examples]'
	@touch $@

.venv/.stamp-dev: .venv/.stamp-core
	@$(PIP) --no-build-isolation --editable '.[dev,examples]'
	@touch $@

.venv/.stamp-docs: .venv/.stamp-core
	@$(PIP) --no-build-isolation --editable '.[docs]'
	@touch $@

# Services have an environment of their own: they bring half a gigabyte that nobody needs who changes the core.
.venv-services/.stamp: pyproject.toml constraints.txt scripts/services_setup.sh
	$(NEEDS_PYTHON)
	@PYTHON=$(PYTHON) sh scripts/services_setup.sh
	@touch $@

# setuptools without its pin: old versions of torch want an older one.
.venv-oldest/.stamp: pyproject.toml constraints.txt
	$(NEEDS_PYTHON)
	$(PYTHON) -m venv .venv-oldest
	@grep -vE '^(torch|setuptools)==' constraints.txt > .venv-oldest/constraints.txt
	.venv-oldest/bin/pip install --quiet --constraint .venv-oldest/constraints.txt setuptools 'torch==$(shell sed -n 's/.*"torch>=\([0-9.]*\),.*/\1/p' pyproject.toml).*'
	.venv-oldest/bin/pip install --quiet --constraint .venv-oldest/constraints.txt --no-build-isolation --editable '.[dev,examples]'
	@touch $@
