# Start with: make train, make demo, make test. `make help` lists the rest.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
ARGS   ?=
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.DEFAULT_GOAL := help
.PHONY: help train demo docs study results pictures test frozen lint pins resolve mutants bench dashboard clean

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

# A stamp per environment: nothing is installed again until the requirements change.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "polarlm needs Python 3.10 or newer; set PYTHON=…"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "pip>=23"  # the oldest ones that come with Python 3.10 cannot install "-e ."

# uv is several times faster than pip. It does not read pip's settings, so they are passed on: wheels in a folder, other
# indexes, certificates. Where uv finds no solution, pip installs. NO_UV=1: always pip.
UV := $(if $(NO_UV),,$(shell command -v uv 2>/dev/null))
pip_setting = $${PIP_$(1):-$$($(BIN)/python -m pip config get global.$(2) 2>/dev/null)}
define install
	@if [ -n "$(UV)" ]; then \
	  links="$(call pip_setting,FIND_LINKS,find-links)"; index="$(call pip_setting,INDEX_URL,index-url)"; \
	  more="$(call pip_setting,EXTRA_INDEX_URL,extra-index-url)"; cert="$(call pip_setting,CERT,cert)"; \
	  [ -z "$$links" ] || export UV_FIND_LINKS="$$(echo $$links | tr ' ' ',')"; \
	  [ -z "$$index" ] || export UV_DEFAULT_INDEX="$$index"; \
	  [ -z "$$more" ] || export UV_INDEX="$$more" UV_INDEX_STRATEGY=unsafe-best-match; \
	  [ -z "$$cert" ] || export SSL_CERT_FILE="$$cert"; \
	  "$(UV)" pip install --quiet --python $(BIN)/python -c constraints.txt $(1) && exit 0; \
	  echo "uv could not install this; pip does"; \
	fi; \
	$(BIN)/python -m pip install --quiet -c constraints.txt $(1)
endef

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(call install,-e .)
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(call install,-e ".[dev]")
	@touch $@ $(VENV)/.installed

train: $(VENV)/.installed  ## train a small model with the polar block (make train ARGS="block=xsa model=tiny")
	@$(BIN)/python train.py $(if $(findstring block=,$(ARGS)),,block=polar) $(ARGS)

demo: $(VENV)/.installed  ## compare standard, xsa and polar with two seeds: a table here and report.html (five minutes)
	@$(BIN)/python train.py sweep=demo hydra/launcher=local hydra.launcher.threads=1 logger=none $(ARGS)
	@$(BIN)/python -m polarlm compare runs --sweep demo --text --out report.html

# Resumable: the same command skips what is done. About seven hours on two cores; QUICK=1 takes about ten minutes.
study: $(VENV)/.installed  ## carry out the plan in configs/study (make study QUICK=1: a first look)
	@$(BIN)/python -m polarlm study $(if $(QUICK),--quick,all) $(ARGS)

results: $(VENV)/.installed  ## write docs/results.md and its pictures from docs/study/*.json
	@$(BIN)/python -m polarlm study results $(ARGS)

pictures: $(VENV)/.installed-dev  ## draw every picture of the docs again, from the committed rows and code
	@$(BIN)/python -m tools.pictures $(ARGS)

# Small tensors gain nothing from threads: processes with one thread each use the cores better, three of them two cores,
# because a third of the time a test waits for a process that it started. Files go to them in the order of
# tests/conftest.py; xdist's own would keep those of few and long tests for the end.
WORKERS ?= 3
test: $(VENV)/.installed-dev  ## run the whole test suite (make test ARGS="-m 'not slow'")
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

frozen: $(VENV)/.installed-dev  ## losses, gradients, a killed run … are bit-identical to tools/frozen.json (ARGS="--base HEAD~3")
	@OMP_NUM_THREADS=1 $(BIN)/python -m tools.frozen $(ARGS)

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

docs: $(VENV)/.installed-dev  ## build the documentation site into site/ (open site/index.html)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)

bench: $(VENV)/.installed-dev  ## measure speed and memory as ratios within one run
	@$(BIN)/python -m benchmarks.run $(ARGS)

dashboard: $(VENV)/.installed  ## compare all runs in one page: report.html
	@$(BIN)/python -m polarlm compare runs/* --out report.html $(ARGS)

clean:  ## remove caches and built files; runs/ and data/cache/ stay
	rm -rf build dist site *.egg-info .ruff_cache .mypy_cache .hypothesis .import_linter_cache artifacts
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
