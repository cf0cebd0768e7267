# Everything that is done to this tree, by name. `make help` lists it.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
export PATH := $(CURDIR)/.venv/bin:$(PATH)

CHART := helm/specdec
PYTEST_ARGS ?=
BENCH_ARGS ?= --target qwen-coder-1.5b --draft-model qwen-coder-0.5b --proposer draft_model::int8,draft_model::none,ngram,stacked \
	--take code=8 --take other=2 --json out/bench.json
BENCH_LOAD_ARGS ?= --target smollm2-135m --proposer ngram --json out/load.json
BENCH_SCALE_ARGS ?= --target synthetic:seed=1,forward_ms=30 --proposer draft_model:synthetic:seed=1,acceptance=0.8,forward_ms=1 \
	--drafters 4 --sessions 1,8,64,256 --prompt-tokens 64 --repetitions 2 --json out/scale.json
HOSTILE_ARGS ?= --messages 100000 --json out/hostile.json
BENCH_ENGINE_ARGS ?= --model smollm2-135m --json out/engine.json
CAMPAIGN_ARGS ?= --faults 300 --sessions 16 --log-folder out/campaign-logs --json out/campaign.json
SOAK_MINUTES ?= 30
SOAK_ARGS ?= --log-folder out/soak-logs --json out/soak.json

##@ Use

.PHONY: help
help: ## This list.
	@awk 'BEGIN { FS = ":.*## " } /^##@/ { printf "\n%s\n", substr($$0, 5) } \
		/^[a-z.-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

.PHONY: setup .venv
setup: .venv ## Make or repair .venv and install into it what constraints.txt says.
.venv:
	@.ci/venv

.PHONY: demo
demo: setup ## Start everything with a small model; show that speculation changes speed and no token.
	@specdec demo

.PHONY: bench
bench: setup ## Measure the Qwen pair, speculation off and on. BENCH_ARGS replaces the options.
	@mkdir -p out
	@specdec bench $(BENCH_ARGS)

.PHONY: bench-load
bench-load: setup ## Measure many streams at once on a small model. BENCH_LOAD_ARGS replaces the options.
	@mkdir -p out
	@specdec bench-load $(BENCH_LOAD_ARGS)

.PHONY: bench-scale
bench-scale: setup ## Measure the control plane under hundreds of streams of a synthetic model. BENCH_SCALE_ARGS likewise.
	@mkdir -p out
	@specdec bench-load $(BENCH_SCALE_ARGS)

.PHONY: bench-engine
bench-engine: setup ## Measure what the engine costs beside the forward. BENCH_ENGINE_ARGS likewise.
	@mkdir -p out
	@specdec bench-engine $(BENCH_ENGINE_ARGS)

.PHONY: campaign
campaign: setup ## Inject hundreds of faults while sessions stream; fails where a promise is broken. CAMPAIGN_ARGS likewise.
	@mkdir -p out
	@specdec bench-faults $(CAMPAIGN_ARGS)

.PHONY: soak
soak: setup ## A mixed load with kills for SOAK_MINUTES; fails where a process grows. SOAK_ARGS adds options.
	@mkdir -p out
	@specdec bench-soak --minutes $(SOAK_MINUTES) $(SOAK_ARGS)

.PHONY: hostile
hostile: setup ## Hostile messages, 100,000 to each service, while honest sessions stream. HOSTILE_ARGS likewise.
	@mkdir -p out
	@python -m bench.hostile $(HOSTILE_ARGS)

##@ Check

.PHONY: test
test: setup ## All tests. PYTEST_ARGS adds options.
	@pytest $(PYTEST_ARGS)

.PHONY: chaos
chaos: setup ## Random faults on simulated clusters in virtual time, for CHAOS_SECONDS (600). CHAOS_SEED repeats a failure.
	@python -m tests.simulation.chaos

.PHONY: verify
verify: check test ## Everything that has to pass: all checks, then all tests.

.PHONY: check
check: lint types contracts stubs-fresh protos-lint protos-breaking chart-lint ## All checks, no tests.

.PHONY: lint
lint: setup ## Style and format of the Python code.
	@ruff check
	@ruff format --check

.PHONY: types
types: setup ## Types, strictly.
	@mypy

.PHONY: contracts
contracts: setup ## Which room may import which.
	@lint-imports

.PHONY: stubs-fresh
stubs-fresh: setup ## The committed stubs are those of the protos.
	@fresh=$$(mktemp -d); trap 'rm -rf "$$fresh"' EXIT; \
	.ci/stubs "$$fresh"; \
	diff -r --exclude=__init__.py --exclude=__pycache__ "$$fresh/specdec/v1" specdec/v1 \
		|| { echo 'stale stubs: run `make protos`' >&2; exit 1; }; \
	echo 'The stubs are fresh.'

.PHONY: protos-lint
protos-lint: setup ## Style, comments and format of the protos.
	@buf lint
	@buf format --diff --exit-code

.PHONY: protos-breaking
protos-breaking: setup ## The protos break no caller of the last tagged version.
	@tag=$$(git describe --tags --abbrev=0 2>/dev/null) \
		|| { echo 'No tag yet: nothing that the protos could break.'; exit 0; }; \
	tagged=$$(mktemp -d); trap 'rm -rf "$$tagged"' EXIT; \
	git archive "$$tag" protos buf.yaml | tar -x -C "$$tagged"; \
	buf breaking --against "$$tagged"; \
	echo "The protos break no caller of $$tag."

.PHONY: chart-lint
chart-lint: ## The Helm chart.
	@if [ ! -f $(CHART)/Chart.yaml ]; then echo 'No chart yet: nothing to lint.'; \
	elif ! command -v helm >/dev/null; then echo 'The chart is not linted: helm is not installed.'; \
	else helm lint $(CHART); fi

##@ Mend

.PHONY: fix
fix: setup ## Mend style and format where a tool can.
	@ruff check --fix || true
	@ruff format
	@buf format --write

.PHONY: protos
protos: setup ## Generate the stubs anew from the protos.
	@rm -f specdec/v1/*_pb2*
	@.ci/stubs .
