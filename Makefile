# `make demo` and `make test` each work alone on a fresh machine: they make the virtual
# environment, install into it and run. A stamp file in the environment says what it holds.

PYTHON ?= python3
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
# Python compiles the modules that it imports: compiling all of them first takes half the time.
PIP := $(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt

# One thread for each worker: threads that share a busy core wait for each other for long.
RUN_TESTS := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses=$(WORKERS) --dist=worksteal

.PHONY: demo test test-long lint docs clean

demo: $(VENV)/.stamp-bench
	$(BIN)/python examples/quickstart.py

test: $(VENV)/.stamp-test
	$(RUN_TESTS) -m 'not long'

# The rest: tests/long.py names them. `make test-long ONLY=tests/test_distributed.py` runs some.
test-long: $(VENV)/.stamp-test
	$(RUN_TESTS) -m long $(ONLY)

lint: $(VENV)/.stamp-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict

docs: $(VENV)/.stamp-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --site-dir build/site

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/.stamp-%: pyproject.toml constraints.txt | $(BIN)/python
	@echo 'installing into $(VENV): minutes, since torch with CUDA is some gigabytes'
	$(PIP) --editable '.[$*]'
	touch $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
