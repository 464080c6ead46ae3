# Each target sets up what it needs, from a fresh clone. PYTHON may name another interpreter >= 3.11.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.PHONY: help setup demo test lint bench fuzz deb rpm clean

help:
	@echo "make demo    see it work: workers crash, hang and fail under a private systemd"
	@echo "make test    lint, build both packages and run every tier of tests"
	@echo "make lint    ruff and mypy --strict"
	@echo "make bench   figures, side by side with the native floor"
	@echo "make fuzz    a million hostile inputs to the frame decoder"
	@echo "make deb     the Debian packages, in dist/"
	@echo "make rpm     the RPM package, in dist/"
	@echo "make clean   remove what the above made"

setup: $(VENV)/ready

$(VENV)/ready: pyproject.toml packaging/prepare
	packaging/prepare build
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; say make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[arango,web,dev]'
	touch $@

demo: setup
	packaging/prepare demo
	$(BIN)/nomarrctl demo

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy packaging/manual.py

test: lint
	packaging/prepare test
	packaging/prepare deb
	packaging/prepare rpm
	$(BIN)/python -m tests

bench: setup
	packaging/prepare demo
	$(BIN)/python -m tests.bench

fuzz: setup
	$(BIN)/python -m tests.fuzz_frames 1000000

deb:
	packaging/prepare deb
	packaging/build-deb
	packaging/build-arango

rpm:
	packaging/prepare rpm
	packaging/build-rpm

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
