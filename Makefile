# `make train` trains an agent on a fresh machine, `make test` runs what a change must not break, `make test-all` that and
# what takes long or needs packages of gigabytes, `make bench` measures speed side by side with other libraries (it
# took 48 minutes on two fast cores; `make bench ARGS=--quick` for a look), `make docs` builds the
# documentation as a site, in build/docs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# XLA's compiler for TPUs, of the version that JAX asks for: in a place of its own, for JAX would look for TPUs by it.
# It exists for Linux on x86-64; elsewhere its tests are skipped.
LIBTPU := 0.0.42.*
TOO_OLD := Lockstep needs Python 3.11 or newer, and $(PYTHON) is %d.%d: \
	make $(or $(MAKECMDGOALS),train) PYTHON=python3.12
CHECK := import sys; sys.exit(sys.version_info < (3, 11) and "$(TOO_OLD)" % sys.version_info[:2])
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

.PHONY: train test test-all lint format types layers compiled tests tests-all bench docs clean

train: $(VENV)/.train
	$(BIN)/lockstep train CartPole-v1

test: $(VENV)/.test
	$(MAKE) --jobs --no-print-directory tests lint

test-all: $(VENV)/.test-all
	$(MAKE) --jobs --no-print-directory tests-all lint

# The tests start hundreds of processes, which needn't compile the source each.
compiled: $(VENV)/.test
	$(BIN)/python -m compileall -q src tests/modules

tests: compiled
	$(BIN)/python -m pytest -n 3 --dist loadfile -m "not long"

tests-all: $(VENV)/.test-all compiled
	LOCKSTEP_TESTS_OPTIMIZED=1 $(BIN)/python -m pytest -n 2 --dist loadfile

lint: format types layers

format: $(VENV)/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.test
	$(BIN)/pyright --pythonpath $(BIN)/python

layers: $(VENV)/.test
	$(BIN)/lint-imports

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks.side_by_side $(ARGS)

docs: $(VENV)/.docs
	rm -rf build/docs
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet -c docs/_site -d build/doctrees docs build/docs

# What can't be made whole is removed, or the next call would take it; an environment of `uv venv` has no pip yet.
$(BIN)/pip:
	@$(PYTHON) -c '$(CHECK)'
	test -e $(VENV) || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); false; }
	test -e $@ || $(BIN)/python -m ensurepip --default-pip || \
		{ echo '$(VENV) has no pip: make clean removes it' >&2; false; }

$(VENV)/.train: $(BIN)/pip pyproject.toml constraints.txt
	$(PIP) --editable '.[torch,classic-control,video,report]'
	@touch $@

$(VENV)/.test: $(BIN)/pip pyproject.toml constraints.txt
	$(PIP) --editable '.[test]'
	@touch $@

$(VENV)/.test-all: $(VENV)/.test
	$(PIP) --editable '.[test-all]'
	-$(PIP) --no-deps --upgrade --target $(VENV)/libtpu 'libtpu==$(LIBTPU)'
	@touch $@

$(VENV)/.bench: $(BIN)/pip pyproject.toml constraints.txt
	$(PIP) --editable '.[torch,jax,classic-control,mujoco,atari,plot]'
	-$(PIP) --editable '.[envpool]'
	@touch $@

$(VENV)/.docs: $(BIN)/pip pyproject.toml constraints.txt
	$(PIP) --editable '.[docs]'
	@touch $@

clean:
	rm -rf $(VENV) .cache benchmarks/.venv-peers build src/*.egg-info
