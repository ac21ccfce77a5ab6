# make demo   sets up .venv and trains a small model on the bundled plays on whatever this machine has
# make test   sets up .venv and runs the tests (no GPU needed; on a GPU machine the gpu tests run too)
# make test-all   the tests that take longest, too
# make lint   ruff and pyright
# make sanitize   every kernel under NVIDIA's compute-sanitizer, on a machine with a GPU and the CUDA toolkit
#
# PIP_TORCH says which torch to install, for example: make test PIP_TORCH="torch==2.13.0 triton==3.8.0"
PYTHON ?= python3
VENV ?= .venv
PIP_TORCH ?=
BIN := $(VENV)/bin
JOBS ?= 2

.PHONY: demo test test-all lint sanitize clean

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fuselm needs Python 3.11 or later")'
	$(PYTHON) -m venv $(VENV)
	$(if $(PIP_TORCH),$(BIN)/pip install --quiet --disable-pip-version-check $(PIP_TORCH))
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[test]'
	touch $@

$(VENV)/.installed-lint: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

# Threads that wait for each other soon sleep: where the cores have other work too, those that spin for long slow it down.
demo: export GOMP_SPINCOUNT ?= 10000
demo: $(VENV)/.installed
	$(BIN)/python train/pretrain.py --preset demo --name demo --checkpoint.resume never
	$(BIN)/python train/sample.py runs/demo --prompt "KING." --max-tokens 200 --seed 1

test: $(VENV)/.installed
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile tests

test-all: $(VENV)/.installed
	FUSELM_SLOW_TESTS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile tests

lint: $(VENV)/.installed-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

sanitize: $(VENV)/.installed
	$(BIN)/python benchmarks/sanitize.py

clean:
	rm -rf $(VENV) build dist src/*.egg-info
