# Every target makes its own environment, for which it needs only Python, and reinstalls only if
# pyproject.toml changes.

PYTHON ?= python3
VENV ?= .venv
# Optional dependencies: `make quickstart EXTRA=cuda12`. Without EXTRA, CUDA is not installed.
EXTRA ?=
# Arguments for the script: `make quickstart ARGS="--steps 50"`.
ARGS ?=
# Arguments for pytest. At most four processes, because each traces its own programs. An idle process
# takes tests from a busy one.
TESTARGS ?= -n logical --maxprocesses 4 --dist worksteal

# pip only warns about an unknown extra, and continues without it.
ifneq ($(filter-out cuda12 cuda13,$(EXTRA)),)
  $(error EXTRA must be cuda12, cuda13 or empty, got "$(EXTRA)")
endif

comma := ,
extras := train$(if $(EXTRA),$(comma)$(EXTRA))
# -qq shows only errors: pip's warnings are about the machine's settings.
pip := $(VENV)/bin/python -m pip --disable-pip-version-check -qq
# A stamp file for each choice of extras, so that only a new choice installs packages.
made := $(VENV)/.made
installed := $(VENV)/.installed-$(subst $(comma),-,$(extras))
tools := $(VENV)/.installed-dev
sphinx := $(VENV)/.installed-docs

# Removes only folders made by this Makefile: VENV may be a user's folder.
ours = { test -z "$$(ls -A "$$folder" 2> /dev/null)" || test -e "$$folder/.zenflow_jax" \
  || test -e "$$folder/.made" || test -e "$$folder/.installed" \
  || { echo "$$folder was not made by this Makefile; remove it, or add VENV=.venv-other" >&2; false; }; }

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:  # an environment allows one install at a time
# `.ci/run` makes this environment while other targets run.
.PHONY: install-compiler
.PHONY: help quickstart test test-fast test-compiled test-clients docs test-docs dist lint clean same-python

help:
	@echo "make quickstart  fine-tune a small model on this machine (EXTRA=cuda12 on an NVIDIA GPU,"
	@echo "                 ARGS=\"--steps 50\" for the script's options)"
	@echo "make test        run the tests (TESTARGS=\"-k adam\" for pytest's options)"
	@echo "make test-fast   run only tests not marked slow, between changes: 90 seconds on two"
	@echo "                 cores. No long compiling, no processes that import jax; compiled programs are"
	@echo "                 kept for the next run. Only \`make test\` is authoritative"
	@echo "make test-compiled  compile all programs for a GPU and check them; needs no GPU. Two to four"
	@echo "                 minutes, and a download of 230 MB"
	@echo "make test-clients  run the tests that need Keras, equinox and haliax, in a separate environment"
	@echo "make docs        build the documentation into build/site; two minutes, runs its examples"
	@echo "make test-docs   open every page in a browser; needs Chromium"
	@echo "make dist        build wheel and source distribution into dist/"
	@echo "make lint        check style, format and types"
	@echo "make clean       remove the environment"
	@echo "Options for all targets: PYTHON=python3.13 for another Python, VENV=.venv-3.13 for another folder."

quickstart: $(installed)
	@$(VENV)/bin/python -m train.finetune configs/quickstart.toml $(ARGS)

# -rs shows why a test is skipped. Processes share a GPU, so none may reserve all of it. Tests start
# some 50 processes, each of which would compile all Python code again without bytecode files.
pytest := env -u PYTHONDONTWRITEBYTECODE XLA_PYTHON_CLIENT_PREALLOCATE=false \
  $(VENV)/bin/python -m pytest -q -rs
test: $(installed) $(tools)
	@$(pytest) $(TESTARGS)

# `make test` compiles every program again; this target keeps programs for a week.
compiled := $(abspath $(VENV))/compiled
test-fast: $(installed) $(tools)
	@mkdir -p $(compiled) && find $(compiled) -type f -mtime +7 -delete
	@JAX_COMPILATION_CACHE_DIR=$(compiled) JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 \
	  JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=-1 $(pytest) -m "not slow" $(TESTARGS)

# Compiling without a GPU needs jax's CUDA plugin and one of NVIDIA's dozen wheels, with ptxas. They are
# installed outside the environment, so that other tests do not find them. Their `__init__.py` hide the
# wheels in an environment made with EXTRA: with cuDNN, jax traces other programs.
compiler := $(VENV)-compiler
test-compiled: $(compiler)/.installed $(tools)
	@JAX_PLATFORMS=cpu PYTHONPATH=$(compiler) TF_CPP_MIN_LOG_LEVEL=3 $(pytest) $(TESTARGS) \
	  tests/compiled/check_programs.py 2> $(compiler)/stderr.log || { cat $(compiler)/stderr.log; exit 1; }

install-compiler: $(compiler)/.installed
$(compiler)/.installed: $(installed)
	@folder=$(compiler); $(ours) && mkdir -p $(compiler) && touch $(compiler)/.zenflow_jax
	@find $(compiler) -mindepth 1 ! -name .zenflow_jax -delete
	@version=$$($(VENV)/bin/python -c 'import jax; print(jax.__version__)') && $(pip) install --no-deps \
	  --target $(compiler) jax-cuda12-plugin==$$version jax-cuda12-pjrt==$$version nvidia-cuda-nvcc-cu12
	@cd $(compiler) && mkdir jax_cuda13_plugin && touch jax_cuda13_plugin/__init__.py \
	  jax_plugins/__init__.py nvidia/__init__.py
	@touch $@

test-clients:
	@folder=$(VENV)-clients; $(ours) && mkdir -p $$folder && touch $$folder/.zenflow_jax
	@PYTHON=$(PYTHON) .ci/clients $(VENV)-clients

# Strict: fails on a broken link, a public name without an entry, or a failing example.
site := build/site
docs: $(installed) $(sphinx)
	@$(VENV)/bin/python -m sphinx -q -W --keep-going -b html -d build/doctrees docs $(site)
	@echo "$(site)/index.html"

# Opens every page in the machine's browser: Debian's package `chromium`.
test-docs: docs
	@$(VENV)/bin/python docs/browse.py $(site)

# Wheel and source distribution, into dist/.
dist: $(made)
	@$(pip) install build
	@$(VENV)/bin/python -m build --outdir dist . > /dev/null && ls dist

lint: $(installed) $(tools)
	@$(VENV)/bin/ruff check --quiet
	@$(VENV)/bin/ruff format --quiet --diff
	@PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(VENV)/bin/pyright --pythonpath $(VENV)/bin/python > $(VENV)/pyright.log \
	  || { cat $(VENV)/pyright.log; exit 1; }

clean:
	@for folder in $(VENV) $(VENV)-compiler $(VENV)-clients; do $(ours) && rm -rf "$$folder" || exit 1; done
	rm -rf build

$(made): | same-python
	@command -v $(PYTHON) > /dev/null || { echo "$(PYTHON) was not found; choose a Python with PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit(f"zenflow_jax needs Python 3.11 or newer, $(PYTHON) is {sys.version.split()[0]}; choose another with PYTHON=python3.12")'
	@folder=$(VENV); $(ours) && mkdir -p $(VENV) && touch $(VENV)/.zenflow_jax
	@echo "making the environment in $(VENV) (a minute or more)"
	@find $(VENV) -mindepth 1 ! -name .zenflow_jax -delete && $(PYTHON) -m venv $(VENV)
	@# 25.1 is the first pip that installs dependency groups; Python 3.11 and 3.12 come with older ones.
	@$(pip) install "pip>=25.1"
	@touch $@

$(installed): pyproject.toml | $(made)
	@$(pip) install --editable ".[$(extras)]"
	@touch $@

$(tools): pyproject.toml | $(made)
	@$(pip) install --group dev
	@touch $@

$(sphinx): pyproject.toml | $(made)
	@$(pip) install --group docs
	@touch $@

# An existing environment keeps its Python. Fails if PYTHON is another version.
same-python:
ifneq ($(origin PYTHON),file)
	@test ! -e $(made) || { new=$$($(PYTHON) -V) && old=$$($(VENV)/bin/python -V) && \
	  { test "$$new" = "$$old" || { echo "$(VENV) has $$old, PYTHON=$(PYTHON) is $$new; run \`make clean\` or add VENV=.venv-other" >&2; exit 1; }; }; }
endif
