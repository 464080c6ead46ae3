# Each target sets up what it needs, from a fresh clone. PYTHON may name another interpreter >= 3.11.
# Debian's own is first: the packages run with it, and one that pyenv built takes 1.2 to 1.4 times as long.
PYTHON ?= $(shell /usr/bin/python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo /usr/bin/)python3
VENV   := .venv
BIN    := $(VENV)/bin
TREES  := /var/tmp/nomarr-trees

.PHONY: help setup demo test test-deep test-trixie lint bench fuzz deb rpm clean clean-trees

help:
	@echo "make demo         see it work: workers crash, hang and fail under a private systemd"
	@echo "make test         lint, build both packages and run every tier of tests"
	@echo "make test-deep    the exploration of the plan and the tests by Hypothesis, forty times as far"
	@echo "make test-trixie  what depends on the system, inside a booted Debian 13 (as root)"
	@echo "make lint         ruff and mypy --strict"
	@echo "make bench        figures, side by side with the native floor"
	@echo "make fuzz         a million hostile inputs to the frame decoder"
	@echo "make deb          the Debian packages, in dist/"
	@echo "make rpm          the RPM package, in dist/"
	@echo "make clean        remove what the above made here"
	@echo "make clean-trees  remove the Debian systems that the tests boot, in $(TREES)"

setup: $(VENV)/ready

$(VENV)/ready: pyproject.toml
	packaging/prepare setup
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; say make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --use-pep517 --editable '.[arango,postgresql,web,dev]'
	touch $@

demo:
	packaging/prepare demo
	packaging/demo

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy packaging/manual.py

test:
	packaging/prepare test
	$(MAKE) --no-print-directory setup
	$(BIN)/python -m tests

test-deep: setup
	NOMARR_DEPTH=40 $(BIN)/python -m pytest -s tests/unit/test_plan_explored.py
	NOMARR_DEPTH=40 $(BIN)/python -m pytest tests/unit tests/store/test_model.py tests/store/test_jobs_model.py \
	    --deselect tests/unit/test_plan_explored.py
	$(BIN)/python -m tests.fuzz_frames 1000000

test-trixie:
	packaging/prepare test
	$(MAKE) --no-print-directory setup
	$(BIN)/python -m tests.trixie

bench: setup
	packaging/prepare bench
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
	@[ ! -d $(TREES) ] || echo "$(TREES) stays, for every checkout; make clean-trees removes it"

clean-trees:
	rm -rf $(TREES)
