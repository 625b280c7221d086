# Every target makes the environment it needs from nothing but Python, and installs again only when
# pyproject.toml has changed.

PYTHON ?= python3
VENV ?= .venv
# Optional dependencies on top: `make quickstart EXTRA=cuda12`. Nothing of CUDA comes without it.
EXTRA ?=
# Passed on to the script: `make quickstart ARGS="--steps 50"`.
ARGS ?=
# Passed on to pytest. Four processes at most: each one traces for itself. One that has nothing left
# to do takes tests from another.
TESTARGS ?= -n logical --maxprocesses 4 --dist worksteal

# pip only warns of an extra that does not exist, and would leave the user without it.
ifneq ($(filter-out cuda12 cuda13,$(EXTRA)),)
  $(error EXTRA must be cuda12, cuda13 or empty, got "$(EXTRA)")
endif

comma := ,
extras := train$(if $(EXTRA),$(comma)$(EXTRA))
# Twice quiet: errors only. pip's warnings speak of a machine's own settings.
pip := $(VENV)/bin/python -m pip --disable-pip-version-check -qq
# One stamp for each choice of extras, so that another choice installs and the same one does not.
made := $(VENV)/.made
installed := $(VENV)/.installed-$(subst $(comma),-,$(extras))
tools := $(VENV)/.installed-dev
sphinx := $(VENV)/.installed-docs

# Only what was made here is removed: VENV may name a folder of the user's.
ours = { test -z "$$(ls -A "$$folder" 2> /dev/null)" || test -e "$$folder/.zenflow_jax" \
  || test -e "$$folder/.made" || test -e "$$folder/.installed" \
  || { echo "$$folder was not made by this Makefile; remove it, or add VENV=.venv-other" >&2; false; }; }

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:  # two installs must not meet in one environment
.PHONY: help quickstart test test-fast test-compiled test-tunix test-slurm docs test-docs dist lint clean same-python

help:
	@echo "make quickstart  fine-tune a small model on this machine (EXTRA=cuda12 on an NVIDIA GPU,"
	@echo "                 ARGS=\"--steps 50\" for the script's options)"
	@echo "make test        run the tests (TESTARGS=\"-k adam\" for pytest's options)"
	@echo "make test-fast   run those that are not marked slow, for work in between: a minute and a half"
	@echo "                 on two cores. No long compiling, no processes that import jax; what was"
	@echo "                 compiled is kept for the next time. \`make test\` has the say"
	@echo "make test-compiled  check what a GPU's compiler makes of all programs; needs no GPU. Two to four"
	@echo "                 minutes, and a download of 230 MB"
	@echo "make test-tunix  run the tests that need google-tunix, in an environment of their own: two minutes,"
	@echo "                 and one more for the install, of 1.6 GB"
	@echo "make test-slurm  run the batch script under a SLURM of two nodes on this machine: four minutes; needs"
	@echo "                 Debian's packages slurm-wlm and munge"
	@echo "make docs        build the documentation's site into build/site; two minutes, examples are executed"
	@echo "make test-docs   open every page of it in a browser; needs Chromium"
	@echo "make dist        build wheel and source distribution into dist/"
	@echo "make lint        check style, format and types"
	@echo "make clean       remove the environment"
	@echo "All take PYTHON=python3.13 to choose the Python and VENV=.venv-3.13 to choose the folder."

quickstart: $(installed)
	@$(VENV)/bin/python -m train.finetune configs/quickstart.toml $(ARGS)

# -rs: a skipped test says why. On a GPU the processes share it, so none may reserve it all. Tests
# start some 60 processes, of which each would compile all Python anew if none may write bytecode.
pytest := env -u PYTHONDONTWRITEBYTECODE XLA_PYTHON_CLIENT_PREALLOCATE=false \
  $(VENV)/bin/python -m pytest -q -rs
test: $(installed) $(tools)
	@$(pytest) $(TESTARGS)

# `make test` compiles every program anew; this one keeps those of its last runs, for a week.
compiled := $(abspath $(VENV))/compiled
test-fast: $(installed) $(tools)
	@mkdir -p $(compiled) && find $(compiled) -type f -mtime +7 -delete
	@JAX_COMPILATION_CACHE_DIR=$(compiled) JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 \
	  JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=-1 $(pytest) -m "not slow" $(TESTARGS)

# Without a GPU: of jax's CUDA wheels a compiler needs the plugin and one of NVIDIA's dozen, with ptxas.
# They are beside the environment, so that no other test sees them.
compiler := $(VENV)-compiler
test-compiled: $(compiler)/.installed $(tools)
	@JAX_PLATFORMS=cpu PYTHONPATH=$(compiler) TF_CPP_MIN_LOG_LEVEL=3 $(pytest) $(TESTARGS) \
	  tests/compiled/check_programs.py 2> $(compiler)/stderr.log || { cat $(compiler)/stderr.log; exit 1; }

$(compiler)/.installed: $(installed)
	@folder=$(compiler); $(ours) && mkdir -p $(compiler) && touch $(compiler)/.zenflow_jax
	@find $(compiler) -mindepth 1 ! -name .zenflow_jax -delete
	@version=$$($(VENV)/bin/python -c 'import jax; print(jax.__version__)') && $(pip) install --no-deps \
	  --target $(compiler) jax-cuda12-plugin==$$version jax-cuda12-pjrt==$$version nvidia-cuda-nvcc-cu12
	@touch $@

test-slurm: $(installed) $(tools)
	@$(pytest) tests/in_slurm.py

test-tunix:
	@folder=$(VENV)-tunix; $(ours) && mkdir -p $$folder && touch $$folder/.zenflow_jax
	@PYTHON=$(PYTHON) .ci/tunix $(VENV)-tunix

# Strict: a link that leads nowhere, a public name without its entry, or an example that fails ends it.
site := build/site
docs: $(installed) $(sphinx)
	@$(VENV)/bin/python -m sphinx -q -W --keep-going -b html -d build/doctrees docs $(site)
	@echo "$(site)/index.html"

# Opens every page of it in a browser that is on the machine: Debian's package `chromium`.
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
	@for folder in $(VENV) $(VENV)-compiler $(VENV)-tunix; do $(ours) && rm -rf "$$folder" || exit 1; done
	rm -rf build

$(made): | same-python
	@command -v $(PYTHON) > /dev/null || { echo "$(PYTHON) is not to be found; choose a Python with PYTHON=/path/to/python3" >&2; exit 1; }
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

# An environment that is there already keeps its Python; say so rather than test the wrong one.
same-python:
ifneq ($(origin PYTHON),file)
	@test ! -e $(made) || { asked=$$($(PYTHON) -V) && has=$$($(VENV)/bin/python -V) && \
	  { test "$$asked" = "$$has" || { echo "$(VENV) has $$has, PYTHON=$(PYTHON) is $$asked; run \`make clean\` or add VENV=.venv-other" >&2; exit 1; }; }; }
endif
