# Two commands are enough: `make demo` and `make test`. Each sets up what it needs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
PACKAGES := $(VENV)/.packages
PEERS := .venv-peers
PIP_INSTALL := python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
PIP := $(BIN)/$(PIP_INSTALL)
PEER_PACKAGES := ray tensorflow-cpu
DEBIAN_PACKAGES := openssh-server openssh-client slurmctld slurmd slurm-client munge iproute2 util-linux
MACHINE := tests/lab/bench tests/launch tests/integration tests/cli/test_checkup.py tests/exchange/test_codec_choice.py
SLOWEST := --durations=10 --durations-min=5

.PHONY: demo test test-slow test-all golden check bench peers clean

demo: $(STAMP)
	$(BIN)/podium demo

# Most tests keep one core busy and run side by side, file by file. Those that look at the whole machine (processes, network
# namespaces, what it measures) come after them, one by one. `make test` leaves out what is marked slow.
SIDE_BY_SIDE := --numprocesses auto --maxprocesses 4 --dist loadfile $(MACHINE:%=--ignore=%)

test: $(STAMP) $(PACKAGES)
	$(BIN)/python -m pytest $(SLOWEST) -m 'not slow' $(SIDE_BY_SIDE)
	$(BIN)/python -m pytest $(SLOWEST) -m 'not slow' $(MACHINE)

test-slow: $(STAMP) $(PACKAGES)
	$(BIN)/python -m pytest $(SLOWEST) -m slow $(SIDE_BY_SIDE)
	$(BIN)/python -m pytest $(SLOWEST) -m slow $(MACHINE)

test-all: test test-slow

# What must stay as it is while code moves.
golden: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python tests/golden/golden.py

check: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: $(STAMP) peers
	$(BIN)/podium bench step --peers ddp
	$(BIN)/podium bench ps --peers rpc,ray,tensorflow

# Ray and TensorFlow, which `podium bench ps` is measured beside; they never enter the environment that Podium runs in.
peers: $(PEERS)/.ready

clean:
	rm -rf $(VENV) $(PEERS) build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find podium tests -type d -name __pycache__ -prune -exec rm -rf {} +

# torch goes in first and by its pin, so that nothing that follows can choose another.
$(STAMP): pyproject.toml constraints.txt
	@echo "Setting up $(VENV) (a few minutes, once)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) torch
	@$(PIP) --editable '.[dev]'
	@touch $@

# What test hosts run: sshd and SLURM, where they can be installed. It is tried once: `rm .venv/.packages` to try again.
$(PACKAGES): tools/install_packages.sh | $(STAMP)
	@tools/install_packages.sh $(DEBIAN_PACKAGES)
	@touch $@

# The same constraints hold here, and torch again comes first, so that Ray's tensors are those that Podium has.
$(PEERS)/.ready: pyproject.toml constraints.txt
	@echo "Setting up $(PEERS) (a few minutes, once)"
	@test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	@$(PEERS)/bin/$(PIP_INSTALL) torch
	@$(PEERS)/bin/$(PIP_INSTALL) $(PEER_PACKAGES)
	@touch $@
