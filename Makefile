# Everything sets itself up: `make run` and `make test` make .venv when it is missing or out of date. `make run` installs
# what a run needs, `make test` and `make lint` add their tools, `make gpu` replaces torch by the GPU's stack.
#   make run ARGS="--set train.optim.lr=1e-3"      make test ARGS="tests/stages -k launch"      make test JOBS=1

VENV := .venv
BIN := $(VENV)/bin
RUN_STAMP := $(VENV)/.installed
STAMP := $(VENV)/.installed-dev
# `make gpu` writes the pins of the GPU's stack here, and everything that is installed later keeps to them.
GPU_PINS := $(wildcard $(VENV)/constraints.txt)
PIP := $(BIN)/python -m pip install --quiet -c $(or $(GPU_PINS),constraints.txt)
# The first Python of a fitting version on PATH.
PYTHON = $(shell for python in python3.11 python3.12 python3 python; do \
	  $$python -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null && echo $$python && break; done)
ARGS ?=
JOBS ?= 3
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help run gpu test test-service lint doctor
.DEFAULT_GOAL := help

help: ## show this
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1	\2/'

run: $(RUN_STAMP) ## raw digits to a fine-tuned, scored, registered model, below ./athanor-root
	@$(BIN)/athanor run $(ARGS)

gpu: ## the environment for an NVIDIA GPU: torch for CUDA, and Transformer Engine, compiled here
	@$(or $(wildcard $(BIN)/python),$(PYTHON),python3) infra/gpu_environment.py $(ARGS)

test: $(STAMP) ## the whole test suite but test-service's
	@$(BIN)/python -m pytest --numprocesses=$(JOBS) --dist=loadfile --no-loadscope-reorder --ignore=tests/service $(ARGS)

test-service: $(STAMP) ## `athanor up` whole: forms in a browser, schedules, kill -9, Postgres, SLURM, logins
	@$(BIN)/python -m pytest tests/service $(ARGS)

lint: $(STAMP) ## check style and format
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

doctor: $(RUN_STAMP) ## what this machine has, what is missing and how to get it
	@$(BIN)/athanor doctor $(ARGS)

$(BIN)/python:
	@if [ -z "$(PYTHON)" ]; then echo "athanor needs Python 3.11 or 3.12, and none is on PATH" >&2; exit 2; fi
	@echo "making $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv $(VENV)

$(RUN_STAMP): pyproject.toml constraints.txt $(if $(GPU_PINS),constraints-gpu.txt) | $(BIN)/python
ifdef GPU_PINS
	@$(MAKE) --no-print-directory gpu ARGS=
else
	@echo "installing into $(VENV): about 2 GB, a few minutes the first time"
	@$(PIP) -e .
endif
	@touch $@

$(STAMP): pyproject.toml constraints.txt $(if $(GPU_PINS),$(RUN_STAMP)) | $(BIN)/python
	@echo "installing into $(VENV), with the tools of the tests: about 2.5 GB, a few minutes the first time"
	@$(PIP) -e '.[dev]'
	@touch $(RUN_STAMP) $@
