# One command from a fresh clone: `make test`, or `make demo`. Everything is installed into .venv and nowhere else.

PYTHON  ?= python3
WORKERS ?= 2
VENV    := .venv
BIN     := $(VENV)/bin
PIP     := $(BIN)/python -m pip --disable-pip-version-check
STAMP   := $(VENV)/.installed

# Matplotlib draws to files. Pyright does not look for newer releases of itself. mkdocs-material prints no advertisement.
export MPLBACKEND := Agg
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1
export NO_MKDOCS_2_WARNING := 1

# The attack libraries and the documentation tools are installed, so tests that need them must not be skipped.
INSIST := LIPFLOW_CLIENTS=1 LIPFLOW_DOCS=1

.DEFAULT_GOAL := help
.PHONY: help venv test lint format demo campaign bench experiments docs clean

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(STAMP)  ## Create .venv and install lipflow with its tools (repeated when the dependencies change)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	    echo "lipflow needs Python 3.10 or later, and $(PYTHON) is older; use make PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/python || { echo "==> creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "==> installing lipflow and its tools into $(VENV) (a minute or two the first time)"
	@$(PIP) install -qq -c constraints.txt -e '.[dev,attack,docs]'
	@$(PIP) install -qq -c constraints.txt --no-deps torchattacks  # it requires torchvision but does not import it
	@touch $@

test: lint  ## Run everything that must pass before a commit: style, types and tests
	@echo "==> pytest"
	@$(INSIST) $(BIN)/pytest -n $(WORKERS)

lint: venv  ## Check style, format and types
	@echo "==> ruff check"
	@$(BIN)/ruff check
	@echo "==> ruff format --check"
	@$(BIN)/ruff format --check
	@echo "==> pyright"
	@$(BIN)/pyright

format: venv  ## Rewrite the code in our format and apply safe fixes
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

demo: venv  ## Train, certify, check and attack a small network, and write a report
	@echo "==> lipflow demo"
	@$(BIN)/lipflow demo

campaign: venv  ## Run the long randomised searches and the mutants (may take hours)
	@echo "==> pytest -m campaign"
	@$(INSIST) $(BIN)/pytest -s -m campaign

bench: venv  ## Run every benchmark, one after another
	@for file in $(filter-out %/literal.py %/timing.py, $(wildcard benchmarks/*.py)); do \
	  echo "==> $$file"; $(BIN)/python "$$file" || exit 1; \
	done

experiments: venv  ## Run the paper's experiments at small scale, resumable (about eight hours on two cores)
	@echo "==> python -m experiments --scale small --jobs 2"
	@$(BIN)/python -m experiments --scale small --jobs 2

docs: venv  ## Build the documentation into site/
	@echo "==> mkdocs build"
	@$(BIN)/mkdocs build --strict --quiet --site-dir site
	@echo "open site/index.html; for the search, serve it: python3 -m http.server --directory site"

clean:  ## Remove caches and build products (keeps .venv, data and runs)
	@rm -rf build dist site .pytest_cache .ruff_cache .hypothesis
	@find src tests experiments benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
