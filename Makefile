# Each target works from a fresh clone: it makes the environments that it needs, and
# makes them again when pyproject.toml changes.

PYTHON ?= python3
WORKERS ?= 2
PYTEST_ARGS ?=

PIP_INSTALL := -m pip install --quiet --disable-pip-version-check
# Tests of one file share compiled programs, so they stay on one worker.
PYTEST := pytest -n $(WORKERS) --dist loadfile
EVERYDAY := "not gpu and not slow"
# The Pythons that the wheel is tested on: make wheel-test PYTHONS="3.11 3.13"
PYTHONS ?= 3.11 3.12 3.13
CHECKED = $(wildcard te_mixed_jax tests examples benchmarks)

.PHONY: help demo test test-full test-gpu wheel-test $(PYTHONS:%=wheel-test-%) lint \
	format docs bench dist clean
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

wheel-test: $(PYTHONS:%=wheel-test-%)  ## Install and test the wheel on all Pythons.

lint: .venv/.dev  ## Check format, lint and types.
	.venv/bin/ruff format --check $(CHECKED)
	.venv/bin/ruff check $(CHECKED)
	.venv/bin/pyright

format: .venv/.dev  ## Format, and apply the safe fixes of the linter.
	.venv/bin/ruff format $(CHECKED)
	.venv/bin/ruff check --fix $(CHECKED)

docs: .venv/.docs  ## Build the documentation into site/.
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict

bench: .venv/.examples  ## Run the CPU benchmark.
	.venv/bin/python -m benchmarks.attention --platform cpu

clean:  ## Remove all that these targets made.
	rm -rf .venv .venv-* build dist site
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

.venv/.docs: .venv/.examples
	@echo "Adding the documentation tools to .venv"
	@.venv/bin/python $(PIP_INSTALL) --group docs
	@touch $@

# Environments with the wheel, one for each Python. Their tests run in an unpacked sdist
# without the package's source, so only the wheel can be imported; one of them makes an
# environment that has nothing else.

dist: .venv/.dev  ## Build sdist and wheel into dist/.
	rm -rf dist
	.venv/bin/python -m build --outdir dist .

build/tree: dist
	rm -rf $@
	mkdir -p $@
	tar -xzf dist/*.tar.gz -C $@ --strip-components 1
	rm -r $@/te_mixed_jax

# The oldest releases that are supported run on the oldest Python, the newest, when the
# environment was made, on the others. Takes pythonX.Y from the PATH if it runs (a pyenv
# shim may not), else from pyenv.
OLDEST_3.11 := --group oldest

$(PYTHONS:%=.venv-%/.stamp): .venv-%/.stamp: pyproject.toml | dist
	@echo "Setting up .venv-$*"
	@for python in python$* \
	    $$(ls "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/$*.*/bin/python$* \
	       2>/dev/null | sort -rV); do \
	  "$$python" -c "" 2>/dev/null && break; python=; \
	done; \
	if [ -z "$$python" ]; then \
	  echo ".venv-$* needs Python $*: there is no working python$* on the PATH, and" \
	    "none under $${PYENV_ROOT:-$$HOME/.pyenv}/versions." >&2; exit 1; \
	fi; \
	"$$python" -m venv --clear .venv-$*
	@.venv-$*/bin/python $(PIP_INSTALL) --upgrade "pip>=25.1"
	@.venv-$*/bin/python $(PIP_INSTALL) "$$(ls dist/*.whl)[examples]" \
	  --group test --group lint $(OLDEST_$*)
	@touch $@

$(PYTHONS:%=wheel-test-%): wheel-test-%: .venv-%/.stamp build/tree
	@.venv-$*/bin/python $(PIP_INSTALL) --force-reinstall --no-deps dist/*.whl
	@.venv-$*/bin/python -c 'import platform, flax, jax; print("Python", \
	  platform.python_version(), "jax", jax.__version__, "flax", flax.__version__)'
	cd build/tree && ../../.venv-$*/bin/$(PYTEST) -m $(EVERYDAY) \
	  --wheel=$$(ls ../../dist/*.whl) $(PYTEST_ARGS)
