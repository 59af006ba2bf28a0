# Everything sets itself up: `make run` and `make test` make .venv when it is missing or out of date.
#   make run ARGS="--set train.optim.lr=1e-3"      make test ARGS="tests/stages -k launch"      make test JOBS=1

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS ?=
JOBS ?= 3
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help run test test-service lint doctor
.DEFAULT_GOAL := help

help: ## show this
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1	\2/'

run: $(STAMP) ## raw digits to a fine-tuned, scored, registered model, below ./athanor-root
	@$(BIN)/athanor run $(ARGS)

test: $(STAMP) ## the whole test suite but test-service's
	@$(BIN)/python -m pytest --numprocesses=$(JOBS) --dist=loadfile --no-loadscope-reorder --ignore=tests/service $(ARGS)

test-service: $(STAMP) ## `athanor up` whole: forms in a browser, schedules, kill -9, Postgres, SLURM, logins
	@$(BIN)/python -m pytest tests/service $(ARGS)

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
