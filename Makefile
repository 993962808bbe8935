# Everything that one does with Lockstep, by one word; `make` alone lists them. GNU Make 3.81 (macOS) or later.
#
#   CONFIG=configs/x.yaml   the preset to train            ARGS="optim.lr=0.1 max_epochs=3"   more arguments, quoted as in a shell
#   NGPU=4                  processes (default: all GPUs)  LAUNCHER=torchrun|accelerate|fork
#   RUN=mnist-003           the run to resume or evaluate  WHAT=...                     the comparison to bench
#
#   PYTHON=python3.12       makes the .venv                VENV=/elsewhere   another place; VENV=none: the active environment as it is
#   PIP_ARGS="..."          options for pip, e.g. the index of another build of torch; remembered

.DEFAULT_GOAL := help
settings = CONFIG ARGS NGPU LAUNCHER RUN WHAT PYTHON VENV PIP_ARGS
typed = $(foreach name,$(.VARIABLES),$(if $(findstring command line,$(origin $(name))),$(name)))
ifneq ($(filter-out $(settings) MAKEFLAGS MAKEOVERRIDES -*-%,$(typed)),)
$(error unknown: $(filter-out $(settings) MAKEFLAGS MAKEOVERRIDES -*-%,$(typed)); settings of the training go in ARGS="max_epochs=3")
endif
.NOTPARALLEL:
.PHONY: help setup train-single train-multigpu resume eval plan tensorboard smoke test test-gpu lint check bench bench-check \
	bench-gpu clean run-given

CONFIG ?= configs/mnist.yaml
LAUNCHER ?= torchrun
VENV ?= .venv
unexport MAKEFLAGS CONFIG ARGS NGPU LAUNCHER RUN WHAT  # they are for this make alone, not for one that a test starts
ifeq ($(strip $(VENV)),)
$(error VENV is empty; give a folder, or VENV=none for the active environment)
endif

# Values come as they were typed (`value`: a $ stays one). `quoted` makes one word for the shell of any value; ARGS stays open to
# the shell, so that it takes the quotes in it.
quoted = '$(subst ','\'',$(1))'
given = $(filter-out undefined default file,$(firstword $(origin $(1))))
python = $(if $(filter none,$(VENV)),$(or $(PYTHON),python3),$(VENV)/bin/python)
PY = exec $(if $(word 2,$(python)),$(call quoted,$(python)),$(python))
config = $(call quoted,$(value CONFIG))
run = $(call quoted,$(value RUN))
nproc = --nproc $(call quoted,$(value NGPU))
nproc_if_given = $(if $(call given,NGPU),$(nproc))
launcher = --launcher $(call quoted,$(value LAUNCHER))
launcher_if_given = $(if $(call given,LAUNCHER),$(launcher))
args = $(value ARGS)

help: ## Show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' Makefile
	@awk '/^#  / {print substr($$0, 2)}' Makefile

# The first Python that is new enough runs the script; the environment's own comes first, since it is the one to keep.
candidates = $(if $(PYTHON),$(call quoted,$(PYTHON)),$(if $(filter none,$(VENV)),,$(call quoted,$(python))) python3 $(newer))
newer = $(if $(filter none,$(VENV)),,python3.14 python3.13 python3.12 python3.11)
setup: ## Make or update the environment that all others use; done by them when needed
	@for python in $(candidates); do \
	  if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    exec "$$python" -P launch/environment.py $(call quoted,$(VENV)) --python "$$python" $(setup_args); \
	  fi; \
	done; \
	echo "environment error: no Python >= 3.11 among:" $(candidates)". Install one, or name it: make PYTHON=/path/to/python3" >&2; \
	exit 3
dev =
setup_args = $(if $(call given,PIP_ARGS),--pip-args=$(call quoted,$(value PIP_ARGS))) $(if $(filter setup,$(MAKECMDGOALS)),--verbose) $(dev)
test test-gpu lint check: dev = --dev

train-single: setup ## Train CONFIG in one process
	$(PY) -m launch train $(config) --nproc 1 $(launcher) $(args)

train-multigpu: setup ## Train CONFIG in NGPU processes, one for each GPU
	$(PY) -m launch train $(config) $(if $(call given,NGPU),$(nproc),--nproc auto) $(launcher) $(args)

resume: run-given setup ## Go on with RUN where it stopped
	$(PY) -m launch resume $(run) $(nproc_if_given) $(launcher_if_given) $(args)

eval: run-given setup ## Evaluate RUN's checkpoint
	$(PY) -m launch eval $(run) $(nproc_if_given) $(launcher_if_given) $(args)

plan: setup ## Show what a training of CONFIG would do, without doing it
	$(PY) -m launch plan $(config) $(nproc_if_given) $(launcher_if_given) $(args)

tensorboard: setup ## Show all runs in the browser, on this machine only
	$(PY) -m tensorboard.main --logdir runs --host localhost $(args)

smoke: setup ## Train a few steps in two processes and check the loss
	$(PY) -m launch train configs/smoke.yaml --nproc 2 $(launcher) $(args)

test: setup ## Run all tests; ARGS="-k order" for some of them
	$(PY) -m pytest $(args)

test-gpu: setup ## Run the tests that need a GPU
	$(PY) -m pytest -m gpu -rs $(args)

ours = configs launch trainer tests benchmarks
lint: setup ## Check style, types and who imports whom
	$(PY) -m ruff check $(ours)
	$(PY) -m ruff format --check $(ours)
	$(PY) -m mypy
	$(PY) -c 'from importlinter.cli import lint_imports_command as main; main()'

check: lint test ## What CI runs: lint and test

bench: setup ## Compare the speed with that of others, WHAT=... for one of the comparisons
	$(PY) -m benchmarks $(value WHAT) $(args)

bench-check: setup ## Fail where a ratio is worse than benchmarks/expected.json tolerates; WHAT=...
	$(PY) -m benchmarks --check $(value WHAT) $(args)

bench-gpu: setup ## The comparisons that need a GPU
	$(PY) -m benchmarks gpu $(args)

clean: ## Remove the .venv, caches and build output; never runs/ or data
	rm -rf .venv .pytest_cache .ruff_cache .mypy_cache .import_linter_cache build dist *.egg-info
	find . \( -path ./runs -o -path ./data -o -path ./.git \) -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +

run-given:
	@$(if $(strip $(value RUN)),:,$(error $(MAKECMDGOALS) needs RUN, the name of a run in runs/, e.g. make $(MAKECMDGOALS) RUN=mnist-001))
