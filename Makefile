# `make sweep` and `make test` need Python 3.11 to 3.13 and a C++ compiler; each makes .venv, installs what constraints.txt
# pins, and runs. A second call installs again only if pyproject.toml or constraints.txt changed.
#
#   make sweep ARGS="captioning --num-trials 20"
#   make chaos ARGS="--chaos-seed 7"       breaks sweeps in every way there is, half an hour and more; docs/reliability.md
#   make quick                             the tests that start neither Ray nor a compiler, for the inner loop
#   make test ARGS="-k settings -x"        ARGS go to pytest; some tests need redis-server (apt-get install redis-server)
#   make test TORCH=2.15.0                 the same with another torch, in an environment of its own, .venv-torch-2.15.0
#   make nightly                           every test: clusters over ssh, all faults, thousands of fuzz cases with other seeds
#   make docs                              the documentation as a site in build/docs, with an API reference made from docstrings
#   make install EXTRAS=aws,s3             nothing but the installation, with extras of pyproject.toml
#   make sweep PYTHON=python3.12           another interpreter, for the first call

SHELL := /bin/sh
ifeq ($(TORCH),)
VENV ?= .venv
CONSTRAINTS := constraints.txt
else
VENV ?= .venv-torch-$(TORCH)
CONSTRAINTS := $(VENV)/constraints.txt
endif
ARGS ?=
EXTRAS ?=
IN_VENV := $(VENV)/bin/python
PYTEST := $(IN_VENV) -X faulthandler -m pytest
LOG := $(VENV)/install.log
# One worker more than cores, because tests also wait for processes, servers and browsers; at most 8, for memory.
WORKERS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN); echo $$(( n < 7 ? n + 1 : 8 )))

.PHONY: help sweep quick test nightly test-all chaos lint style docs install clean check
.DEFAULT_GOAL := help

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile
	@echo "Targets: sweep, quick, test, nightly, chaos, lint, docs, install, clean."

sweep: $(VENV)/.installed
	@$(IN_VENV) -m orchestrator.sweep $(ARGS)

quick: $(VENV)/.installed-dev
	@$(PYTEST) -q -n logical --maxprocesses 4 --dist loadgroup --examples 20 \
	  -m "not (slow or ray or alone or nightly or gpu or browser)" \
	  $(addprefix --ignore=tests/,sweeps chaos cluster fuzz browser golden) $(ARGS)

test: style
	$(call run_tests,--examples 30)

nightly test-all: export FUZZ_CASES ?= 2000
nightly test-all: style
	$(call run_tests,--nightly --examples 1000)

# Side by side what may be, then, if those passed, the rest. 5 says that ARGS chose no test: of one part, nothing wrong.
define run_tests
chosen=5; for part in "--alone no -n $(WORKERS) --dist loadgroup --no-loadscope-reorder" "--alone only"; do \
  $(PYTEST) --durations=30 $$part $(1) $(ARGS) && chosen=0 || { code=$$?; test $$code -eq 5 || exit $$code; }; \
done; exit $$chosen
endef

# In full, what `make test` runs in a short form; rewrites the table of faults. On a machine with a GPU, its faults too.
chaos: $(VENV)/.installed-dev
	$(PYTEST) tests/chaos --chaos full --write-reliability docs/reliability.md $(ARGS)

lint: style
	$(IN_VENV) -m mypy --num-workers 2

# mypy is one of the tests, so that it runs beside the others.
style: $(VENV)/.installed-dev
	$(IN_VENV) -m ruff check .
	$(IN_VENV) -m ruff format --check .

docs: $(VENV)/.installed
	@$(call pip_install,-e ".[docs]")
	$(IN_VENV) -m mkdocs build --strict

install: $(VENV)/.installed
ifneq ($(EXTRAS),)
	@echo "Installing the extras $(EXTRAS)."
	@$(call pip_install,-e ".[run,$(EXTRAS)]")
endif

clean:
	rm -rf $(VENV) build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find compile_sweep orchestrator workloads analysis tests -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first and alone: the build that this machine's pip prefers, for CPU or CUDA, is then kept by all that follows.
$(VENV)/.torch: constraints.txt | check
	@test -x $(IN_VENV) || $(python) -m venv $(VENV)
ifneq ($(TORCH),)
	@{ sed -E '/^(torch|triton|setuptools|(nvidia|cuda)-[a-z0-9-]+)==/d' constraints.txt; echo "torch==$(TORCH)"; } >$(CONSTRAINTS)
endif
	@echo "Installing torch into $(VENV), which takes a minute or more; details in $(LOG)."
	@$(call run_pip,--upgrade pip uv) || true  # without them it takes a minute longer
	@$(call pip_install,torch)
	@touch $@

$(VENV)/.installed: pyproject.toml $(VENV)/.torch | check
	@echo "Installing compile-sweep and what it needs; details in $(LOG)."
	@$(compile_packages) & $(call install_packages,-e ".[run]"); wait
	@$(compile_packages)
	@touch $@

$(VENV)/.installed-dev: pyproject.toml $(VENV)/.torch | check
	@echo "Installing compile-sweep, what it needs, and what the tests need; details in $(LOG)."
	@$(compile_packages) & $(call install_packages,-e ".[dev]"); wait
	@touch $(VENV)/.installed
	@echo "Compiling what was installed, and the tests, which each of their processes would do otherwise."
	@$(compile_packages) & $(PYTEST) --collect-only -q >>$(LOG) 2>&1; wait  # it is for the test run to say what cannot be imported
	@touch $@

run_pip = $(IN_VENV) -m pip install -q --disable-pip-version-check --no-compile -c $(CONSTRAINTS) $(1) >$(LOG) 2>&1

# uv takes 6 s where pip takes 30. It is given the indexes that pip is configured with; where it fails, pip installs.
install_packages = { eval "$$($(IN_VENV) -m pip config list | sed -nE $(as_variables_of_uv))" \
	&& UV_INDEX_STRATEGY=unsafe-best-match $(IN_VENV) -m uv pip install -q -c $(CONSTRAINTS) $(1) >$(LOG) 2>&1; } \
	|| $(call pip_install,$(1))

as_variables_of_uv = -e 's/\\n/ /g' -e 's/^[a-z:]+\.index-url=/export UV_DEFAULT_INDEX=/p' \
	-e 's/^[a-z:]+\.extra-index-url=/export UV_INDEX=/p' -e 's/^[a-z:]+\.find-links=/export UV_FIND_LINKS=/p' \
	-e 's/^[a-z:]+\.cert=/export SSL_CERT_FILE=/p'

pip_install = $(run_pip) \
	|| { tail -n 20 $(LOG) >&2; echo "The installation failed; the whole of it is in $(LOG)." >&2; exit 2; }

# pip does it on one core; what is left out is large, and Python compiles what it imports of it. Some packages hold templates
# that are no Python. What is there already is compiled while pip finds the others, which keeps one core busy.
compile_packages = $(IN_VENV) -m compileall -q -j 0 -x 'site-packages/(.+/)?(tests|$(hardly_imported))/' \
	"$$($(IN_VENV) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" >>$(LOG) 2>&1 || true

hardly_imported = $(never_imported)|$(never_imported_parts)|$(in_small_part)
in_small_part = databricks|moto|mypyc?|pip|plotly/graph_objs|pygments/lexers|sqlalchemy|transformers/models
never_imported = cfnlint|google/(api_core|auth)|graphql|mlflow|playwright/async_api|pyasn1_modules|pymdownx|ray/(llm|rllib|serve)
never_imported_parts = $(of_numbers)|huggingface_hub/(cli|inference)|pydantic/v1|torch/(_vendor|testing)|transformers/(exporters|pipelines)
of_numbers = numpy/distutils|scipy/(integrate|interpolate|io|ndimage|signal|stats)|sympy/(combinatorics|parsing|physics|stats)

# Before anything is made: one sentence on what is missing. It goes through $(error) because a failed recipe would add a line.
check:
	$(if $(missing),$(error $(missing)))@:

# The first interpreter that will do, unless PYTHON names one. A command may exist and not run (pyenv's shims).
python = $(or $(PYTHON),$(shell $(find_python)))
missing = $(shell $(find_missing))

find_python = for name in python3 python3.12 python3.13 python3.11; do \
    if $$name -c '$(is_supported)' 2>/dev/null; then echo $$name; break; fi; \
  done

is_supported = import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))

# Inductor and Triton compile C++ against Python.h, which Debian keeps in a package of its own, as it does half of venv.
find_missing = python=$(if $(wildcard $(IN_VENV)),$(IN_VENV),$(python)); \
  if ! $${python:-false} -c '$(is_supported)' 2>/dev/null; then \
    echo "compile-sweep needs Python 3.11 to 3.13, which $(or $(PYTHON),python3) is not: install one" \
      "(apt-get install python3 python3-dev python3-venv, or from python.org) and name it, as in PYTHON=python3.12"; \
    exit; \
  fi; \
  lacks=; packages=; \
  lack() { lacks="$$lacks$${lacks:+ and }$$1"; packages="$$packages $$2"; }; \
  version=$$($$python -c 'import sys; print("python%d.%d" % sys.version_info[:2])'); \
  $$python -c 'import ensurepip, venv' 2>/dev/null || lack "Python's venv module" $$version-venv; \
  $$python -c '$(has_headers)' 2>/dev/null || lack "Python's header files" $$version-dev; \
  command -v $(CXX) >/dev/null || lack "the C++ compiler $(CXX)" g++; \
  test -z "$$lacks" || echo "compile-sweep needs $$lacks: install what is missing" \
    "(on Debian or Ubuntu, apt-get install$$packages)"

has_headers = import os, sysconfig; os.stat(os.path.join(sysconfig.get_path("include"), "Python.h"))
