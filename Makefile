# make help lists the targets. TORCH=2.11.0 chooses another torch, in a separate environment.
TORCH ?= 2.15.0
PYTHON ?= $(if $(SYSTEM),python3,$(shell command -v python3.11 || command -v python3))

VENV := .venv$(if $(filter-out 2.15.0,$(TORCH)),-$(TORCH))
BIN := $(VENV)/bin
PY := $(BIN)/python
REQUIREMENTS := .ci/requirements-$(TORCH).txt
export TORCHOPT_EXT_BUILD_DIR := $(CURDIR)/build/torch-$(TORCH)$(if $(filter 0,$(USE_CUDA)),-cpu)
BUILD = $(TORCHOPT_EXT_BUILD_DIR)

SOURCES := CMakeLists.txt setup.py pyproject.toml $(shell find csrc torchopt_ext -type f \
	! -name '*.pyc' ! -name '*.so' ! -name _build_info.py)
CXX_SOURCES = $(shell git ls-files 'csrc/*.cpp' 'csrc/*.h' 'csrc/*.cu' 'csrc/*.cuh' 'tests/cpp/*.cpp' \
	'tests/cpp/*.h' 'tests/python/*.cpp' 'examples/*.cpp' 'benchmarks/cpp/*.cpp')
TIER ?= not slow and not gpu
SMOKED := 2.12.0 2.13.0 2.14.0
DIST ?= dist
JOBS := $(shell nproc)
# Each process of pytest takes about 1 GB. OpenMP threads that spin would take the others' cores.
PYTEST := OMP_WAIT_POLICY=passive $(BIN)/pytest -n $(JOBS) --maxprocesses 8 --dist worksteal \
	--durations 20 --durations-min 10

.PHONY: help install demo test test-python smoke test-all test-cpp test-host-cuda test-sanitize \
	check-aarch64 check-sass test-gpu gpu-report bench bench-muon bench-convergence bench-dtensor-host \
	bench-host-step bench-torchtitan bench-zero bench-mixed-precision bench-trainer bench-cxx \
	docs lint lint-python lint-cxx format wheel sdist clean FORCE
.DEFAULT_GOAL := help

help: ## List the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 24
	@echo "Variables: TORCH=$(TORCH) PYTHON=$(PYTHON) USE_CUDA=0 TORCH_CUDA_ARCH_LIST=..."

# ---- environment and package -------------------------------------------------------------------
# $(call fill,PYTHON,REQUIREMENTS): uv takes a third of pip's time. It does not read pip's
# configuration, for example another index, so pip installs where uv fails.
fill = $(1) -m pip install --quiet uv==0.13.9 && \
	$(1) -m uv pip install --cache-dir build/uv --python $(1) -r $(2) || $(1) -m pip install -r $(2)

$(VENV)/.requirements: $(REQUIREMENTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "torchopt_ext needs Python 3.11 or newer: make PYTHON=/path/to/python3.11"; exit 1; }
	@test -x $(PY) || $(PYTHON) -c 'import ensurepip' 2>/dev/null || \
		{ echo "This Python cannot make virtual environments: apt install python3-venv"; exit 1; }
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(call fill,$(PY),$<)
	@touch $@

.ci/requirements-%.txt:
	@echo "No pinned environment for torch $*; there are:"; ls .ci/requirements-*; exit 1

# Not editable, so that each environment has libraries built for its own torch. Installed again when a
# source changed, or when something else, such as pip install -e, has replaced the package.
INSTALLED := $(wildcard $(VENV)/lib/python3.*/site-packages/torchopt_ext/_build_info.py)
$(VENV)/.installed: $(VENV)/.requirements $(SOURCES) $(if $(INSTALLED),,FORCE)
	$(PY) -m pip install --no-build-isolation --no-deps --force-reinstall .
	@touch $@

install: $(VENV)/.installed ## Make the environment and install the package into it

# ---- running ------------------------------------------------------------------------------------
demo: $(VENV)/.installed ## Train a small model with the Trainer, kill a rank, resume, compare with torch
	$(PY) examples/run_demo.py --out out/demo

bench: $(VENV)/.installed ## Time the step beside torch's
	$(PY) benchmarks/run.py --out out/bench

bench-muon: $(VENV)/.installed ## Time Muon with AdamW beside torch's two optimizers
	$(PY) benchmarks/muon.py --out out/bench-muon
	$(PY) benchmarks/muon_ranks.py --out out/bench-muon-ranks

bench-convergence: $(VENV)/.installed ## Train small models with every way to keep the state; resumes
	$(PY) benchmarks/convergence.py --out out/convergence

bench-mixed-precision: $(VENV)/.installed ## Time FSDPadaptOptimizer beside torch operators
	$(PY) benchmarks/mixed_precision.py --out out/bench-mixed-precision

bench-dtensor-host: $(VENV)/.installed ## Time the step over many small DTensors, on 1 and 2 ranks
	$(PY) benchmarks/dtensor_host.py --out out/bench-dtensor-host

bench-torchtitan: $(VENV)/.installed ## Time the optimizer in torchtitan's Trainer; TORCH=2.11.0: 0.2
	$(PY) benchmarks/torchtitan_step.py --out out/bench-torchtitan-$(TORCH)

bench-host-step: $(VENV)/.installed ## Time the CPU's step of states on the host beside ZeRO-Offload's
	$(PY) benchmarks/host_step.py --out out/bench-host-step

bench-zero: $(VENV)/.installed ## Time ZeroRedundancyOptimizer beside torch's, on 2 and 4 ranks
	$(PY) benchmarks/zero.py --out out/bench-zero

bench-trainer: $(VENV)/.installed ## Time the Trainer beside loops written by hand
	$(PY) benchmarks/trainer.py --out out/bench-trainer

# Builds against the installed package, as its users do.
bench-cxx: $(VENV)/.installed ## Time the step from C++ beside libtorch's AdamW
	$(BIN)/cmake -S benchmarks/cpp -B build/bench-cxx -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
		-DCMAKE_PREFIX_PATH=$$($(PY) -P -c 'import torchopt_ext; print(torchopt_ext.cmake_prefix_path)') >/dev/null
	$(BIN)/cmake --build build/bench-cxx
	mkdir -p out/bench-cxx
	build/bench-cxx/bench_cxx | tee out/bench-cxx/cxx.txt

# ---- checks -------------------------------------------------------------------------------------
test-cpp: $(VENV)/.installed ## Build and run the C++ tests
	$(BIN)/cmake -DBUILD_TESTS=ON $(BUILD) >$(BUILD)/configure.log || { cat $(BUILD)/configure.log; exit 1; }
	$(BIN)/cmake --build $(BUILD) --parallel $(JOBS)
	$(BIN)/ctest --test-dir $(BUILD) --output-on-failure --parallel $(JOBS)

# Runs tests of the CPU with the library of tests/cpp/host_cuda, whose code is the CUDA back end's.
HOST_CUDA := tests/python/ops tests/python/optim tests/python/mixed_precision tests/python/test_golden.py \
	tests/python/containers/test_states_on_host.py
test-host-cuda: test-cpp ## Test the CUDA back end on the host, in place of the CPU's
	export LD_LIBRARY_PATH=$(BUILD)/tests/cpp/host_cuda && \
		$(PY) -P -c 'import torchopt_ext; assert "/host_cuda/" in open("/proc/self/maps").read()' && \
		$(PYTEST) -m "$(TIER)" $(HOST_CUDA)

test: test-cpp test-python ## Run the fast tests, C++ and Python

test-python: $(VENV)/.installed
	$(PYTEST) -m "$(TIER)" $(PYTEST_ARGS)

# Tests the import, containers' checkpoints, and two ranks of FSDP2 and of ZeRO.
smoke: $(VENV)/.installed ## Run a few tests of everything, such as with TORCH=2.12.0
	$(PYTEST) -m "$(TIER)" tests/python/test_packaging.py tests/python/containers/test_checkpoint.py \
		'tests/distributed/test_workers.py::test_all_cases_pass[containers_dcp]' \
		'tests/distributed/test_workers.py::test_all_cases_pass[step_engine]' \
		'tests/distributed/test_workers.py::test_all_cases_pass[zero_training]'

test-sanitize: $(VENV)/.requirements ## Run the C++ tests under AddressSanitizer and UBSan
	$(BIN)/cmake -S . -B build/sanitize -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
		-DPython_EXECUTABLE=$(CURDIR)/$(PY) -DUSE_CUDA=OFF -DBUILD_TESTS=ON -DCMAKE_UNITY_BUILD=ON \
		-DCMAKE_CXX_FLAGS_RELEASE=-Og -DSANITIZE=address,undefined
	$(BIN)/cmake --build build/sanitize --parallel $(JOBS)
	$(BIN)/ctest --test-dir build/sanitize --output-on-failure --parallel $(JOBS)

# For Grace hosts. The compiler is Zig's clang, which brings an Arm sysroot. Its 90 MB from PyPI are
# installed by this target only. Builds objects only, because torch's libraries here are for x86-64.
ZIGLANG := build/ziglang-0.16.0
$(ZIGLANG)/.installed: $(VENV)/.requirements
	$(PY) -m pip install --quiet --no-deps --upgrade --target $(@D) $(subst -,==,$(notdir $(@D)))
	@touch $@

check-aarch64: export ZIGLANG := $(CURDIR)/$(ZIGLANG)/ziglang
check-aarch64: $(ZIGLANG)/.installed ## Compile the operators for 64-bit Arm
	$(BIN)/cmake -S . -B build/aarch64 -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
		-DPython_EXECUTABLE=$(CURDIR)/$(PY) -DUSE_CUDA=OFF -DCMAKE_UNITY_BUILD=ON -DCMAKE_SYSTEM_NAME=Linux \
		-DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_TRY_COMPILE_TARGET_TYPE=STATIC_LIBRARY \
		-DCMAKE_CXX_COMPILER=$(CURDIR)/.ci/aarch64-c++ -DCMAKE_CXX_FLAGS=-Werror >/dev/null
	$(BIN)/cmake --build build/aarch64 --target torchopt_ext_objects kernels_default

# Compiles only what a build in SASS_BUILD for the same architectures has not compiled.
SASS_BUILD ?= build/sass
NVCC := $(or $(CUDACXX),$(CUDA_HOME:%=%/bin/)nvcc)
CUDA_OBJECTS = $(patsubst %,CMakeFiles/torchopt_ext_objects.dir/%.o,$(wildcard csrc/cuda/*.cu))
check-sass: $(VENV)/.requirements ## Check registers, spills and accesses of the compiled CUDA kernels
ifeq ($(shell command -v $(NVCC)),)
	@echo "skipped: there is no $(NVCC)"
else
	$(BIN)/cmake -S . -B $(SASS_BUILD) -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
		-DPython_EXECUTABLE=$(CURDIR)/$(PY) -DUSE_CUDA=ON \
		"-DTORCH_CUDA_ARCH_LIST=8.0 9.0 10.0+PTX" >/dev/null
	$(BIN)/cmake --build $(SASS_BUILD) --parallel $(JOBS) --target $(CUDA_OBJECTS)
	$(PY) .ci/check_sass.py $(SASS_BUILD)
endif

test-all: ## Run everything: lint, sanitizers, each torch version and instruction set, slow tests
	$(MAKE) lint
	$(MAKE) test-sanitize
	ATEN_CPU_CAPABILITY=default $(MAKE) test
	ATEN_CPU_CAPABILITY=avx2 $(MAKE) test
	$(MAKE) test TORCH=2.11.0 TIER="not gpu"
	$(MAKE) test TORCH=2.15.0 TIER="not gpu"
	for torch in $(SMOKED); do $(MAKE) smoke USE_CUDA=0 TORCH=$$torch || exit 1; done

# clang-tidy checks a CPU build, because it does not know nvcc, and it has no omp.h. It reads each
# library's sources as one unity source: torch's headers take most of its time.
lint: lint-python lint-cxx ## Check formatting and types, and run clang-tidy and ruff

lint-python: $(VENV)/.requirements
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

lint-cxx: $(VENV)/.requirements
	$(BIN)/clang-format --dry-run --Werror $(CXX_SOURCES)
	$(BIN)/cmake -S . -B build/lint -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
		-DPython_EXECUTABLE=$(CURDIR)/$(PY) -DUSE_CUDA=OFF -DBUILD_TESTS=ON -DCMAKE_UNITY_BUILD=ON >/dev/null
	find build/lint -name 'unity_*.cxx' | \
		xargs -P $(JOBS) -n 1 $(BIN)/clang-tidy -p build/lint --quiet --extra-arg=-fno-openmp

format: $(VENV)/.requirements ## Format the sources and fix what ruff can
	$(BIN)/ruff check --fix --exit-zero .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_SOURCES)

# ---- on a GPU ---------------------------------------------------------------------------------
# Runs in this Makefile's environment. On a machine that cannot fetch packages, SYSTEM=1 uses PYTHON's
# own environment, which must have torch and pytest, and the machine's cmake, ninja and nvcc.
# -P: this folder's package has no library. The addopts are replaced to do without pytest-timeout.
ifdef SYSTEM
GPU_INSTALLED := build/gpu-site/.installed
GPU_PY := PYTHONPATH=$(CURDIR)/build/gpu-site:$$PYTHONPATH $(PYTHON)
else
GPU_INSTALLED := $(VENV)/.installed
GPU_PY := $(PY)
endif

build/gpu-site/.installed: $(SOURCES)
	mkdir -p $(@D)
	cmake -S . -B build/gpu -G Ninja -DPython_EXECUTABLE="$$(command -v $(PYTHON))" -DUSE_CUDA=ON \
		-DCMAKE_UNITY_BUILD=ON -DCMAKE_INSTALL_PREFIX=$(CURDIR)/$(@D) >build/gpu.log || \
		{ cat build/gpu.log; exit 1; }
	cmake --build build/gpu --target install
	tar -c --exclude='*.so' --exclude=_build_info.py --exclude=torchopt_ext/lib torchopt_ext | tar -x -C $(@D)
	@touch $@

gpu-report: ## Test and time the library on a GPU in nine minutes (ONLY="tests fp32": these sections)
	since=$$(date +%s) && $(MAKE) --no-print-directory $(GPU_INSTALLED) && \
		$(GPU_PY) benchmarks/gpu_report.py --since $$since $(if $(ONLY),--only $(ONLY))

test-gpu: $(GPU_INSTALLED) ## Run the tests that need a GPU; results go to out/gpu
	mkdir -p out/gpu
	$(GPU_PY) -P -m torch.utils.collect_env >out/gpu/environment.txt
	$(GPU_PY) -P -m pytest -o addopts=--import-mode=importlib -m gpu -ra --junitxml=out/gpu/tests.xml tests/gpu

# ---- documentation ----------------------------------------------------------------------------
# Uses a separate environment without torch. The pages are laid out as in the repository.
DOCS_VENV := .venv-docs
$(DOCS_VENV)/.requirements: .ci/requirements-docs.txt
	test -x $(DOCS_VENV)/bin/python || $(PYTHON) -m venv $(DOCS_VENV)
	$(call fill,$(DOCS_VENV)/bin/python,$<)
	@touch $@

docs: $(DOCS_VENV)/.requirements ## Build the documentation's site into build/site; warnings are errors
	rm -rf build/docs build/site && mkdir -p build/docs
	cp --parents *.md LICENSE docs/*.md docs/*.png docs/*.css benchmarks/README.md benchmarks/results/*.txt \
		benchmarks/results/*.png build/docs
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict

# ---- distribution -------------------------------------------------------------------------------
# auditwheel finds the oldest glibc that the wheel runs with, for the wheel's name. The excluded
# libraries come with torch, which loads them before ours.
wheel: $(VENV)/.requirements ## Build a wheel for this torch, Python and CUDA or none, into dist/
	rm -rf $(BUILD)/wheel
	$(PY) -m pip wheel --no-build-isolation --no-deps --wheel-dir $(BUILD)/wheel .
	PATH="$(CURDIR)/$(BIN):$$PATH" $(PY) -m auditwheel repair --wheel-dir $(DIST) \
		--exclude 'libtorch_*.so' --exclude 'libc10*.so' --exclude 'libcudart.so.*' \
		--exclude libgomp.so.1 $(BUILD)/wheel/*.whl

sdist: $(VENV)/.requirements ## Build a source distribution into dist/
	$(PY) -c 'import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])' $(DIST)

clean: ## Remove everything built, except the environments
	rm -rf build dist out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -rf torchopt_ext/_C.*.so torchopt_ext/_build_info.py torchopt_ext/include torchopt_ext/lib torchopt_ext/share
	find torchopt_ext tests examples benchmarks -name __pycache__ -exec rm -rf {} +
