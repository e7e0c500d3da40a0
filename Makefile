# The two commands: make train, make test. `make help` lists the rest.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
ARGS   ?=
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.DEFAULT_GOAL := help
.PHONY: help train study results test lint pins resolve mutants bench dashboard clean

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

# A stamp per environment: nothing is installed again until the requirements change.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "polarlm needs Python 3.10 or newer; set PYTHON=…"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "pip>=23"  # the oldest ones that come with Python 3.10 cannot install "-e ."

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	@touch $@ $(VENV)/.installed

train: $(VENV)/.installed  ## train the default model (make train ARGS="block=polar model=tiny")
	@$(BIN)/python train.py $(ARGS)

# Resumable: the same command skips what is done. About seven hours on two cores; QUICK=1 takes about ten minutes.
study: $(VENV)/.installed  ## carry out the plan in configs/study (make study QUICK=1: a first look)
	@$(BIN)/python -m polarlm study $(if $(QUICK),--quick,all) $(ARGS)

results: $(VENV)/.installed  ## write docs/results.md and its pictures from docs/study/*.json
	@$(BIN)/python -m polarlm study results $(ARGS)

# Small tensors gain nothing from threads: processes with one thread each use the cores better, three of them two cores,
# because a third of the time a test waits for a process that it started. Files go to them in the order of
# tests/conftest.py; xdist's own would keep those of few and long tests for the end.
WORKERS ?= 3
test: $(VENV)/.installed-dev  ## run the whole test suite (make test ARGS="-m 'not slow'")
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

lint: $(VENV)/.installed-dev  ## ruff, mypy, the import direction, the pins
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.pins

pins: $(VENV)/.installed-dev  ## write constraints.txt again (make pins ARGS="--upgrade numpy")
	$(BIN)/python -m tools.pins --write $(ARGS)

resolve: $(VENV)/.installed-dev  ## resolve the pins for every Python and platform from the public index
	$(BIN)/python -m tools.pins --resolve

mutants: $(VENV)/.installed-dev  ## put small bugs into a copy and count how many the tests notice (ARGS="--jobs 2")
	@$(BIN)/python -m tools.mutants.run $(ARGS)

bench: $(VENV)/.installed-dev  ## measure speed and memory as ratios within one run
	@$(BIN)/python -m benchmarks.run $(ARGS)

dashboard: $(VENV)/.installed  ## compare all runs in one page: report.html
	@$(BIN)/python -m polarlm compare runs/* --out report.html $(ARGS)

clean:  ## remove caches and built files; runs/ and data/cache/ stay
	rm -rf build dist *.egg-info .ruff_cache .mypy_cache .hypothesis .import_linter_cache artifacts
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
