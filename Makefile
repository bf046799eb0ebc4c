# Runs every task of the project; each target does its own set-up. `make help` lists them.

# An active environment that has torch is used unchanged; otherwise make creates .venv.
ACTIVE := $(shell test -n "$$VIRTUAL_ENV" && "$$VIRTUAL_ENV/bin/python" -c "import torch" 2>/dev/null && echo "$$VIRTUAL_ENV")
ENV := $(or $(ACTIVE),.venv)
PYTHON := $(ENV)/bin/python
RANKS ?= 2
# pip installs this version's CPU build if the index offers one. Select another version: make TORCH=torch==2.14.1 ...
TORCH ?= torch==2.13.0
ifneq ($(words $(ENV)),1)
$(error make cannot work with an environment whose path has spaces: "$(ENV)". Deactivate it; one is then made in .venv)
endif
# Stamps are kept per checkout and torch, because several checkouts may share an active environment.
STAMPS := $(ENV)/.drivetrain/$(shell pwd | cksum | cut -d' ' -f1)-$(TORCH)
SOURCES := CMakeLists.txt pyproject.toml $(shell find csrc -type f -not -name '*.pyc')
NVCC := $(shell command -v nvcc 2> /dev/null)
BUILD_TOOLS := "scikit-build-core>=0.10" "pybind11>=3.0" "cmake>=3.25" ninja $(BUILD_EXTRAS)

# The suite runs in three processes, one file at a time, because many tests wait or use one thread. ARGS="..." runs in one.
IN_THREE := --numprocesses 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 -m "not sanitizer"

.PHONY: help train test test-native test-fake-cuda launches fake-cuda-defects faults doctor-faults cluster strangers crashes compare time-to-quality accuracy
.PHONY: test-aarch64 bench gpu-check gpu-wheels gpu-table
.PHONY: check-kernels doctor docs notebooks picture wheel test-matrix release-check format lint sanitize clean
.DEFAULT_GOAL := help

help: ## show this list; times are for two cores and begin after the build, which takes two to three minutes
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

train: $(STAMPS)/built ## train a byte-level GPT on Python's own source text, on RANKS=2 ranks (2.5 minutes)
	$(ENV)/bin/torchrun --nproc-per-node $(RANKS) examples/gpt/train.py $(ARGS)

compare: $(STAMPS)/test-tools ## train the GPT, then four other tasks, with torch's classes and with ours; print tables (12 minutes)
	$(PYTHON) benchmarks/gpt/compare.py $(ARGS)
	$(PYTHON) benchmarks/tasks/compare_tasks.py

time-to-quality: $(STAMPS)/test-tools ## train a GPT and a ResNet to a set quality with both engines, five seeds each (15 minutes)
	$(PYTHON) benchmarks/tasks/time_to_quality.py $(ARGS)

accuracy: $(STAMPS)/built ## compare the validation loss of each optimizer storage format with torch's fp32 AdamW (an hour)
	$(PYTHON) benchmarks/gpt/accuracy.py $(ARGS)

check-kernels: $(STAMPS)/built-with-kernels $(STAMPS)/kernel-tools ## check limits on the machine code of the CUDA kernels; needs nvcc, no GPU (half a minute)
	$(PYTHON) tests/kernel_gates.py $(ARGS)

# Spinning OpenMP threads would take cores from the other process and its ranks and double the time of the tests.
test: export OMP_WAIT_POLICY ?= passive
# Compiled modules are kept, even where the environment says otherwise. Hundreds of processes import the package, and
# each test process would rewrite the assertions of all files.
test: export PYTHONDONTWRITEBYTECODE :=
test: $(if $(NVCC),$(STAMPS)/built-with-kernels $(STAMPS)/kernel-tools) $(STAMPS)/test-tools ## run the test suite (15 minutes; WHOLE=1: all random rounds, 20 minutes)
	$(PYTHON) -m pytest $(or $(ARGS),$(IN_THREE))

# Two files compile native tests once per sanitizer, which takes as long as a fifth of the suite.
test-native: export OMP_WAIT_POLICY ?= passive
test-native: $(STAMPS)/test-tools ## run the native tests under the sanitizers; run it after a change of csrc/ (4 minutes)
	$(PYTHON) -m pytest -m sanitizer --numprocesses 2 tests/package/test_native.py tests/ddp/test_nccl.py $(ARGS)

# This target makes its own environment, because torch's CUDA build replaces the CPU build. An active environment with
# torch 2.11.0 for CUDA is used instead.
test-fake-cuda: ## run the GPU tests on a stand-in for CUDA, without a GPU (an hour per seed; PART=ci SEEDS=1: 10 minutes)
	PART="$(PART)" SEEDS="$(SEEDS)" tests/fake_cuda/run.sh "$(or $(VIRTUAL_ENV:%=%/bin/python),python3)" $(ARGS)

test-aarch64: $(STAMPS)/test-tools ## build for aarch64 and run a part of the suite under qemu; needs Debian packages, which it names (an hour)
	PYTHONPATH=tests $(PYTHON) -m aarch64 --torch "$(TORCH)" $(ARGS)

launches: ## print what each row of the GPU benchmarks launches on the stand-in, and compare it with launches.md (2 minutes)
	tests/fake_cuda/run.sh "$(or $(VIRTUAL_ENV:%=%/bin/python),python3)" --python tests/fake_cuda/launches.py $(ARGS)

fake-cuda-defects: ## reintroduce known defects one at a time, and check that the stand-in shows each (ARGS="4 7a": some; 5 minutes each)
	python3 tests/fake_cuda/put_back.py "$(or $(VIRTUAL_ENV:%=%/bin/python),python3)" $(ARGS)

faults: $(STAMPS)/built ## run 100 rounds of every fault: ranks that die, stop, skip a step, bring another model (an hour)
	PYTHONPATH=tests $(PYTHON) -m faults $(ARGS)

doctor-faults: $(STAMPS)/built ## inject 18 faults that the doctor must name, examine 32 simulated hosts, and 50 healthy runs (8 minutes)
	PYTHONPATH=tests $(PYTHON) -m doctor_faults $(ARGS)

cluster: $(STAMPS)/test-tools ## train over torchrun, SLURM and Ray on this machine (5 minutes; SLURM needs its Debian packages and root)
	$(PYTHON) -m pip install --quiet --constraint $(STAMPS)/constraints.txt "drivetrain[cluster]"
	DRIVETRAIN_CLUSTER=1 $(PYTHON) -m pytest tests/cluster $(ARGS)

# SUITES names a folder of your own, each of whose subfolders holds the tests of one project.
strangers: $(STAMPS)/test-tools ## run other projects' suites with torch's classes and with ours (an hour; ARGS="timm skorch"; SUITES=folder)
	PYTHONPATH=tests $(PYTHON) -m strangers $(if $(SUITES),--folder "$(SUITES)") $(ARGS)

crashes: $(STAMPS)/test-tools ## kill saves, cut the power, flip bits, write between steps, 1,000 rounds of each; 200 signals; 100 resumed loops, 100 moves to other ranks (an hour)
	PYTHONPATH=tests $(PYTHON) -m checkpoint_crashes $(ARGS)

bench: $(STAMPS)/built ## print the tables of optimizers, DDP and all-reduce (half an hour; ARGS=optim: one table)
	$(PYTHON) -m drivetrain bench $(ARGS)

# gpu-check uses the first of these that has torch. It needs no network: missing packages come from the wheels of
# `make gpu-wheels`, and everything is installed into build/.
GPU_PYTHON ?= $(VIRTUAL_ENV:%=%/bin/python) python3 .venv/bin/python
gpu-check: ## build, test and measure on a machine with an NVIDIA GPU (10 minutes; PART="gates train ranks ... long": some parts)
	@for python in $(GPU_PYTHON); do "$$python" -c "import torch" 2> /dev/null || continue; \
	  PYTHONPATH=benchmarks exec "$$python" -m gpu_check $(PART:%=--part %) $(ARGS); done; \
	  echo "gpu-check finds no torch in $(GPU_PYTHON); GPU_PYTHON=... names a Python that has it" >&2; exit 1

gpu-wheels: $(ENV)/bin/python ## download into .wheels what gpu-check may miss on a machine without a network (a minute)
	PYTHONPATH=benchmarks $(PYTHON) -m gpu_check.tools --wheels .wheels

gpu-table: $(ENV)/bin/python ## write the GPU figures of docs/benchmarks.md from the newest of benchmarks/results (a second)
	PYTHONPATH=benchmarks $(PYTHON) -m gpu_check.page

# The variable silences an advertisement that the theme prints.
docs: $(STAMPS)/docs-tools ## build the documentation into site/; warnings are errors, and the built pages are checked (half a minute)
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --quiet --strict
	$(PYTHON) tools/check_site.py

notebooks: $(STAMPS)/test-tools ## run the notebooks and keep their outputs in them (5 minutes; ARGS=notebooks/...: some)
	$(PYTHON) tools/run_notebooks.py $(ARGS)

picture: $(STAMPS)/test-tools ## draw the chart of README.md from benchmarks/results (a few seconds)
	$(PYTHON) benchmarks/picture.py $(ARGS)

wheel: $(STAMPS)/build-tools ## write a wheel for torch 2.11 to 2.14 and an sdist to dist/, and run README's commands on them (15 minutes)
	tests/wheel.sh $(PYTHON) $(ARGS)

test-matrix: ## install the wheel for the oldest and newest Python and torch, run a part of the suite in each (4 minutes of tests per pair, after the wheel; ARGS="--python 3.12")
	python3 tests/matrix.py $(ARGS)

release-check: $(ENV)/bin/python ## say what an upload of dist/ to the package index needs and lacks (a few seconds)
	$(PYTHON) -m pip install --quiet packaging twine
	$(PYTHON) tools/release.py $(ARGS)

doctor: $(STAMPS)/built ## check this environment (a few seconds)
	$(PYTHON) -m drivetrain doctor $(ARGS)

format: $(STAMPS)/dev-tools ## rewrite sources in the project's format (a few seconds)
	$(ENV)/bin/ruff format python tests examples benchmarks notebooks tools
	$(ENV)/bin/ruff check --fix python tests examples benchmarks notebooks tools
	git ls-files '*.h' '*.cpp' '*.cu' '*.cuh' | xargs $(ENV)/bin/clang-format -i

lint: $(STAMPS)/built $(STAMPS)/test-tools $(STAMPS)/dev-tools ## check format, types, language, and the sizes of files and classes, as CI does (a minute)
	$(ENV)/bin/ruff format --check python tests examples benchmarks notebooks tools
	$(ENV)/bin/ruff check python tests examples benchmarks notebooks tools
	git ls-files '*.h' '*.cpp' '*.cu' '*.cuh' | xargs $(ENV)/bin/clang-format --dry-run --Werror
	$(PYTHON) -m mypy
	$(PYTHON) tools/sizes.py
	$(PYTHON) tools/language.py
	$(ENV)/bin/check-jsonschema --builtin-schema vendor.compose-spec examples/monitoring/docker-compose.yml
	$(ENV)/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/ci.yml

sanitize: $(STAMPS)/built $(STAMPS)/test-tools ## run the native tests, and many of the package's, under the sanitizers (half an hour)
	tests/sanitize.sh $(ENV)/bin/python

clean: ## remove builds and the environment made here (a second)
	rm -rf build dist site .venv .venv-fake-cuda

$(ENV)/bin/python:
	python3 -c "import sys; sys.exit(sys.version_info < (3, 10))" || { echo "drivetrain needs Python 3.10 or newer; python3 is $$(python3 --version)." >&2; exit 1; }
	python3 -m venv .venv || { rm -rf .venv; echo "python3 -m venv failed: install your system's venv package (Debian: apt install python3-venv)." >&2; exit 1; }

# torch is installed first and pinned, so that later installs keep this build.
$(STAMPS)/torch: | $(ENV)/bin/python
	mkdir -p $(STAMPS)
	$(if $(ACTIVE),$(PYTHON) -m pip --version > /dev/null || $(PYTHON) -m ensurepip,$(PYTHON) -m pip install --quiet "$(TORCH)" numpy)
	touch $@

$(STAMPS)/build-tools: $(STAMPS)/torch
	$(PYTHON) -m pip install --quiet $(BUILD_TOOLS) "rich>=13"
	touch $@

# The install is editable: a change of Python needs no build, and a change of csrc/ rebuilds only what depends on it.
BUILD := $(PYTHON) tools/build.py
$(STAMPS)/built: $(SOURCES) $(STAMPS)/build-tools
	$(BUILD) $(if $(wildcard $(STAMPS)/built-with-kernels),$(KERNELS))
	touch $@

# This build has CUDA kernels even if torch has no CUDA: tests check their machine code and run NCCL's transport on fakes.
# Without a GPU it has them for sm_90 alone, whose machine code the tests read. Wheels have them for every architecture.
KERNELS := --config-settings=cmake.define.DRIVETRAIN_CUDA=on \
  --config-settings=cmake.define.DRIVETRAIN_CUDA_ARCHITECTURES=$(if $(shell command -v nvidia-smi 2> /dev/null),auto,90-real)
$(STAMPS)/built-with-kernels: $(SOURCES) $(STAMPS)/build-tools
	$(BUILD) $(KERNELS)
	touch $(STAMPS)/built $@

# This installs the extras of pyproject.toml. The constraint keeps the installed torch, which the frameworks' requirements
# could otherwise replace.
$(STAMPS)/test-tools: pyproject.toml $(STAMPS)/built
	$(PYTHON) -c "from importlib.metadata import version; print('torch==' + version('torch'))" > $(STAMPS)/constraints.txt
	$(PYTHON) -m pip install --quiet --constraint $(STAMPS)/constraints.txt "drivetrain[test,frameworks,trackers]"
	touch $@

# This installs the disassembler.
$(STAMPS)/kernel-tools: $(STAMPS)/torch
	$(PYTHON) -m pip install --quiet nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm
	touch $@

$(STAMPS)/docs-tools: pyproject.toml $(STAMPS)/built
	$(PYTHON) -m pip install --quiet "drivetrain[docs]"
	touch $@

$(STAMPS)/dev-tools: pyproject.toml $(STAMPS)/built
	$(PYTHON) -m pip install --quiet "drivetrain[dev]"
	touch $@
