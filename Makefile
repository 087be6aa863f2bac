# `make` alone lists the targets. `dvc repro` is the pipeline; this file only spares typing.
.DEFAULT_GOAL := help
PYTHON ?= python3
BIN := .venv/bin
# `dvc repro` runs the stages' commands by name: they must be this environment's.
export PATH := $(CURDIR)/$(BIN):$(PATH)
STAGES := model generate tokenize extract audit vocab train evaluate

.PHONY: help repro plan results test oracle sglang lint lock push pull verify $(STAGES)

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
	@$(MAKE) --no-print-directory sglang || echo 'no SGLang: the tests against its server are skipped'
	python -m pytest

oracle: .venv-oracle/stamp ## an environment with speculators, which the drafter is tested against

.venv-oracle/stamp: tests/oracle/requirements.txt
	$(PYTHON) -m venv .venv-oracle
	.venv-oracle/bin/python -m pip install --quiet torch==2.13.0
	.venv-oracle/bin/python -m pip install --quiet --no-deps -r tests/oracle/requirements.txt
	touch $@

sglang: .venv-sglang/stamp ## an environment with SGLang: for the GPU where there is one, else for the CPU

# nvidia-smi answers exactly where there is a GPU. On a CPU, SGLang needs few of the packages that it names, and the
# patches under patches/source. torch and torchvision come as pip finds them, a CPU build or one with CUDA.
SGLANG_KIND := $(shell nvidia-smi --list-gpus >/dev/null 2>&1 && echo cuda || echo cpu)
CAPTURE := $(wildcard patches/capture/pyproject.toml patches/capture/eaglet_capture/*.py)

.venv-sglang/stamp: patches/env/$(SGLANG_KIND).lock patches/apply.py $(wildcard patches/source/*/*) $(CAPTURE)
	test -x .venv-sglang/bin/python || $(PYTHON) -m venv .venv-sglang
	.venv-sglang/bin/python -m pip install --quiet --upgrade 'pip>=25' 'setuptools>=77'
	.venv-sglang/bin/python -m pip install --quiet torch==2.14.1 torchvision==0.29.1
	.venv-sglang/bin/python -m pip install --quiet --require-hashes --no-deps -r patches/env/$(SGLANG_KIND).lock
	.venv-sglang/bin/python -m pip install --quiet --no-deps --no-build-isolation --force-reinstall ./patches/capture
	test $(SGLANG_KIND) = cuda || .venv-sglang/bin/python patches/apply.py
	touch $@

lint: .venv/stamp ## ruff and mypy --strict
	ruff check .
	ruff format --check .
	mypy

lock: ## resolve the lock files anew (needs uv)
	uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-package torch \
		--no-header --no-emit-index-url --no-annotate --extra dev --extra smollm2 pyproject.toml -o requirements.lock
	cd patches/env && for kind in cpu cuda; do uv pip compile --quiet --config-file $$kind.toml --generate-hashes \
		--python-platform x86_64-manylinux_2_34 --python-version 3.11 --no-emit-package torch \
		--no-emit-package torchvision --no-header --no-emit-index-url --no-annotate $$kind.in -o $$kind.lock; done
