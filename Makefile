# One door: demo, test, check, fix, bench. Each sets up what it needs in .venv, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup demo test check fix bench bench-session bench-sync clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed: apt-get install python3 python3-venv (or set PYTHON=...)"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { echo "Python's venv is missing: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/pip install --quiet --constraint constraints.txt --editable . --group dev
	@touch $@

demo: setup
	$(BIN)/cadenza demo

# Unit tests side by side; integration tests one after another, since each has a Ray cluster of its own.
test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 tests/unit
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/integration

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fix: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: bench-session bench-sync

bench-session: setup
	$(BIN)/python -m benchmarks.session

# Needs root, for shaped networks in namespaces of their own. QUICK=1 takes less than 8 minutes.
bench-sync: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.sync

clean:
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache
