# Needs Python 3.10 or newer with venv, a C compiler for the fast kernels, and about 1.5 GB. Everything is installed into .venv.
# Where there is a CUDA toolkit (nvcc), `make test` builds PyCUDA as well, so that the CUDA kernels are tested.

PYTHON    ?= python3
# Pinned, and installed first. On a machine where pip finds only CUDA builds of torch (several GB), name a CPU build's index:
#   make venv PIP_FLAGS='--extra-index-url https://download.pytorch.org/whl/cpu' TORCH='torch==2.13.0+cpu'
TORCH     ?= torch==2.13.0
# Passed to every `pip install`: an index, a folder of wheels, --no-index, ...
PIP_FLAGS ?=
EXTRAS    ?= dev,deepspeed,accelerate,cli,examples
# Passed to pytest: make test PYTEST_FLAGS='-k gaussian'
PYTEST_FLAGS ?=

VENV   := .venv
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.stamp
CUDA_STAMP := $(VENV)/.cuda-stamp
PEERS_STAMP := $(VENV)/.peers-stamp
PEERS  := megatron-core==0.16.1 torchtitan==0.3.0 spmd_types==0.2.3 tyro==1.0.17 docstring_parser==0.18.0 typeguard==4.4.4
INSTALL = $(PY) -m pip install $(PIP_FLAGS)

.DEFAULT_GOAL := help
.PHONY: help venv demo test lint types bench fatbin wheel ci clean

help:  ## lists the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## +' '{printf "  make %-6s %s\n", $$1, $$2}'

venv: $(STAMP)  ## creates .venv with torch, DeepSpeed and ZipCCL in it (once; about 3 minutes)

# DeepSpeed is built from source: DS_BUILD_OPS=0 leaves its C++ and CUDA extensions out. The constraint keeps torch at what
# was installed first. Done again when dependencies or C sources change, because an editable installation compiles only then.
$(STAMP): pyproject.toml setup.py $(wildcard zipccl_core/kernels/native/*.[ch])
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) '$(TORCH)' numpy
	$(PY) -c "import importlib.metadata as m; print('torch==' + m.version('torch'))" > $(VENV)/constraints.txt
	DS_BUILD_OPS=0 $(INSTALL) --constraint $(VENV)/constraints.txt --editable '.[$(EXTRAS)]'
	@touch $@

# PyCUDA is built from source (about 2 minutes) and disassemblers are installed; no GPU is needed, nor its driver.
$(CUDA_STAMP): $(STAMP) tests/fakecuda/install.py tests/fakecuda/build.py
	$(PY) tests/fakecuda/install.py $(PIP_FLAGS) || echo 'going on: tests that need what is missing are skipped'
	@touch $@

# Megatron-core and TorchTitan without their dependencies, most of which the tests do not need; none may replace torch.
$(PEERS_STAMP): $(STAMP)
	$(INSTALL) --no-deps --only-binary :all: $(PEERS) || echo 'going on: tests that need what is missing are skipped'
	@touch $@

demo: $(STAMP)  ## trains small models natively and with ZipCCL, and compares losses and bytes (about 2 minutes)
	$(PY) examples/demo.py

test: $(CUDA_STAMP) $(PEERS_STAMP)  ## runs all tests
	$(PY) -m pytest tests $(PYTEST_FLAGS)

lint: $(STAMP)  ## checks style and format
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(STAMP)  ## checks types
	$(PY) -m mypy

bench: $(STAMP)  ## measures codec, overhead and ratio on this machine
	$(INSTALL) --constraint $(VENV)/constraints.txt --editable '.[bench]'
	$(PY) bench/codec.py
	$(PY) bench/overhead.py
	$(PY) bench/ratio.py tests/data

fatbin: cuda/exponent.fatbin  ## compiles the CUDA kernels ahead, for machines without nvcc (needs nvcc)

cuda/exponent.fatbin: $(wildcard cuda/*.cu cuda/*.cuh) zipccl_core/kernels/compiler.py | $(STAMP)
	$(PY) -m zipccl_core.kernels.compiler $@

wheel: fatbin  ## builds a wheel, with compiled CUDA kernels, into dist
	$(PY) -m pip wheel $(PIP_FLAGS) --no-deps --wheel-dir dist .

ci:  ## what continuous integration runs
	.ci/run

clean:  ## removes .venv and everything that was built
	rm -rf $(VENV) build dist *.egg-info zipccl_core/kernels/*.so cuda/*.fatbin* .mypy_cache .pytest_cache .ruff_cache .hypothesis
