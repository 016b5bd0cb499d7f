# Every target works alone, first, in a fresh clone. `make demo` and `make test` install what they need into .venv once;
# they install again only when pyproject.toml changes. Another interpreter: make test PYTHON=python3.12

PYTHON ?= python3
# Installed before all else: what depends on torch would otherwise fetch the newest build for GPUs. Another build: TORCH=...
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
OUT ?= demo-out
BENCH ?= reconstruct --quick
# Processes that the tests run in, each file in one of them: two for each of two processors, since many tests wait for others.
JOBS ?= 4

# Packages come without bytecode (--no-compile). Where an environment forbids to write it, each process would compile anew
# all that it imports, which is half of the time that tests take that start processes.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test tests bench lint clean

help:
	@echo "make demo    run the main job on a year of real shopping data; the report is $(OUT)/report.html"
	@echo "make test    lint, types, import contracts, sizes and all tests"
	@echo "make tests   the tests alone"
	@echo "make bench   one benchmark case (BENCH='CASE [--quick]')"
	@echo "make lint    everything of 'make test' but the tests"
	@echo "make clean   remove $(VENV), caches and $(OUT)"

# The stamp, not .venv itself, says that the environment is whole: an interrupted run starts over.
$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "thinrow needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1 || echo missing)." \
	       "Install one and run: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv --clear $(VENV) || { rm -rf $(VENV); \
	  echo "'$(PYTHON) -m venv' failed; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@touch $@

$(VENV)/.installed-demo: pyproject.toml | $(VENV)/.made
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check '$(TORCH)'
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --editable '.[demo]'
	@touch $@

# [dev] holds [demo], so this stamp sets that one too.
$(VENV)/.installed-dev: pyproject.toml | $(VENV)/.made
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check '$(TORCH)'
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --editable '.[dev]'
	@touch $(VENV)/.installed-demo $@

demo: $(VENV)/.installed-demo
	$(BIN)/thinrow demo --out $(OUT)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check --quiet
	$(BIN)/ruff format --check --quiet
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/check_sizes.py

# Types are checked beside the tests: alone they would keep one processor for a minute.
test: $(VENV)/.installed-dev
	@$(MAKE) --no-print-directory --jobs=2 lint tests

tests: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

bench: $(VENV)/.installed-dev
	$(BIN)/python -m bench $(BENCH) --json -

clean:
	rm -rf $(VENV) $(OUT) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
