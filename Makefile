# Everything a fresh machine needs: Python 3.11+, pip and make.
#   make demo    install what the demo needs, run it on the embedded server
#   make test    install the development set, run every test
#   make sim     simulate the protocol under faults: make sim SEEDS=2000
#   make mutations  small defects, one at a time: make mutations MUTATIONS="--count 20 commit"
#   make faults  kill, halt and cut off the processes of real runs: make faults FAULTS="kills --seed 7"
#   make servers  the integration tests on each server: .ci/servers DIR; make servers SERVERS="--more DIR"
#   make check   ruff, mypy --strict, import arrows, wheel contents
#   make vllm-test  samplers and workers with real vLLM on the CPU, in an environment of its own (3.4 GB)
#   make vllm-faults  kill the vLLM engine of a worker forty times, in that environment: make vllm-faults FAULTS="--seed 7"
#   make trl-vllm  twenty steps of TRL's AsyncGRPO behind its door, sampled by real vLLM on the CPU: both environments
#   make adapters-test  verifiers, reasoning-gym, TRL's trainer, OpenAI's and Anthropic's clients, in an environment of its own
#   make doors-test  verl's trainer and TransferQueue on a local Ray, in an environment of its own; with miles: MILES=FOLDER
#   make lock    write deploy/requirements.lock, from which the container image is installed
#   make bench   measure planning, the data path, leader and more (nothing timed is a test)

PYTHON ?= python3
VENV   ?= .venv
VLLM   ?= .venv-vllm
ADAPTERS ?= .venv-adapters
DOORS  ?= .venv-doors
# The sources of radixark/miles at 31f1ca9, which no package index has.
MILES  ?=
# Tests that run at once. Most of the slow ones wait for processes.
JOBS   ?= 4
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test check sim mutations faults servers bench vllm-test vllm-faults trl-vllm adapters-test doors-test lock clean

help:
	@sed -n '2,17s/^# //p' Makefile

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
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(TEST)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/packaging

sim: $(VENV)/.dev
	$(BIN)/python -m simulation --seeds $(or $(SEEDS),500) $(SIM)

mutations: $(VENV)/.dev
	$(BIN)/python -m simulation.mutate $(MUTATIONS)

faults: $(VENV)/.dev
	$(BIN)/python tests/faults $(FAULTS)

servers: $(VENV)/.dev
	$(BIN)/python tests/servers.py $(SERVERS)

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks $(BENCH)

VLLM_ENVIRONMENT = RLBUFFER_VLLM=1 HF_HUB_OFFLINE=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_CI_ENV=1 VLLM_NO_USAGE_STATS=1 \
  TORCH_COMPILE_DISABLE=1 VLLM_LOGGING_LEVEL=ERROR \
  VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=1

vllm-test:
	PYTHON=$(PYTHON) .ci/vllm-env $(VLLM)
	$(VLLM_ENVIRONMENT) \
	  $(VLLM)/bin/python -m pytest -n 2 --dist loadfile -W default -p no:cacheprovider --timeout 900 \
	    tests/real_vllm $(VLLM_TEST)

vllm-faults:
	PYTHON=$(PYTHON) .ci/vllm-env $(VLLM)
	$(VLLM_ENVIRONMENT) PYTHONPATH=tests/support $(VLLM)/bin/python -W default tests/real_vllm/engine_kills.py $(FAULTS)

# Two environments: TRL's has its own transformers, and vLLM pins another.
trl-vllm: $(ADAPTERS)/.installed
	PYTHON=$(PYTHON) .ci/vllm-env $(VLLM)
	$(VLLM_ENVIRONMENT) PYTHONPATH=$(CURDIR)/tests/support:$(CURDIR)/tests/real_vllm \
	  $(ADAPTERS)/bin/python -W default tests/adapters/trl_with_vllm.py $(VLLM)/bin/python $(STEPS)

$(ADAPTERS)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(ADAPTERS)
	$(ADAPTERS)/bin/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt \
	  --editable '.[envs,verifiers,memory,train,gateway]' 'trl>=1.16,<1.17' requests 'openai>=2' 'anthropic>=0.60' psutil \
	  'pytest>=8.2' 'pytest-timeout>=2.3'
	@touch $@

adapters-test: $(ADAPTERS)/.installed
	RLBUFFER_ADAPTERS=1 HF_HUB_OFFLINE=1 \
	  $(ADAPTERS)/bin/python -m pytest -W default -p no:cacheprovider tests/adapters \
	    --ignore tests/adapters/test_verl_door.py \
	    'tests/e2e/test_own_trainers.py::test_a_documented_trainer_learns_with_a_real_worker_and_goes_on_after_a_kill[trl_grpo]' \
	    tests/faults/test_short_fault_runs.py::test_agents_lose_nothing_that_they_heard_when_a_gateway_is_killed_in_each_window \
	    $(ADAPTERS_TEST)

# verl pins CUDA builds: what its trainer imports is named here instead. The last three on the list are miles'.
$(DOORS)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DOORS)
	$(DOORS)/bin/python -m pip install --disable-pip-version-check --quiet --editable '.[memory]' \
	  'torch==2.13.0' 'ray==2.60.*' 'tensordict==0.10.0' 'transformers>=5.5.3,<5.11,!=5.6.0' accelerate aiohttp cachetools \
	  codetiming datasets dill fastapi hydra-core msgspec pandas peft pillow 'prometheus-client>=0.20' psutil pyzmq torchdata uvicorn \
	  'pytest>=8.2' 'pytest-timeout>=2.3' blobfile pybase64 pylatexenc
	$(DOORS)/bin/python -m pip install --disable-pip-version-check --quiet --no-deps 'verl==0.9.1' 'TransferQueue==0.1.11'
	@touch $@

doors-test: $(DOORS)/.installed
	RLBUFFER_ADAPTERS=1 HF_HUB_OFFLINE=1 PYTHONPATH=$(MILES) \
	  $(DOORS)/bin/python -m pytest -W default -p no:cacheprovider \
	    tests/adapters/test_verl_door.py tests/adapters/test_miles_door.py $(DOORS_TEST)

# Resolved as for macOS, where torch needs no CUDA packages; hashes are of the files for every platform. torch itself is
# left out: see deploy/Dockerfile.
lock: $(BIN)/python
	$(PIP) uv
	printf 'hatchling\nuv\n' | MACOSX_DEPLOYMENT_TARGET=14.0 $(BIN)/uv pip compile --quiet pyproject.toml - --extra train --extra weights \
	  --constraint constraints.txt --python-version 3.11 --python-platform macos --generate-hashes \
	  --no-annotate --no-header --no-emit-package torch --upgrade --output-file deploy/requirements.lock

clean:
	rm -rf $(VENV) $(VLLM) $(ADAPTERS) $(DOORS) .pytest_cache .mypy_cache .ruff_cache .hypothesis dist build
