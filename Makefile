# Set-up happens once and again only when the lock file changes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps
UV := $(BIN)/uv pip install --quiet --no-config --system-certs --no-deps
INDEX = index="$${PIP_INDEX_URL:-$$($(BIN)/python -m pip config get global.index-url 2> /dev/null)}"
COMPILE := --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --upgrade
DOCS := .venv-docs
# Two workers on two cores: linear algebra with threads of its own would only get in their way.
# worksteal: neighbouring tests, which share compiled programs and fixtures, run in one worker.
PYTEST := OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

# Half of the suite's time is XLA's: with its older emitters, in one piece and less optimized, a program
# is compiled in less than half of the time. `make test-all` has programs as users get them.
COMPILING := --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1 --xla_backend_optimization_level=1

# Packages are installed uncompiled, and many tests start processes: what one compiles serves all.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run setup test test-all lint docs lock lock-docs bench clean

run: $(READY)  ## the main job: compare the methods on the embedded digits
	$(BIN)/fedpa compare digits $(ARGS)

setup: $(READY)  ## create .venv from locked versions

$(READY): requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@# The lock file is complete; with --no-deps nothing is resolved, so a later release can't break it.
	@# uv downloads and unpacks in parallel. It does not read pip's settings; where it finds no packages,
	@# pip does.
	sed -n '/^uv==/,/# via/p' requirements.lock > $(VENV)/uv.txt
	$(PIP) --require-hashes -r $(VENV)/uv.txt
	$(INDEX); $(UV) --python $(BIN)/python $${index:+--default-index "$$index"} --require-hashes -r requirements.lock \
		|| $(PIP) --require-hashes -r requirements.lock
	$(PIP) --no-build-isolation --editable .
	touch $(READY)

test: $(READY)  ## the test suite
	XLA_FLAGS="$(COMPILING) $(XLA_FLAGS)" $(PYTEST) -m "not long" $(ARGS)

test-all: $(READY)  ## with the longer versions, and many more examples of every property
	HYPOTHESIS_PROFILE=thorough $(PYTEST) --jaxtyping-packages=fedpa,tests.typecheck.check_all $(ARGS)

lint: $(READY)  ## format, style, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(DOCS)/.ready  ## the manual as a site, in site/; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --quiet

$(DOCS)/.ready: requirements-docs.lock $(READY)
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(INDEX); $(UV) --python $(DOCS)/bin/python $${index:+--default-index "$$index"} --require-hashes -r requirements-docs.lock \
		|| $(DOCS)/bin/python -m pip install --quiet --no-deps --require-hashes -r requirements-docs.lock
	touch $@

bench: $(READY)  ## ours and the peers on the same work, in turns; QUICK=1 for a few minutes
	$(BIN)/python -m benchmarks.run $(if $(QUICK),--quick) $(ARGS)

lock: $(READY)  ## resolve the dependencies again
	$(BIN)/uv pip compile pyproject.toml --extra dev --fork-strategy fewest $(COMPILE) --output-file requirements.lock

lock-docs: $(READY)  ## the same for what builds the manual
	$(BIN)/uv pip compile --group docs --fork-strategy fewest $(COMPILE) \
		--output-file requirements-docs.lock

clean:
	rm -rf $(VENV) $(DOCS) site .pytest_cache .mypy_cache .ruff_cache .hypothesis .bench dist
