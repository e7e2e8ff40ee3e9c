# Everything a fresh machine needs: Python 3.11+, pip and make.
#   make demo    install what the demo needs, run it on the embedded server
#   make test    install the development set, run every test
#   make sim     simulate the protocol under faults: make sim SEEDS=2000
#   make check   ruff, mypy --strict, import arrows, file sizes, wheel contents
#   make bench   measure planning, assembly, batcher and transport (nothing timed is a test)

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test check sim bench clean

help:
	@sed -n '2,6s/^# //p' Makefile

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("rlbuffer needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)

# torch is the large one: about 200 MB as a CPU build, several GB with CUDA.
$(VENV)/.train: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing rlbuffer[train] into $(VENV) (torch and transformers: minutes the first time)"
	$(PIP) --editable '.[train]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing rlbuffer[dev] into $(VENV) (torch and transformers: minutes the first time)"
	$(PIP) --editable '.[dev]'
	@touch $@ $(VENV)/.train

demo: $(VENV)/.train
	$(BIN)/rlbuffer demo $(DEMO)

test: $(VENV)/.dev
	$(BIN)/python -m pytest $(TEST)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/packaging

sim: $(VENV)/.dev
	$(BIN)/python -m simulation --seeds $(or $(SEEDS),500) $(SIM)

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks $(BENCH)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis dist build
