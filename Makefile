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
# Beside the environment: the reference of tests/parity/test_pixels.py, which the project does not need.
TORCHVISION := $(VENV)/torchvision
# The first Python of a fitting version on PATH.
PYTHON = $(shell for python in python3.11 python3.12 python3 python; do \
	  $$python -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null && echo $$python && break; done)
ARGS ?=
JOBS ?= 3
# One file to a worker, in the order of tests/tiers/plugin.py.
SPREAD := --numprocesses=$(JOBS) --dist=loadfile --no-loadscope-reorder
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help run gpu test test-full test-changed breaks lint docs doctor
.DEFAULT_GOAL := help

help: ## show this
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1	\2/'

run: $(RUN_STAMP) ## raw digits to a fine-tuned, scored, registered model, below ./athanor-root
	@$(BIN)/athanor run $(ARGS)

gpu: ## the environment for an NVIDIA GPU: torch for CUDA, and Transformer Engine, compiled here
	@$(or $(wildcard $(BIN)/python),$(PYTHON),python3) infra/gpu_environment.py $(ARGS)

test: $(STAMP) ## the core of the test suite: every module, each guarantee once
	@$(BIN)/python -m pytest $(SPREAD) -m "not full" $(ARGS)

test-full: export ATHANOR_FUZZ_SEED ?= $(shell date +%s)
test-full: $(STAMP) $(TORCHVISION) ## all tests, in six parts that can be stopped and resumed, or one by PART=3/6
	@echo "spoilt inputs of ATHANOR_FUZZ_SEED=$(ATHANOR_FUZZ_SEED)"
	@$(BIN)/python -m tests.tiers.full --workers $(JOBS) $(if $(PART),--part $(PART)) $(ARGS)

test-changed: $(STAMP) $(TORCHVISION) ## of all tests those that the change since the last full pass can reach
	@$(BIN)/python -m tests.tiers.changed --workers $(JOBS) $(ARGS)

breaks: $(STAMP) ## break the code on purpose, one break at a time, and report the breaks that no core test sees
	@$(BIN)/python -m tests.breaks $(ARGS)

lint: $(STAMP) ## check style, format and the rules of the house
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .
	@$(BIN)/python -m pytest -p no:xdist tests/test_architecture.py tests/test_unsafe_code.py tests/test_documents.py

docs: $(STAMP) ## build the pages of docs/ as a site in build/site
	@$(BIN)/zensical build --strict
	@echo "open build/site/index.html"

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

$(TORCHVISION): constraints.txt | $(STAMP)
	@echo "installing torchvision into $@: 21 MB"
	@rm -rf $@ && $(BIN)/python -m pip install --quiet --no-deps -c constraints.txt --target $@ torchvision
	@touch $@
