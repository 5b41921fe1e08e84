# `make train` trains an agent on a fresh machine, `make test` runs everything that must hold, `make bench` measures
# speed side by side with other libraries (less than half an hour; `make bench ARGS=--quick` for a look).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

.PHONY: train test test-all lint bench clean

train: $(VENV)/.train
	$(BIN)/lockstep train CartPole-v1

test: lint
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-all: test

lint: $(VENV)/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks.side_by_side $(ARGS)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.train: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) --editable '.[torch,classic-control,video]'
	@touch $@

$(VENV)/.test: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) --editable '.[test]'
	@touch $@

$(VENV)/.bench: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) --editable '.[torch,jax,classic-control,mujoco]'
	@touch $@

clean:
	rm -rf $(VENV) benchmarks/.venv-peers build src/*.egg-info
