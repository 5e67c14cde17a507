# Two commands are enough: `make demo` and `make test`. Each sets up what it needs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test check bench clean

demo: $(STAMP)
	$(BIN)/podium demo

test: $(STAMP)
	$(BIN)/python -m pytest

check: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/podium bench step --peers ddp

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find podium tests -type d -name __pycache__ -prune -exec rm -rf {} +

# torch goes in first and by its pin, so that nothing that follows can choose another.
$(STAMP): pyproject.toml constraints.txt
	@echo "Setting up $(VENV) (a few minutes, once)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) torch
	@$(PIP) --editable '.[dev]'
	@touch $@
