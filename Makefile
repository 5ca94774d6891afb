# `make rollouts` runs the main job, `make test` the tests; both set everything up first, on a fresh machine too.
SHELL := /bin/bash
PY := .venv/bin/python
SANDBOX ?= local
# Tests start hundreds of Python processes; without bytecode each of them compiles this project anew.
unexport PYTHONDONTWRITEBYTECODE
# How many test processes run in parallel. Tests spend a third of their time waiting.
JOBS ?= $(shell n=$$(nproc); echo $$((n < 6 ? n + 3 : 8)))

# With -j, two targets that install packages would run at once.
.NOTPARALLEL:
.PHONY: docs help setup system test-system engine clis trainers rollouts test test-fast test-full lint format clean

help:            ## this list
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

setup:           ## the virtual environment with every package
	@scripts/setup

system: setup    ## bubblewrap, Docker Engine and what else comes from the distribution
	@scripts/install-system

engine: system   ## a private Docker Engine, unless one answers already
	@scripts/dockerd start

clis: setup      ## the agent CLIs that the tests drive, in their pinned versions (CLIS="codex qwen-code")
	@scripts/install-clis $(CLIS)

trainers: setup  ## the separate environments of verl, TRL and Ray, which test-full needs
	@scripts/install-trainers

rollouts: system ## five tasks × two samples with mini-swe-agent, graded, as a table (MODEL_URL= MODEL_NAME= SANDBOX= OUTPUT= ARGS=)
	@SANDBOX=$(SANDBOX) scripts/rollouts $(ARGS)

lint: setup      ## ruff, mypy and the direction of imports
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy
	@.venv/bin/lint-imports --no-cache >.venv/imports.log || { cat .venv/imports.log; exit 1; }

test-fast: setup ## the tests that need no box, no engine, no stack and no agent CLI
	@$(PY) -m pytest -q --fast -n $(JOBS) $(ARGS)

test: CLIS ?= claude-code codex
test-system: setup
	@scripts/install-system --with-tests

test: test-system engine clis lint ## lint, types and the test suite, with real bubblewrap and a real Docker Engine
	-@scripts/install-apptainer
	@scripts/with-engine $(PY) -m pytest -q -m "not full" -n $(JOBS) $(ARGS)

test-full: test-system engine clis trainers lint ## also real engines and trainers, the slow tests, campaigns, benches; continues where it stopped (ARGS=tests|faults|benches AGAIN=1)
	-@scripts/install-apptainer
	@scripts/install-engines
	@scripts/with-engine scripts/test-full $(ARGS)

docs: setup      ## the documentation as static pages, in fern/site; broken links, components and code blocks fail
	@$(PY) -m nemo_gym.view.docs

format: setup    ## rewrite the code in the project's format
	@.venv/bin/ruff check --fix .
	@.venv/bin/ruff format .

clean:           ## stop the private engine and remove the virtual environment
	-@scripts/dockerd stop
	rm -rf .venv
