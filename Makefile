# Each verb sets up what it needs, in a virtual environment of its own (.venv). Nothing else on the machine is touched.
#   make demo    two processes hand over a KV cache          make lint    style of the source
#   make test    the tests                                   make types   strict typing of the installed wheel
#   make wheel   build, install elsewhere, pull once         make docs    the documentation, warnings are errors
#   make bench   speed, beside the machine and other libraries   make clean   remove everything made here
#   make test-aarch64   the tests of the kernels on an emulated aarch64
#   make test-acl   the conformance suite on the acl backend, with a fake driver or with TEST_DEVICES=0,1 of this machine
#   make test-acl-asan   the same with the fake and the kernels under the address sanitizer
#   make bench-check    instructions of the hot calls beside the recorded ones
#   make validate-hardware DEVICES=0,1 [PEER=ip:port]        what works on this Ascend machine, and how fast
# PYTHON=... names the interpreter; by default the first on PATH that is new enough.

.PHONY: demo test test-aarch64 test-acl test-acl-asan lint types bench bench-check docs wheel validate-hardware clean
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.10; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && { echo $$p; break; }; done)
KERNELS := $(wildcard llm_datadist/_kernels/*.pyx llm_datadist/_kernels/*.pxd llm_datadist/_kernels/*.h)
SOURCES := $(shell find llm_datadist llm_datadist_v1 backends -name '*.py' -o -name '*.pyi' -o -name '*.md' -o -name py.typed) $(KERNELS)
# One pip at a time, also under make -j.
PIP = flock $(VENV) $(BIN)/python -m pip --disable-pip-version-check --quiet
# Tests import what is installed, never the folder they are started from.
RUN = PYTHONSAFEPATH=1

demo: $(VENV)/built
	$(RUN) $(BIN)/llm-datadist demo

test: $(VENV)/test.extra
	$(RUN) $(BIN)/pytest -q -n auto

test-aarch64: $(VENV)/test.extra
	PYTHON=$(BIN)/python .ci/aarch64

# Real devices are shared by nobody: one worker then, and each process has one of them.
test-acl: $(VENV)/test.extra
	$(RUN) $(if $(TEST_DEVICES),LLM_DATADIST_TEST_DEVICES=$(TEST_DEVICES)) \
		$(BIN)/pytest -q $(if $(TEST_DEVICES),,-n auto) --backend acl tests/conformance

# Non-temporal stores are not seen by the sanitizer, so the plain kernels run.
test-acl-asan: .cache/asan/made
	$(RUN) LD_PRELOAD=$$(gcc -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0 LLM_DATADIST_KERNEL=plain FAKE_ASCEND_SANITIZE=1 \
		.cache/asan/bin/pytest -q -n auto --timeout 600 --backend acl tests/conformance

lint: $(VENV)/lint.extra
	$(BIN)/ruff check
	$(BIN)/ruff format --check

# From an empty folder, against the wheel: from here mypy would miss the mapped package and say success.
types: .cache/types/made
	cd .cache/types/empty && ../bin/mypy --config-file $(CURDIR)/pyproject.toml --cache-dir ../mypy -p llm_datadist -p llm_datadist_v1
	cd .cache/types/empty && ../bin/stubtest --mypy-config-file $(CURDIR)/pyproject.toml --ignore-missing-stub --ignore-disjoint-bases \
		$(patsubst llm_datadist/_kernels/%.pyi,llm_datadist._kernels.%,$(wildcard llm_datadist/_kernels/*.pyi))

# BENCH= for the long form (half an hour), BENCH="--only links" for a part. Other libraries take part where .venv has them.
BENCH ?= --short
bench: $(VENV)/built
	$(BIN)/python benchmarks/bench.py $(BENCH)

bench-check: $(VENV)/built
	$(BIN)/python benchmarks/instructions.py

docs: $(VENV)/docs.extra
	$(BIN)/sphinx-build -q -W --keep-going -b html docs docs/_build

DEVICES ?= 0,1
validate-hardware: $(VENV)/test.extra
	mkdir -p .cache/validate
	$(RUN) $(BIN)/llm-datadist validate --backend acl --devices $(DEVICES) $(if $(PEER),--peer $(PEER)) \
		--json .cache/validate/report.json --junit .cache/validate/report.xml

# From the sdist, for PYTHON, into a fresh environment; then a real pull with nothing of this folder in reach.
wheel: dist/made
	rm -rf .cache/wheel && mkdir -p .cache/wheel/empty
	$(PYTHON) -m venv .cache/wheel
	.cache/wheel/bin/python -m pip --disable-pip-version-check --quiet install dist/*.tar.gz
	cd .cache/wheel/empty && ../bin/python -I $(CURDIR)/tests/packaging/installed.py
	rm -rf .cache/wheel

clean:
	rm -rf $(VENV) .cache build dist docs/_build benchmarks/results *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find llm_datadist llm_datadist_v1 backends tests docs benchmarks -name __pycache__ -prune -exec rm -rf {} +
	rm -f llm_datadist/_kernels/*.so

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "No Python >= 3.10 found. On Debian: apt-get install python3 (or give PYTHON=...)."; exit 1; } >&2
	@$(PYTHON) .ci/needs.py > /dev/null
	$(PYTHON) -m venv $(VENV)

$(VENV)/built: $(BIN)/python setup.py pyproject.toml llm_datadist/_version.py $(KERNELS)
	$(PIP) install -e .
	@touch $@

# The extra's packages only: the package itself is installed already.
$(VENV)/%.extra: $(VENV)/built
	$(PIP) install "llm-datadist[$*]"
	@touch $@

# The wheel is built from the sdist, so what the sdist lacks shows.
dist/made: $(VENV)/test.extra setup.py pyproject.toml MANIFEST.in README.md LICENSE CHANGELOG.md $(SOURCES)
	rm -rf dist && mkdir -p .cache
	$(BIN)/python -m build > .cache/build.log 2>&1 || { cat .cache/build.log; exit 1; }
	@touch $@

# From the sdist, as objects of a build without the sanitizer would be used again.
.cache/asan/made: dist/made
	rm -rf .cache/asan
	$(BIN)/python -m venv .cache/asan
	CFLAGS="-fsanitize=address -fno-omit-frame-pointer" LDFLAGS=-fsanitize=address \
		.cache/asan/bin/python -m pip --disable-pip-version-check --quiet install "$$(echo dist/*.tar.gz)[test]"
	@touch $@

.cache/types/made: dist/made
	rm -rf .cache/types && mkdir -p .cache/types/empty
	$(BIN)/python -m venv .cache/types
	.cache/types/bin/python -m pip --disable-pip-version-check --quiet install "$$(echo dist/*.whl)[lint]"
	@touch $@
