# Each target works from a fresh clone: it makes the environments that it needs, and
# makes them again when pyproject.toml changes.

PYTHON ?= python3
WORKERS ?= 2
PYTEST_ARGS ?=

PIP_INSTALL := -m pip install --quiet --disable-pip-version-check
# Tests of one file share compiled programs, so they stay on one worker.
PYTEST := pytest -n $(WORKERS) --dist loadfile
EVERYDAY := "not gpu and not slow"
CHECKED = $(wildcard te_mixed_jax tests examples benchmarks)

.PHONY: help demo test test-full test-gpu test-matrix test-oldest test-newest lint \
	format bench dist clean
.DELETE_ON_ERROR:

help:  ## List the targets.
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

demo: .venv/.examples  ## Train the small model of examples/train_mixed.py.
	.venv/bin/python examples/train_mixed.py

test: .venv/.test  ## Run the tests, except those marked slow or gpu.
	.venv/bin/$(PYTEST) -m $(EVERYDAY) $(PYTEST_ARGS)

test-full: .venv/.test  ## Run all tests but gpu, 2,000 random rows a property.
	.venv/bin/$(PYTEST) -m "not gpu" --hypothesis-profile=full $(PYTEST_ARGS)

test-gpu: .venv/.gpu  ## Run the GPU tests, with and without XLA's command buffers.
	.venv/bin/pytest -m gpu $(PYTEST_ARGS)
	XLA_FLAGS=--xla_gpu_enable_command_buffer= .venv/bin/pytest -m gpu $(PYTEST_ARGS)

test-matrix: test-oldest test-newest  ## Test the wheel on oldest and newest releases.

lint: .venv/.dev  ## Check format, lint and types.
	.venv/bin/ruff format --check $(CHECKED)
	.venv/bin/ruff check $(CHECKED)
	.venv/bin/pyright

format: .venv/.dev  ## Format, and apply the safe fixes of the linter.
	.venv/bin/ruff format $(CHECKED)
	.venv/bin/ruff check --fix $(CHECKED)

bench: .venv/.examples  ## Run the CPU benchmark.
	.venv/bin/python -m benchmarks.attention --platform cpu

clean:  ## Remove all that these targets made.
	rm -rf .venv .venv-oldest .venv-newest build dist
	rm -rf .pytest_cache .ruff_cache .hypothesis
	find te_mixed_jax tests examples benchmarks -name __pycache__ -prune \
	  -exec rm -rf {} + 2>/dev/null || true

# The environment for work on the package: installed from the working tree.

.venv/.examples: pyproject.toml
	@echo "Setting up .venv"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  f"{sys.executable} is Python {sys.version.split()[0]}: te_mixed_jax needs \
	3.11 or newer. Name one: make PYTHON=...")'
	@test -x .venv/bin/python || $(PYTHON) -m venv .venv
	@.venv/bin/python $(PIP_INSTALL) --upgrade "pip>=25.1"  # the first with --group
	@.venv/bin/python $(PIP_INSTALL) --editable ".[examples]"
	@touch $@

.venv/.test: .venv/.examples
	@echo "Adding the test tools to .venv"
	@.venv/bin/python $(PIP_INSTALL) --group test
	@touch $@

.venv/.gpu: .venv/.test
	@echo "Adding JAX's CUDA plugin to .venv"
	@.venv/bin/python $(PIP_INSTALL) --editable ".[cuda13]"
	@touch $@

.venv/.dev: .venv/.test
	@echo "Adding the development tools to .venv"
	@.venv/bin/python $(PIP_INSTALL) --group dev
	@touch $@

# The environments of the matrix: installed from the wheel. Their tests run in an
# unpacked sdist without the package's source, so only the wheel can be imported.

dist: .venv/.dev  ## Build sdist and wheel into dist/.
	rm -rf dist
	.venv/bin/python -m build --outdir dist .

build/tree: dist
	rm -rf $@
	mkdir -p $@
	tar -xzf dist/*.tar.gz -C $@ --strip-components 1
	rm -r $@/te_mixed_jax

# $(call make_venv,<directory>,<Python version>,<more arguments of pip install>)
# Takes pythonX.Y from the PATH if it runs (a pyenv shim may not), else from pyenv.
define make_venv
	@echo "Setting up $(1)"
	@for python in python$(2) \
	    $$(ls "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/$(2).*/bin/python$(2) \
	       2>/dev/null | sort -rV); do \
	  "$$python" -c "" 2>/dev/null && break; python=; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "$(1) needs Python $(2): there is no working python$(2) on the PATH, and" \
	    "none under $${PYENV_ROOT:-$$HOME/.pyenv}/versions." >&2; exit 1; \
	fi; \
	"$$python" -m venv --clear $(1)
	@$(1)/bin/python $(PIP_INSTALL) --upgrade "pip>=25.1"
	@$(1)/bin/python $(PIP_INSTALL) "$$(ls dist/*.whl)[examples]" --group test $(3)
	@touch $(1)/.stamp
endef

# $(call test_wheel,<directory>)
define test_wheel
	@$(1)/bin/python $(PIP_INSTALL) --force-reinstall --no-deps dist/*.whl
	@$(1)/bin/python -c 'import platform, flax, jax; print("$(1): Python", \
	  platform.python_version(), "jax", jax.__version__, "flax", flax.__version__)'
	cd build/tree && ../../$(1)/bin/$(PYTEST) -m $(EVERYDAY) $(PYTEST_ARGS)
endef

.venv-oldest/.stamp: pyproject.toml | dist
	$(call make_venv,.venv-oldest,3.11,--group oldest)

# Remove .venv-newest to have it take up newer releases.
.venv-newest/.stamp: pyproject.toml | dist
	$(call make_venv,.venv-newest,3.13,)

test-oldest: .venv-oldest/.stamp build/tree
	$(call test_wheel,.venv-oldest)

test-newest: .venv-newest/.stamp build/tree
	$(call test_wheel,.venv-newest)
