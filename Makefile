# Everything sets itself up: `make run` and `make test` make .venv when it is missing or out of date.
#   make run ARGS="--set train.optim.lr=1e-3"      make test ARGS="tests/stages -k launch"      make test JOBS=1

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS ?=
JOBS ?= 3
# One file to a worker, in the order of tests/tiers/plugin.py.
SPREAD := --numprocesses=$(JOBS) --dist=loadfile --no-loadscope-reorder
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help run test test-full test-changed breaks lint doctor
.DEFAULT_GOAL := help

help: ## show this
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1	\2/'

run: $(STAMP) ## raw digits to a fine-tuned, scored, registered model, below ./athanor-root
	@$(BIN)/athanor run $(ARGS)

test: $(STAMP) ## the core of the test suite: every module, every promise of the README once; ten minutes on two cores
	@$(BIN)/python -m pytest $(SPREAD) -m "not full" $(ARGS)

test-full: $(STAMP) ## all tests: every layout, fuzz with a new seed, `athanor up` whole; an hour on two cores
	@$(BIN)/python -m pytest $(SPREAD) --record-durations --ignore=tests/service $(ARGS)
	@$(BIN)/python -m pytest --record-durations tests/service $(ARGS)
	@$(BIN)/python -m tests.tiers.passed

test-changed: $(STAMP) ## of all tests those that the change since the last full pass can reach, longest first
	@$(BIN)/python -m tests.tiers.changed $(SPREAD) $(ARGS)

breaks: $(STAMP) ## break the code on purpose, one break at a time, and report the breaks that no core test sees
	@$(BIN)/python -m tests.breaks $(ARGS)

lint: $(STAMP) ## check style and format
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

doctor: $(STAMP) ## what this machine has, what is missing and how to get it
	@$(BIN)/athanor doctor $(ARGS)

$(STAMP): pyproject.toml constraints.txt
	@set -e; \
	if [ ! -x $(BIN)/python ]; then \
	  for candidate in python3.11 python3.12 python3 python; do \
	    if $$candidate -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null; then \
	      found=$$candidate; break; \
	    fi; \
	  done; \
	  if [ -z "$$found" ]; then echo "athanor needs Python 3.11 or 3.12, and none is on PATH" >&2; exit 2; fi; \
	  echo "making $(VENV) with $$found"; \
	  $$found -m venv $(VENV); \
	fi
	@echo "installing into $(VENV): about 2 GB, a few minutes the first time"
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@
