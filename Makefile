# `make demo` and `make test` set up everything they need in .venv; PYTHON=... picks the interpreter.

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
JOBS ?= 2
TESTS ?=
# One thread a worker: the tests' models are small, and two workers share the cores.
THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint bench format plugin-headers clean

help:
	@echo "make demo    export, build and run the model that ships"
	@echo "make test    run the tests (TESTS='tests/test_cli.py -k help' for some of them)"
	@echo "make lint    ruff and mypy"
	@echo "make bench   measure ms per step on the CPU"
	@echo "make format  rewrite the code in the house format"
	@echo "make plugin-headers  fetch TensorRT's headers, to compile the plugins without TensorRT"

setup: $(VENV)/.ready

# Each stamp is newer than what it was made from, so a second run starts at once.
$(VENV)/.ready: $(VENV)/.requirements pyproject.toml
	@$(PIP) install --quiet --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.requirements: requirements-dev.txt requirements-kernels.txt requirements-trt.txt requirements-fp8.txt | $(BIN)/python
	@echo "installing the pinned packages; this takes some minutes the first time"
	@$(PIP) install --quiet -r requirements-dev.txt
	@$(PIP) install --quiet --no-deps -r requirements-kernels.txt -r requirements-trt.txt \
	    -r requirements-fp8.txt
	@touch $@

$(BIN)/python:
	@python=""; \
	for candidate in $(PYTHON) python3 python3.12 python3.11 python3.13 python3.10; do \
	    if "$$candidate" -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 10))' \
	        > /dev/null 2>&1; then python="$$candidate"; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	    echo "Python 3.10 or newer with venv is needed (Debian: apt-get install python3-venv)," \
	        "or name one: make PYTHON=/path/to/python" >&2; exit 3; \
	fi; \
	echo "creating $(VENV) with $$("$$python" --version)"; \
	"$$python" -m venv $(VENV)

demo: $(VENV)/.ready
	$(BIN)/lacache-trt demo

test: $(VENV)/.ready
	OMP_NUM_THREADS=$(THREADS) $(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(TESTS)

# mypy cannot follow the folder mapping of an editable install, so it checks the wheel's content.
lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build
	$(PIP) wheel --quiet --no-deps --no-build-isolation --wheel-dir build/wheel .
	$(PIP) install --quiet --no-deps --target build/typed build/wheel/*.whl
	cd build/typed && ../../$(BIN)/python -m mypy --config-file ../../pyproject.toml \
	    --cache-dir ../../.mypy_cache -p lacache_trt

format: $(VENV)/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# TensorRT's C++ headers come with a package; its own dependencies are not wanted.
plugin-headers: $(BIN)/python
	$(PIP) install --quiet --no-deps --upgrade --target .plugin-headers \
	    "$$(grep '^kernel-lens==' requirements-trt.txt)"
	@echo "headers in .plugin-headers; next: lacache-trt plugins build"

bench: $(VENV)/.ready
	$(BIN)/python benchmarks/cpu_steps.py

clean:
	rm -rf $(VENV) .plugin-headers build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
