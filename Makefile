# `make demo` and `make test` set everything up on first use; later runs start at once.
# PYTHON=python3.12 chooses the interpreter (3.11 or newer); SHARD=tests/zoo runs only those of the wide matrices.

PYTHON ?= python3
VENV   := .venv
SHARD  ?=
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
BRIDGES := $(VENV)-bridges
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help demo test wide zoo bridges lint outputs setup clean

help:
	@echo "make demo     train a small GPT on 4 CPU processes under two plans and compare with one process"
	@echo "make test     run the tests"
	@echo "make wide     run the full matrices that 'make test' leaves out"
	@echo "make bridges  test against the tools that plans are exported to, in a virtual environment of their own"
	@echo "make zoo      models x axes: every model of the zoo, split in every way, against one process (minutes)"
	@echo "make lint     ruff and mypy"
	@echo "make outputs  run README's commands again and put their output into it"
	@echo "make setup    only set up $(VENV)"
	@echo "make clean    remove $(VENV) and caches"

demo: $(READY)
	@OMP_NUM_THREADS=1 $(BIN)/python examples/demo.py

test: $(READY)
	@$(PYTEST)

wide: $(READY)
	@$(PYTEST) -m wide $(SHARD)

# Other tools bring a gigabyte and their own dependencies: they stay out of the environment of everything else.
bridges: $(BRIDGES)/.ready
	@OMP_NUM_THREADS=1 $(BRIDGES)/bin/python -m pytest -m bridges

zoo: $(READY)
	@OMP_NUM_THREADS=1 $(BIN)/python scripts/zoo.py

lint: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

outputs: $(READY)
	@$(BIN)/python scripts/readme_outputs.py

setup: $(READY)

# torch comes first and alone, held by the constraints file, so that no other package chooses its build.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed: make PYTHON=python3.12 ..." >&2; exit 2; }
	@echo "[1/3] $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "[2/3] torch, the largest part: a few minutes the first time"
	@$(BIN)/python -m pip install --disable-pip-version-check --no-input -c constraints.txt torch
	@echo "[3/3] autoplan and its tools"
	@$(BIN)/python -m pip install --disable-pip-version-check --no-input -c constraints.txt -e '.[dev]'
	@touch $@

$(BRIDGES)/.ready: pyproject.toml constraints.txt
	@test -x $(BRIDGES)/bin/python || $(PYTHON) -m venv $(BRIDGES)
	@$(BRIDGES)/bin/python -m pip install --disable-pip-version-check --no-input -q -c constraints.txt torch
	@$(BRIDGES)/bin/python -m pip install --disable-pip-version-check --no-input -q -c constraints.txt -e '.[dev,bridges]'
	@touch $@

clean:
	rm -rf $(VENV) $(BRIDGES) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
