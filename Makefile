# `make` alone lists the targets. `dvc repro` is the pipeline; this file only spares typing.
.DEFAULT_GOAL := help
PYTHON ?= python3
BIN := .venv/bin
# `dvc repro` runs the stages' commands by name: they must be this environment's.
export PATH := $(CURDIR)/$(BIN):$(PATH)
STAGES := model generate tokenize extract audit vocab train evaluate

.PHONY: help repro plan results test oracle lint lock push pull verify $(STAGES)

help: ## list the targets
	@grep -hE '^[a-z%.$$() ]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-28s %s\n", $$1, $$2}'
	@printf '  %-28s %s\n' 'model … evaluate' 'one stage and what it needs: $(STAGES)'

# The stamp is newer than the lock file exactly when the environment is what the lock says.
.venv/stamp: requirements.lock pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25'
	$(BIN)/python -m pip install --quiet --require-hashes --no-deps -r requirements.lock
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

.venv: .venv/stamp ## make the environment from requirements.lock

repro: .venv/stamp ## everything: environment, the whole pipeline, the table of results
	dvc repro
	@eaglet results

$(STAGES): .venv/stamp
	dvc repro $@

plan: .venv/stamp ## what a repro would compute and reuse, and the bytes it needs
	@eaglet plan

results: .venv/stamp ## the table of the last run
	@eaglet results

verify: .venv/stamp ## every checksum of everything stored
	@eaglet verify

push: .venv/stamp ## send outputs and hidden states to the DVC remote
	dvc push

pull: .venv/stamp ## fetch what dvc.lock names from the DVC remote
	dvc pull

test: .venv/stamp ## the tests
	@$(MAKE) --no-print-directory oracle || echo 'no oracle: the tests against speculators are skipped'
	python -m pytest

oracle: .venv-oracle/stamp ## an environment with speculators, which the drafter is tested against

.venv-oracle/stamp: tests/oracle/requirements.txt
	$(PYTHON) -m venv .venv-oracle
	.venv-oracle/bin/python -m pip install --quiet torch==2.13.0
	.venv-oracle/bin/python -m pip install --quiet --no-deps -r tests/oracle/requirements.txt
	touch $@

lint: .venv/stamp ## ruff and mypy --strict
	ruff check .
	ruff format --check .
	mypy

lock: ## resolve requirements.lock anew (needs uv)
	uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-package torch \
		--no-header --no-emit-index-url --no-annotate --extra dev --extra smollm2 pyproject.toml -o requirements.lock
