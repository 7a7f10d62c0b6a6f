# Every target sets up .venv by itself (launch/setup.sh does nothing when it is up to date).
.DEFAULT_GOAL := help
PYTHON := .venv/bin/python
PYTEST := $(PYTHON) -m pytest
TE := $(HOME)/.cache/megarl/transformer-engine
.PHONY: help setup quickstart quickstart-moe quickstart-tools quickstart-agent quickstart-real test test-unit test-predict test-slow test-agents test-faults test-recipes test-families test-gpu-paths soak lint docs bench bench-gpu lock clean

help:            ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 16

setup:           ## .venv with the pinned CPU stack
	@launch/setup.sh

quickstart: setup ## train a tiny policy with real Megatron and real SGLang, in minutes (ARGS="run.seed=1")
	@launch/quickstart.sh $(ARGS)

quickstart-real: setup ## train a real pretrained model, SmolLM2-135M-Instruct, to answer sums (ARGS="run.seed=1")
	@launch/quickstart-real.sh $(ARGS)

quickstart-moe: setup ## the same with a tiny Llama 4 of experts
	@launch/quickstart.sh quickstart-moe $(ARGS)

quickstart-tools: setup ## the same with products and a calculator to call
	@launch/quickstart.sh quickstart-tools $(ARGS)

quickstart-agent: setup ## the same by an agent, a program of its own that speaks to the policy by HTTP
	@launch/quickstart.sh quickstart-agent $(ARGS)

test: setup lint ## everything CI runs: lint, unit, parallel layouts, the real roles together, the quicker faults
	$(PYTEST) tests -n 4 --dist loadfile --no-loadscope-reorder -m "not slow and not te"

test-unit: setup ## what needs no server, no process group and no process of its own: six minutes on two cores
	$(PYTEST) tests/unit -n 2 -m "not slow and not processes"

test-predict: setup ## the planner, scaling laws, studies and benchmarks, with what "make test" leaves out of them
	$(PYTEST) tests/unit/predict tests/unit/benchmarks tests/e2e/test_study.py -n 2

test-slow: setup ## what "make test" leaves out: more recipes, layouts and faults, real runs on a real Slurm: about an hour
	$(PYTEST) tests -m slow

test-agents: setup ## agents' harnesses as they are published, from PyPI, against real runs: ten minutes
	$(PYTEST) tests/e2e/test_agents.py -v -s

test-faults: setup ## every fault of benchmarks/faults.md, those of "make test" too, and real runs on a real Slurm
	$(PYTEST) tests -m faults

test-recipes: setup ## every shipped recipe at a tiny size, by "megarl train" in its own precision: about a minute each
	$(PYTEST) tests/unit/test_recipe_twins.py tests/e2e/test_recipe_twins.py -v

FAMILIES := unit/core/models/test_families.py unit/checkpoints_tools/test_round_trips.py parallel/test_models_layouts.py \
	parallel/test_routing_replay.py stack/test_server_families.py

test-families: setup ## each family of models on both sides: against transformers at every layout, served, published, converted
	$(PYTEST) $(FAMILIES:%=tests/%) -v

test-gpu-paths: setup ## what goes on a CPU of a GPU's layers, Transformer Engine's: the first time it compiles them, with a CUDA toolkit
	launch/build_te.sh $(PYTHON) $(TE) $(TE)/site
	PYTHONPATH=$(TE)/site $(PYTEST) tests/parallel/test_te_layers.py -m te

soak: setup      ## two hours of the quickstart with a random fault every few minutes (ARGS="--seconds 900")
	$(PYTHON) -m tests.soak $(ARGS)

lint: setup      ## ruff and mypy
	$(PYTHON) -m ruff check megarl checkpoints_tools tests benchmarks examples launch setup.py
	$(PYTHON) -m ruff format --check megarl checkpoints_tools tests benchmarks examples launch setup.py
	$(PYTHON) -m mypy megarl checkpoints_tools tests

docs: setup      ## docs/ as a site with a search field, in site/index.html: no network is needed to build or to read it
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict

bench: setup     ## benchmarks/end_to_end.py: megarl against TRL and against its own bound
	launch/bench.sh

bench-gpu:       ## measure a GPU in half an hour, also where there is no network (ARGS="--wheels DIR"; benchmarks/gpu/README.md)
	@benchmarks/gpu/run.sh $(ARGS)

lock: setup      ## pin what requirements/cpu.in and gpu.in ask for (ARGS=--upgrade: the newest of all)
	launch/lock.sh $(ARGS)

clean:           ## remove runs/ and site/ (keeps .venv)
	rm -rf runs site
