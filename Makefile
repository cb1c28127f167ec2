# Needs Python 3.11 or newer, pip and make. Another Python: make test PYTHON=python3.12
.DEFAULT_GOAL := help
.PHONY: help demo test drills install lint format clean

# A .venv that works keeps its Python, unless another is asked for.
ifndef PYTHON
PYTHON := $(shell .venv/bin/python -c 'import pip' 2>/dev/null && echo .venv/bin/python || echo python3)
endif
# One more than two cores: some tests mostly wait.
WORKERS ?= 3
BIN := .venv/bin
CODE := $(wildcard src tests benchmarks examples scripts)

define install
	@command -v $(PYTHON) >/dev/null 2>&1 || { echo "There is no Python called $(PYTHON): install Python 3.11 or newer \
	(Debian, Ubuntu: \`apt-get install python3 python3-venv\`) or name yours, as in \`make test PYTHON=python3.12\`." >&2; exit 1; }
	@$(PYTHON) scripts/check_python.py
	@$(PYTHON) scripts/install.py $(1)
endef

help:  ## This list
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' Makefile | expand -t 17

demo:  ## Train DrQ on a small pixel task: minutes on two CPU cores, then a page with curves and a video
	$(call install)
	@$(BIN)/drq demo

test:  ## Lint, type check and all tests
	$(call install,dev atari)
	@$(PYTHON) scripts/system_packages.py
	$(BIN)/python -m ruff check $(CODE)
	$(BIN)/python -m ruff format --check $(CODE)
	$(BIN)/python -m mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -rs

drills:  ## Break small runs in every way that docs/reliability.md lists, and count what was lost: up to an hour
	$(call install,dev atari)
	OMP_NUM_THREADS=1 $(BIN)/python scripts/drills
	OMP_NUM_THREADS=1 $(BIN)/python scripts/ray_drills.py

install:  ## Only install, for development: .venv with the extras dev and atari
	$(call install,dev atari)

lint:  ## Lint and type check
	$(call install,dev atari)
	$(BIN)/python -m ruff check $(CODE)
	$(BIN)/python -m ruff format --check $(CODE)
	$(BIN)/python -m mypy

format:  ## Lay out the code with ruff
	$(call install,dev atari)
	$(BIN)/python -m ruff format $(CODE)
	$(BIN)/python -m ruff check --fix --select I $(CODE)

clean:  ## Remove .venv, caches and builds; your runs stay
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache build dist src/*.egg-info
	find $(CODE) -name __pycache__ -prune -exec rm -rf {} +
