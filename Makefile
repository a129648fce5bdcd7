# make run     set everything up and serve the embedded default on 127.0.0.1:9292
# make test    set everything up and run all tests
# make check   format, lint, types
# make bench   measure every claim of the README (docs/measurements.md)
# make format  let ruff write the format that `make check` wants

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt

.PHONY: run test check bench format clean
run: $(VENV)/.demo
	$(BIN)/llama-lease serve --config config.yaml

test: $(VENV)/.dev
	scripts/system-packages sox promtool prometheus chromium nginx wrk
	$(BIN)/python -m pytest $(PYTEST)

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(VENV)/.bench
	scripts/system-packages nginx wrk
	$(BIN)/python -m bench.run $(BENCH)

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit("llama-lease needs Python 3.11 or newer") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)

# llama-cpp-python is compiled the first time, which takes some minutes.
$(VENV)/.demo: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "Installing what serving needs; the first time this compiles llama.cpp for some minutes."
	$(PIP) --editable '.[demo]'
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(PIP) --editable '.[dev]'
	@touch $@

$(VENV)/.bench: $(VENV)/.dev
	$(PIP) --editable '.[bench]'
	@touch $@
