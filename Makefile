# kveval: `make` lists the targets. Everything is set up by `make install`, which the others call.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
# Test processes. Each has one compute thread, so this is the number of cores to use.
JOBS ?= 2

VENV := .venv
BIN := $(VENV)/bin
# Holds when the environment is whole and no older than what it was made from.
STAMP := $(VENV)/.kveval-installed
# Bytecode is written as modules are first imported: compiling all of torch and transformers beforehand takes a minute.
PIP := $(BIN)/python -m pip --disable-pip-version-check install --no-compile -qq -c constraints-cpu.txt

.PHONY: help install run test lint format pruning clean

help: ## list the targets
	@grep -hE '^[a-z]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z]+):.*## /\1\t/' | expand -t 10

install: $(STAMP) ## make .venv with kveval in it (a few minutes, once)

# torchao is a reference of the tests. It lies apart because transformers imports it wherever it finds it, with warnings.
# torch goes first and alone: asked for by another package, pip may prefer a CUDA build of several GB.
$(STAMP): pyproject.toml constraints-cpu.txt
	@echo "[1/3] virtual environment $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "[2/3] torch"
	@$(PIP) torch==2.13.0
	@echo "[3/3] kveval with its extras transformers, report and dev (about 100 packages, one to three minutes)"
	@$(PIP) -e '.[transformers,report,dev]'
	@$(PIP) --no-deps --target $(VENV)/reference torchao==0.18.0
	@touch $@

run: install ## the main job: fp8 against bf16 at 131,072 tokens, on the built-in probe
	$(BIN)/kveval run --kv fp8 --ctx 128k

lint: install ## ruff and mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

test: lint ## ruff, mypy and all tests
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile

format: install ## rewrite the code as ruff formats it
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

pruning: install ## do kveval's prunings keep the tokens that kvpress keeps? (in an environment of its own, a minute)
	@test -d .venv-kvpress || $(PYTHON) -m venv .venv-kvpress
	@.venv-kvpress/bin/python -m pip --disable-pip-version-check install --no-compile -qq torch==2.13.0
	@.venv-kvpress/bin/python -m pip --disable-pip-version-check install --no-compile -qq kvpress==0.5.5
	@mkdir -p build
	.venv-kvpress/bin/python benchmarks/pruning_reference.py reference build/pruning.npz
	$(BIN)/python benchmarks/pruning_reference.py compare build/pruning.npz

clean: ## remove .venv and all caches of tools
	rm -rf $(VENV) .venv-kvpress .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find kveval tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
