# One command each. An interpreter that has torch is used as it is and nothing is downloaded; where it
# has none, .venv gets a pinned one.

PYTHON ?= python3
TORCH ?= torch==2.13.0

has_torch := $(shell $(PYTHON) -c 'import importlib.util as u; print(u.find_spec("torch") and "yes")')
ifeq ($(has_torch),yes)
PY := $(PYTHON)
clang_format := clang-format
else
PY := .venv/bin/python
clang_format := .venv/bin/clang-format
ready := .venv/ready
frameworks := .venv/frameworks
# Tests of a framework run, or fail; elsewhere they run where it is installed.
export ATTN_EXT_NEEDS_FRAMEWORKS := 1
endif

# Programs in tests/ and benchmarks/ find the package that was built in place.
export PYTHONPATH := $(CURDIR)

sources = $(shell git ls-files -co --exclude-standard 'csrc/*.[ch]' 'csrc/*.cpp' 'csrc/*.cu' \
                  'csrc/*.cuh' 'tests/*.[ch]' 'tests/*.cu')

.PHONY: build profile test test-c test-gpu bench tables lint fmt sanitize sanitize-gpu clean

# In place for this machine alone: machine code for its GPUs, in half the time.
build: export ATTN_EXT_ARCHS ?= native
build: $(ready)  ## compile both libraries in place
	$(PY) setup.py -q build_ext --inplace

profile: build  ## the main job: every form of attention, profiled side by side
	$(PY) -m attn_ext.profile run

test: build test-c $(frameworks)  ## everything that needs no GPU
	$(PY) -m pytest -m 'not gpu'

test-c:  ## the C kernels of every instruction set against the reference
	$(MAKE) -s -C tests/c check

test-gpu: build
	$(PY) -m pytest -m gpu

bench: build  ## writes benchmarks/results
	$(PY) benchmarks/bench_stages.py
	$(PY) benchmarks/bench_attention.py
	$(PY) benchmarks/bench_memory.py
	$(PY) benchmarks/bench_calls.py
	$(PY) -m attn_ext.profile run --out build/profile
	$(PY) benchmarks/readme_tables.py --keep build/profile/summary.json

tables:  ## the README's tables, from benchmarks/results, and STORY.md, from traces of an H200
	$(PY) benchmarks/readme_tables.py
	$(PY) -m attn_ext.profile story --from tests/data/h200/forward --page STORY.md

lint: $(ready)
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy
	$(clang_format) --dry-run -Werror $(sources)

fmt: $(ready)
	$(PY) -m ruff check --fix
	$(PY) -m ruff format
	$(clang_format) -i $(sources)

sanitize:  ## memory and undefined-behaviour checks of the C kernels
	$(MAKE) -s -C tests/c check-asan check-valgrind

# Our kernels alone; without torch's cache of memory, so that every bound is the allocation's own.
sanitize-gpu: build  ## compute-sanitizer over every kernel instance
	for tool in memcheck racecheck initcheck synccheck; do \
	  PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $$tool --kernel-name kns=attn_ \
	    --error-exitcode 1 $(PY) tests/gpu/sweep.py || exit 1; done

clean:
	rm -rf build attn_ext/*.so

.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	.venv/bin/pip install -q -U pip
	.venv/bin/pip install -q $(TORCH) 'setuptools>=77' --group dev
	touch $@

.venv/frameworks: .venv/ready
	.venv/bin/pip install -q $(TORCH) --group frameworks
	touch $@
