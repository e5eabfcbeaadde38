# Everything runs from a virtual environment that the targets make themselves; nothing but Python and make is needed.
PYTHON ?= python3
VENV ?= .venv
# So many run the tests at a time; each loads torch.
PROCESSES ?= 2

BIN := $(VENV)/bin
# Composer has caps of its own, and with them an environment of its own.
COMPOSER := $(VENV)-composer
# What needs it is in a folder or on a page of that name.
ON_COMPOSER := -k composer tests/adapters/composer tests/test_docs.py tests/test_examples.py
COMPOSER_PIP := $(COMPOSER)/bin/python -m pip --disable-pip-version-check install --quiet
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
# Held to every branch; the packages and the programs on top of these modules to 95 %.
TOP := eventbus_engine/__main__.py,eventbus_engine/cli.py
FIGURES := --page docs/performance.md --json docs/performance.json --svg docs/performance.svg

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv demo test lint format bench figures effects docs soak clean

help:  ## this list
	@echo "make <target>, with PYTHON=python3 and VENV=.venv unless you say otherwise"
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(VENV)/dev.stamp  ## make the environment with all that development needs

demo: $(VENV)/demo.stamp  ## train a small CNN on real data and show the order, the traces and the log
	$(BIN)/eventbus-engine demo

test: $(VENV)/dev.stamp $(COMPOSER)/composer.stamp  ## run the tests, then hold their coverage to the bars
	COVERAGE_FILE=.composer-coverage $(COMPOSER)/bin/python -m pytest --cov --cov-report= $(ON_COMPOSER)
	$(BIN)/python -m pytest --numprocesses=$(PROCESSES) --dist=loadscope --cov --cov-report=
	$(BIN)/python -m coverage combine --quiet --append .composer-coverage
	$(BIN)/python -m coverage report --fail-under=100 --include='eventbus_engine/*.py' --omit='$(TOP)'
	$(BIN)/python -m coverage report --fail-under=95 --include='eventbus_engine/*/**,adapters/*,$(TOP)'

lint: $(VENV)/dev.stamp  ## check style, types and the direction of imports
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

format: $(VENV)/dev.stamp  ## put the code into its one style
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(VENV)/bench.stamp  ## measure, beside the peers; prints tables, writes benchmarks.json and benchmarks.svg
	$(BIN)/python tests/benchmarks/run.py --svg benchmarks.svg

figures: $(VENV)/bench.stamp  ## measure what docs/performance.md shows, and write it there; PYTHONS= names more interpreters
	$(BIN)/python tests/benchmarks/run.py dispatch prototypes scale training checkpoints adapters versions $(FIGURES) $(PYTHONS:%=--python %)

effects: $(VENV)/dev.stamp  ## measure what each algorithm does to a training run, and write it into docs/algorithms
	$(BIN)/python tests/benchmarks/run.py effects --page docs/algorithms

docs: $(VENV)/dev.stamp  ## run every snippet of the documentation
	$(BIN)/python -m pytest tests/test_docs.py

soak: $(VENV)/dev.stamp  ## run the long tests, which print what they find
	EVENTBUS_SOAK=1 $(BIN)/python -m pytest -m soak --capture=no

clean:  ## remove the environment, the caches and what the runs wrote
	rm -rf $(VENV) $(COMPOSER) .coverage .coverage.* .composer-coverage* .hypothesis .import_linter_cache .mypy_cache
	rm -rf .pytest_cache .ruff_cache runs
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "eventbus-engine needs Python 3.11 or newer; name one with: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The stamps say what is installed, so that a second run starts at once and an edited pyproject.toml installs again.
$(VENV)/demo.stamp: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) --editable ".[demo]"
	@touch $@

$(VENV)/dev.stamp: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) --editable ".[dev]"
	@touch $@ $(VENV)/demo.stamp

# The second line brings none of what they ask for: Composer an old torch, torchvision one that is built like it.
$(COMPOSER)/composer.stamp: $(BIN)/python pyproject.toml tests/adapters/composer/requirements.txt
	$(PYTHON) -m venv $(COMPOSER)
	$(COMPOSER_PIP) --requirement tests/adapters/composer/requirements.txt --editable .
	$(COMPOSER_PIP) --no-deps mosaicml==0.32.1 torchvision==0.28.0
	@touch $@

# Composer asks for an old torch and for much that its engine does not use.
$(VENV)/bench.stamp: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) --editable ".[bench]"
	$(PIP) --no-deps mosaicml
	@touch $@ $(VENV)/dev.stamp $(VENV)/demo.stamp
