# Every target makes .venv first if it is missing or out of date (tools/setup), with the packages that it needs. Variables:
#   PORT MODEL ARGS   what `make serve` serves, where, and further options of the server
#   EXTRAS            optional parts to install, e.g. cuda13; chosen by itself where nvidia-smi works
#   PYTHON            the Python that makes .venv; found by tools/find-python otherwise
#   TESTS JOBS        what `make test` runs (files, folders, options of pytest) and in how many processes
#   REPORT            the folder that `make test-gpu` writes its report into
PORT ?= 8000
MODEL ?= demo
ARGS ?=
TESTS ?=
REPORT ?= benchmarks/results
JOBS ?= auto
PY := .venv/bin/python
PARALLEL := -n $(JOBS) --maxprocesses 4 --dist loadfile --no-loadscope-reorder

export PYTHON EXTRAS
# A server and a run of the tests are many processes: without bytecode each compiles every source anew
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup test-setup cuda-compiler browser serve test test-all test-gpu check format bench readme house plots wheel clean

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20

setup: ## make .venv and install jaxllm into it, to serve models
	@tools/setup

test-setup: ## the same with what tests and checks need besides
	@tools/setup test

cuda-compiler: setup ## install XLA's compiler for NVIDIA GPUs, for tests that compile without a GPU
	@tools/cuda-compiler

browser: setup ## install Chromium and playwright, for tests of the page
	@tools/browser

serve: setup ## serve MODEL on PORT (http://localhost:8000)
	@exec $(PY) -m jaxllm.server --model $(MODEL) --port $(PORT) $(ARGS)

test: test-setup ## run the tests, slow ones left out
	@$(PY) -m pytest $(PARALLEL) --durations 15 --durations-min 5 -m "not slow and not gpu" $(TESTS)

test-all: test-setup ## run every test that this machine can run
	@$(PY) -m pytest $(PARALLEL) --durations 15 --durations-min 5 $(TESTS)

test-gpu: test-setup ## run the tests that need an NVIDIA GPU; write benchmarks/results/gpu-tests-*.json
	@XLA_PYTHON_CLIENT_PREALLOCATE=false JAX_PLATFORMS=cuda $(PY) -m pytest -m gpu -n auto --maxprocesses 14 --dist loadgroup -p tests.gpu_report --gpu-report $(REPORT) $(TESTS)

check: test-setup ## ruff, formatting, types, laws of style, import contracts
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy
	@$(PY) -m tools.laws --check
	@$(PY) -c "from importlinter.cli import lint_imports_command as main; main()" --no-logo

format: test-setup ## put the sources into their standard form
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

readme: test-setup ## write the generated tables of README.md and of docs (answers, figures, modes, sizing) anew
	@$(PY) -m tools.readme_tables

house: test-setup ## count rooms, files, names and imports into docs/house.md
	@$(PY) -m tools.house_counts --write

bench: test-setup ## run the benchmarks that any machine can run and record their results
	@$(PY) -m benchmarks $(or $(ARGS),--all)

plots: setup ## draw docs/plots/ from benchmarks/results/ (needs EXTRAS=bench)
	@$(PY) -m benchmarks.plots

wheel: setup ## build dist/*.whl
	@$(PY) -m pip wheel . --quiet --no-deps --wheel-dir dist

clean: ## remove caches and build outputs; .venv stays
	@rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis .import_linter_cache
