# Targets: install train rlhf test test-all test-more test-thorough test-oldest test-numeric chaos lint bench docs docs-full docs-site reference clean. Settings on the command line:
#   PYTHON=python3.11        the interpreter that makes the environment (3.11 is the tested one)
#   DEVICE=cpu|gpu           which builds to install; by default detected with nvidia-smi
#   TORCH_INDEX=<url>        an index with the CPU build of torch, such as PyTorch's own
#   ARGS="..."               passed to `asyncrlhf train`, pytest or `asyncrlhf bench`
#   RUNTIME=ray|local SEEDS=0-199 SIMULATED=0-1999   of chaos: real runs, and simulated schedules of faults before them
#   TURN=all|0..7            which of the costly files test-all runs; default: one in eight, by the commit
#   SETTINGS="default avx2"  the settings of test-numeric to run; default: all of tests/numeric_settings.py
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
# Some images disable byte code. Every Ray actor would then compile its imports again: eight seconds of its start on one core.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
VENV ?= .venv
DEVICE ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)
TORCH_INDEX ?=
ARGS ?=
SETTINGS ?=
RUNTIME ?= ray
SEEDS ?= 0-199
SIMULATED ?= 0-1999
TURN ?= $(shell echo $$(( 0x$$(git rev-parse --short=8 HEAD 2>/dev/null || echo 0) % 8 )))
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-$(DEVICE)
# --no-compile: byte code is written when a module is first used, not for the tens of thousands that never are.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --no-input
# A lock needs no resolver: uv installs it in a tenth of pip's time. If uv fails (an index or a proxy known only to pip's
# settings), pip does it; see requirements/locked.sh.
UV := $(BIN)/uv pip install --quiet --python $(BIN)/python
# In three processes, also on two cores: one of them runs all tests that share Ray (tests/conftest.py), which wait a lot.
# In the order of their names, so that the short files of tests/unit come last and fill the processes evenly.
PARALLEL := --timeout=300 --numprocesses=3 --dist=loadfile --no-loadscope-reorder
PACKAGES := asyncrlhf tests experiments
TYPED := asyncrlhf/algorithms asyncrlhf/buffer asyncrlhf/types.py asyncrlhf/errors.py asyncrlhf/validation.py

# With a card `make train` runs on it (1.7 times the tokens/s of the same machine's CPUs on an H200), unless ARGS places the run.
CARD := $(if $(filter gpu,$(DEVICE)),$(if $(strip $(foreach word,cluster runtime= gpus=,$(findstring $(word),$(ARGS)))),,cluster=one_gpu))

.PHONY: help install train rlhf test test-all test-more test-thorough test-oldest test-numeric chaos lint format bench docs docs-full docs-site reference clean

help:
	@sed -n '1,8p' Makefile | sed 's/^# //'

install: $(STAMP)

$(STAMP): pyproject.toml $(wildcard requirements/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "asyncrlhf needs Python 3.11 or newer; give one by PYTHON=...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing the $(DEVICE) builds into $(VENV). The first time takes some minutes."
	@PIP="$(PIP)" UV="$(UV)" TORCH_INDEX="$(TORCH_INDEX)" bash requirements/install-$(DEVICE).sh
	@$(PIP) --no-deps --no-build-isolation --editable .
	@PIP="$(PIP)" UV="$(UV)" bash requirements/locked.sh --upgrade --target $(VENV)/references -r requirements/references.txt \
		|| echo "Without verl, torchrl and OpenRLHF, which only tests/references compares with: those tests will skip."
	@PIP="$(PIP)" UV="$(UV)" bash requirements/locked.sh --upgrade --target $(VENV)/environments -r requirements/environments.txt \
		|| echo "Without openenv, of which tests start servers: those tests will skip."
	@rm -f $(VENV)/.installed-* && touch $@
	@echo "Installed. Next: make train; or source $(BIN)/activate, and the command is asyncrlhf"

train: install
	$(BIN)/asyncrlhf train $(CARD) $(ARGS)

# SFT, preferences by a gold reward, a reward model, RL and evaluation with the tiny model: some minutes.
rlhf: install
	$(BIN)/python experiments/04_gold_rlhf/study.py chain $(ARGS)

# Every capability once.
test: install
	$(BIN)/python -m pytest $(PARALLEL) -m "not more and not thorough" $(ARGS)

# What CI runs: both, in one session, for each begins with half a minute of imports and makes its own fixtures. Of the
# costly files (the marker in_turn) one in eight, by the commit.
test-all: install
	@echo "Of the costly files those of turn $(TURN); TURN=all runs all."
	TEST_TURN=$(TURN) $(BIN)/python -m pytest $(PARALLEL) -m "not thorough" $(ARGS)

# The rest of each: further models, settings, seeds and moments. With ARGS there may be none of them (pytest's code 5).
test-more: install
	$(BIN)/python -m pytest $(PARALLEL) -m "more and not thorough" $(ARGS) || test $$? = 5

test-thorough: install
	$(BIN)/python -m pytest $(PARALLEL) -m thorough $(ARGS) || test $$? = 5

# What `make test` runs of the package, with the lowest versions that pyproject.toml allows, in an environment of their own.
# vLLM is not in it: it names one version of torch itself.
OLDEST := .venv-oldest
$(OLDEST)/.installed: pyproject.toml
	@rm -rf $(OLDEST) && $(PYTHON) -m venv $(OLDEST)
	@$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check uv==0.13.9
	@echo "Installing the lowest versions into $(OLDEST): some 6 GB, for PyPI has older versions of torch as CUDA builds only."
	@$(OLDEST)/bin/uv pip install --quiet --python $(OLDEST)/bin/python --resolution lowest-direct --editable ".[dev,deepspeed,gguf,mlflow]"
	@touch $@

test-oldest: $(OLDEST)/.installed
	$(OLDEST)/bin/python -m pytest $(PARALLEL) -m "not more and not thorough" tests/unit tests/contract tests/integration $(ARGS)

# The comparisons of floating-point numbers, on five kinds of CPU that this one can emulate.
test-numeric: install
	$(BIN)/python tests/numeric_settings.py "$(SETTINGS)" $(PARALLEL) --maxprocesses=2 $(ARGS)

# Faults of every kind for every kind of part, one run per seed; rows in experiments/24_chaos, which a second call continues.
chaos: install
	$(BIN)/python -m tests.chaos.run --runtime $(RUNTIME) --seeds "$(SEEDS)" --simulated "$(SIMULATED)" $(ARGS)

lint: install
	$(BIN)/ruff check $(PACKAGES)
	$(BIN)/ruff format --check $(PACKAGES)
	$(BIN)/mypy --strict $(TYPED)
	$(BIN)/mypy asyncrlhf

format: install
	$(BIN)/ruff check --fix $(PACKAGES)
	$(BIN)/ruff format $(PACKAGES)

bench: install
	$(BIN)/asyncrlhf bench $(or $(ARGS),overlap)

docs: install
	$(BIN)/python -m pytest tests/test_docs.py tests/test_reference.py tests/test_commands.py -m "not thorough"

# Every command of README and docs that this machine can run, shortened if it would take long: some ten minutes.
docs-full: install
	$(BIN)/python -m pytest tests/test_commands.py $(ARGS)

docs-site: install
	$(PIP) "mkdocs-material>=9.6"
	$(BIN)/mkdocs build --site-dir site

# The pages generated from the code: settings, metrics, and the families of models, which takes a minute.
reference: install
	$(BIN)/python -m asyncrlhf.cli.reference docs/reference
	$(BIN)/python -m asyncrlhf.doctor.models_page docs/models.md

clean:
	rm -rf $(VENV) $(OLDEST) build dist .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
