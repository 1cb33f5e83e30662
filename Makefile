# Every target works in a fresh clone: it makes .venv and installs requirements.lock there first (seconds when nothing changed).
#
#   make quickstart    train the small model of examples/quickstart.json
#   make test          the tests, seven minutes on two quick cores; ARGS="-k topology" passes options to pytest
#   make simulated     the tests on a simulated CUDA device (needs a C++ compiler); RUN=/path/to/python
#                      runs them with another torch, built with CUDA or without
#   make simulated-docs   runs these tests and more, and writes docs/development/simulated_device.md (half an hour)
#   make waits         takes every wait for a device out, one at a time, and reports which of these tests
#                      notices; writes docs/development/waits.md
#   make validate-gpus   Plait on this machine's GPUs: waits, parity, throughput, memory (8 minutes; ARGS="--minutes 5"); exit code 6 without
#   make lint types layers    formatting and lint, types, import layers
#   make object-stores    checkpoints against a real S3 API (moto's server), in an environment of its own beside .venv
#   make proof         the full test matrix (hours)
#   make bitsandbytes     adapters on weights of bitsandbytes (QLoRA) with the library, in an environment of its own beside .venv
#   make torchao       recorded numbers of low-bit optimizer states and quantised folders compared with torchao, in a separate environment
#   make versions      every technique on torch 2.11 to 2.15, in separate environments (GBs; ARGS="2.14.1");
#                      writes docs/development/versions.md
#   make versions-lowest versions-newest    tests with the lowest and the newest packages that pyproject.toml
#                      allows, in separate environments; writes docs/development/versions-packages.md
#   make mutants       plants every defect of tools/mutants/defects, one at a time, and reports which test notices it
#                      (an hour or two; ARGS=--again: only the tests that noticed them the last time, half an hour)
#   make step-counts   kernels, copies, collectives and waits of a step compared with plain torch, minutes
#                      (needs a C++ compiler); writes docs/development/step_counts.md
#   make faults        plants faults in runs and checkpoints and checks the outcome, minutes; ARGS=nightly for all;
#                      writes docs/development/faults.md
#   make reference-docs writes docs/reference: configuration, command line, Python
#   make coverage-docs writes docs/development/coverage.md from the last test runs
#   make model-types   docs/reference/model_types.md: every model type under four layouts and loaded (an hour on two cores; resumes where it was stopped)
#   make combinations  layouts of long sequences and experts compared with one process (ten minutes, two
#                      cores); writes docs/development/combinations.md
#   make lock          requirements.lock from what .venv holds now, and tools/locks from the environments beside it
#
# PYTHON=/path/to/python3.12 chooses the interpreter; by default one is found.
# PIP_ARGS="--index-url https://..." passes options to pip, for a mirror. Without an NVIDIA GPU, torch is installed without CUDA.

SHELL := bash
.DEFAULT_GOAL := help
.PHONY: help environment quickstart test validate-gpus simulated simulated-docs waits object-stores bitsandbytes torchao versions versions-lowest versions-newest mutants proof lint format types layers step-counts faults reference-docs coverage-docs model-types combinations lock clean

VENV := .venv
RUN := $(VENV)/bin/python
RESULTS := build/results

help:
	@sed -n 's/^#   make /make /p' Makefile

environment:
	@VENV="$(VENV)" PYTHON="$(PYTHON)" PIP_ARGS="$(PIP_ARGS)" bash tools/environment.sh

quickstart: environment
	$(VENV)/bin/plait train examples/quickstart.json

test: environment
	@mkdir -p $(RESULTS)
	$(RUN) tools/tests.py $(ARGS)

simulated: environment
	@mkdir -p $(RESULTS)
	PYTHONPATH=$(CURDIR)/src OMP_NUM_THREADS=1 $(RUN) -m pytest tests/simulated_device --junitxml=$(RESULTS)/simulated.xml $(ARGS)

simulated-docs: environment
	@mkdir -p $(RESULTS)
	OMP_NUM_THREADS=1 $(RUN) -m pytest tests/simulated_device -m "not proof and not gpu" --junitxml=$(RESULTS)/simulated.xml $(ARGS)
	PYTHONPATH=src $(RUN) -m tools.simulated_table $(RESULTS)/simulated.xml

waits: environment
	OMP_NUM_THREADS=1 $(RUN) -m tools.mutants --waits $(ARGS)

validate-gpus: environment
	@mkdir -p $(RESULTS)
	$(VENV)/bin/plait doctor --validate --out $(RESULTS)/validation.json $(ARGS)

object-stores: environment
	@PIP_ARGS="$(PIP_ARGS)" bash tools/beside.sh object-stores $(RUN) -m pytest tests/parity/test_object_store.py $(ARGS)

bitsandbytes: environment
	@PIP_ARGS="$(PIP_ARGS)" bash tools/beside.sh bitsandbytes $(RUN) -m pytest tests/parity/test_quantised_adapters.py $(ARGS)

torchao: environment
	@PIP_ARGS="$(PIP_ARGS)" bash tools/beside.sh torchao $(RUN) -m tests.unit.optim.torchao_numbers --check
	@PIP_ARGS="$(PIP_ARGS)" bash tools/beside.sh torchao $(RUN) -m pytest tests/unit/inference/test_quantised_folders.py $(ARGS)

versions:
	PYTHON="$(PYTHON)" PIP_ARGS="$(PIP_ARGS)" bash tools/versions.sh $(ARGS)

versions-lowest versions-newest:
	PYTHON="$(PYTHON)" PIP_ARGS="$(PIP_ARGS)" bash tools/packages.sh $(@:versions-%=%) $(ARGS)

mutants: environment
	$(RUN) -m tools.mutants $(ARGS)

proof: environment
	@mkdir -p $(RESULTS)
	$(RUN) -m pytest -m "proof or not gpu" --junitxml=$(RESULTS)/proof.xml $(ARGS)

lint: environment
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check

format: environment
	$(RUN) -m ruff check --fix
	$(RUN) -m ruff format

types: environment
	$(RUN) -m mypy

layers: environment
	$(VENV)/bin/lint-imports

step-counts: environment
	PYTHONPATH=src OMP_NUM_THREADS=1 $(RUN) -m benchmarks.step_counts $(ARGS)

faults: environment
	OMP_NUM_THREADS=1 $(RUN) -m tools.faults $(ARGS)

reference-docs: environment
	PYTHONPATH=src $(RUN) -m tools.reference $(ARGS)

coverage-docs: environment
	PYTHONPATH=src $(RUN) -m tools.coverage $(wildcard $(RESULTS)/*.xml)

model-types: environment
	PYTHONPATH=src OMP_NUM_THREADS=1 $(RUN) -m tools.model_types $(ARGS)

combinations: environment
	@mkdir -p $(RESULTS)
	-OMP_NUM_THREADS=1 $(RUN) -m pytest -m "proof or not proof" tests/parity/test_combinations.py --junitxml=$(RESULTS)/combinations.xml
	PYTHONPATH=src $(RUN) -m tools.combinations $(RESULTS)/combinations.xml

lock:
	bash tools/lock.sh $(RUN)

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
