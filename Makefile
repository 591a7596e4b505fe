# Each of run, test and lint makes its own .venv on the first call and skips that on later ones.
PYTHON ?= python3
TORCH ?= torch==2.13.0
PIP_ARGS ?=
ARGS ?=

VENV := .venv/bin/python
# A build of torch that was asked for by hand replaces the installed one; the default never does.
ASKED := $(if $(filter-out file undefined default,$(origin TORCH) $(origin PIP_ARGS)),--asked)

.DEFAULT_GOAL := help
.PHONY: help setup run serve test agents test-agents test-browser soak lint eval promote verify-results figures sanitize clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s%s\n", $$1, $$2}' Makefile
	@echo
	@echo "  ARGS='experiment=NAME ...' goes to run.py, ARGS='-k NAME' to pytest. run.py --help lists experiments."
	@echo "  Another build of torch: TORCH='torch==...' PIP_ARGS='--extra-index-url ...'. Another Python: PYTHON=..."

setup:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("error: Python 3.11 or newer is needed, \
	$(PYTHON) is %d.%d\nhint: make PYTHON=<a newer python> ..." % sys.version_info[:2])'
	@$(PYTHON) .ci/setup.py $(ASKED) --torch '$(TORCH)' --pip-args='$(PIP_ARGS)'

run: setup ## decode real text through the machine, and check it
	@$(VENV) run.py $(ARGS)

serve: setup ## an OpenAI server: make serve [port=8000] [model=nano, a folder or a hub id]
	@$(VENV) run.py experiment=serve $(if $(port),server.port=$(port)) \
	$(if $(model),$(if $(wildcard configs/model/$(model).yaml),model=$(model),model.path=$(model))) $(ARGS)

test: setup ## all tests, on every core; those that need a GPU are skipped without one
	@$(VENV) -m pytest -n auto --maxprocesses 8 --dist worksteal $(ARGS)

agents: ## OpenCode and Cline (npm) and Aider in build/agents, for experiment=agent_trial
	@npm install --no-audit --no-fund --prefix build/agents opencode-ai@1.18.33 cline@3.0.65
	@test -x build/agents/aider/bin/aider || { $(PYTHON) -m venv build/agents/aider && \
	build/agents/aider/bin/pip install -q aider-chat==0.86.2; }

test-agents: setup agents ## those, LangChain and lm_eval against the server, with a scripted model
	@test -x build/agents/langchain/bin/python || { $(PYTHON) -m venv build/agents/langchain && \
	build/agents/langchain/bin/pip install -q langchain-openai==1.7.4; }
	@$(VENV) -m pytest tests/test_agents.py tests/test_serving_lm_eval.py -q -rs $(ARGS)

test-browser: setup ## the report of results/ in a headless Chromium, which must be installed
	@$(VENV) -m pip install -q --disable-pip-version-check -c constraints.txt playwright
	@BROWSER=1 $(VENV) -m pytest tests/test_browser.py -q -rs $(ARGS)

soak: setup ## 2,000 mixed requests to a scripted model, 120 to the interpreter, a third of them broken off, twice
	@SOAK=10 $(VENV) -m pytest tests/test_soak.py -q -n auto --maxprocesses 4 --dist worksteal --timeout 3600 $(ARGS)

lint: setup ## ruff, and mypy on mk/
	@$(VENV) -m ruff check .
	@$(VENV) -m mypy

eval: setup ## score a benchmark: make eval benchmark=nano_code [model=..] [base_url=..] [data_dir=..] [limit=..] [runs=..]
	@$(VENV) run.py experiment=accuracy $(if $(benchmark),benchmark=$(benchmark)) \
	$(if $(model),$(if $(base_url),experiment.served_model=$(model),\
	$(if $(wildcard configs/model/$(model).yaml),model=$(model),model.path=$(model)))) \
	$(foreach key,base_url data_dir limit runs,$(if $($(key)),experiment.$(key)=$($(key)))) $(ARGS)

promote: setup ## keep runs: make promote run=ID[,ID...] copies rows, raw data and configuration to results/<card>/
	@$(VENV) -m mk.results promote '$(run)'

verify-results: setup ## compute every kept row from its raw data again, and the README's tables and lists from the rows
	@$(VENV) -m mk.results verify

figures: setup ## draw results/figures/ and results/report.html from the kept rows
	@$(VENV) -m mk.report

sanitize: setup ## memcheck and racecheck over the kernel, on a Hopper GPU
	@$(VENV) run.py experiment=sanitize $(ARGS)

clean: ## remove .venv, caches and built kernels; runs/ stays
	rm -rf .venv build *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
