# Two commands for a fresh machine with Python 3.11+ and make:  make sweep  |  make test
# .venv is built from constraints.txt (versions only); a stamp per extra set makes the second call immediate.
# With CI set, `make test` installs the outside oracles too, and no test may skip for want of one.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PY     := $(BIN)/python
PINS   := pyproject.toml constraints.txt

# Any arguments of `pip install` that give torch 2.13 or newer for the CPU: make oracles TORCH='...'
TORCH   ?= torch==2.13.0
TORCHAO := torchao>=0.18,<0.19
MMAEMU  := mmaemu>=0.1,<0.2

.DELETE_ON_ERROR:
.PHONY: help sweep test oracles lint docs bench gpu exhaustive constraints clean

help:
	@echo "make sweep        create .venv, install qsim, run the default study (table and heatmap)"
	@echo "make lint         ruff, mypy, import-linter alone"
	@echo "make test         create .venv, run every check (ruff, mypy, import-linter, pytest, notebook, docs)"
	@echo "make oracles      add torch, torchao and mmaemu, which some tests compare with and skip without (TORCH='...' to choose)"
	@echo "make bench        run the benchmarks"
	@echo "make gpu          tests, sanitizer and benchmarks on an NVIDIA device (PLACE=played: a dry run without one)"
	@echo "make exhaustive   all 2^32 float32 patterns against independent implementations; resumes"
	@echo "make constraints  resolve the pins anew"
	@echo "make clean        remove .venv and outputs"

$(VENV)/.uv:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "qsim needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Call: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv --clear $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt uv
	@touch $@

$(VENV)/.installed: $(VENV)/.uv $(PINS)
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(PY) --constraint constraints.txt --editable ".[plot]"
	@touch $@

$(VENV)/.installed-test: $(VENV)/.uv $(PINS)
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(PY) --constraint constraints.txt --editable ".[test,docs]"
	@touch $@ $(VENV)/.installed

sweep: $(VENV)/.installed
	$(PY) -m qsim sweep

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# torch by pip: uv resolves it to CUDA builds of several gigabytes. One that is installed it leaves alone.
$(VENV)/.installed-oracle: $(VENV)/.installed-test
	$(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt $(TORCH)
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(PY) --constraint constraints.txt "$(TORCHAO)" "$(MMAEMU)"
	@touch $@

oracles: $(VENV)/.installed-oracle

ifneq ($(CI),)
test: $(VENV)/.installed-oracle
endif

# Files go to a process a core: kernels that a file builds are built once.
test: lint
	$(PY) -m pytest -n auto --dist loadfile
	$(PY) -m sphinx -q -W -b html docs docs/_build/html

docs: $(VENV)/.installed-test
	$(PY) -m sphinx -W -b html docs docs/_build/html

$(VENV)/.installed-bench: $(VENV)/.installed-test
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(PY) --constraint constraints.txt --editable ".[bench]"
	@touch $@

bench: $(VENV)/.installed-bench
	$(PY) -m pytest benchmarks --benchmark-columns=median,iqr,rounds --benchmark-sort=name

# Everything that needs a device, with a driver of CUDA 13; compute-sanitizer comes with the CUDA toolkit.
PLACE     ?= cuda
SANITIZER ?= compute-sanitizer
ON_DEVICE := tests/gpu tests/unit/test_backends.py tests/unit/test_kernel_backend.py tests/unit/test_device_run.py \
             tests/conformance/test_codec_subjects.py \
             $(filter-out tests/unit/test_cuda_sanitized.py,$(wildcard tests/unit/test_cuda_*.py))

$(VENV)/.installed-cuda13: $(VENV)/.installed-test
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(PY) --constraint constraints.txt --editable ".[test,cuda13]"
	@touch $@

.PHONY: device
device: $(VENV)/.installed-test
	@$(PY) -m cuda_kernels.driver
	@command -v $(SANITIZER) > /dev/null || { echo "$(SANITIZER) was not found: it comes with the CUDA toolkit; make gpu SANITIZER=PATH" >&2; exit 1; }

ifeq ($(PLACE),cuda)
gpu: device $(VENV)/.installed-cuda13
	$(PY) -m qsim doctor
	QSIM_PLACE=cuda $(PY) -m pytest -m "" $(ON_DEVICE)
	QSIM_PLACE=cuda $(SANITIZER) --tool memcheck --error-exitcode 1 $(PY) -m tests.sanitized
	QSIM_PLACE=cuda $(SANITIZER) --tool racecheck --error-exitcode 1 $(PY) -m tests.sanitized
	QSIM_PLACE=cuda $(PY) -m benchmarks.gpu --out benchmarks/results
else
gpu: $(VENV)/.installed-test
	QSIM_PLACE=$(PLACE) $(PY) -m pytest -n auto --dist loadfile -m "" $(ON_DEVICE)
	QSIM_PLACE=$(PLACE) $(PY) -m tests.sanitized
	QSIM_PLACE=$(PLACE) $(PY) -m benchmarks.gpu
endif

exhaustive: $(VENV)/.installed-test
	$(PY) -m tests.exhaustive

constraints: $(VENV)/.uv
	$(BIN)/uv pip compile --universal --python-version 3.11 --no-header --no-annotate --upgrade --quiet \
	  --extra plot --extra test --extra docs --extra notebook --extra bench pyproject.toml -o constraints.txt
	@echo uv==$$($(BIN)/uv --version | cut -d' ' -f2) >> constraints.txt

clean:
	rm -rf $(VENV) docs/_build qsim-out
