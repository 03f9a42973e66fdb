# Needs Python 3.11 or newer, git and make; everything else comes from the locks in requirements/, by hash.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules --no-print-directory

VENV := .venv
BIN := $(VENV)/bin
# torch 2.13 has wheels for 3.11 to 3.14.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	"$$p" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null && echo "$$p" && break; done)

# A folder at the root is called operator: a Python started here must never find it before the standard library's.
export PYTHONSAFEPATH := 1
export OMP_NUM_THREADS ?= 1
# Compiled bytecode halves every start of torch.
unexport PYTHONDONTWRITEBYTECODE

# The environment is as fresh as the content of what it was made from: mtimes change with every clone.
KEY := $(shell { cat requirements/uv.lock.txt requirements/run.lock requirements/dev.lock; sed '/^\[tool/,$$d' pyproject.toml; } \
	| git hash-object --stdin)
DEV := $(VENV)/.setup/dev-$(KEY)
# The developer's environment holds all that a run needs: a machine that has one installs nothing twice.
RUN := $(if $(wildcard $(DEV)),$(DEV),$(VENV)/.setup/run-$(KEY))
SETUP_TIMES := $(if $(wildcard $(RUN)),,$(VENV)/.setup-times.json)

CONCURRENT := $(wildcard tests/unit tests/property tests/contract tests/simulator tests/golden)
OTHER := $(filter-out $(CONCURRENT) tests/browser tests/cluster tests/device tests/nodes tests/services tests/soak,$(patsubst %/,%,$(wildcard tests/*/)))
ANYWHERE := not browser and not cluster and not device and not nodes and not services and not soak
# Property tests draw other examples with each commit, and the same ones whenever a commit is tested again (tests/conftest.py).
SEED ?= $(or $(shell git rev-parse --short=12 HEAD 2> /dev/null),0)
PYTEST := $(BIN)/python -m pytest --hypothesis-profile=ci --hypothesis-seed=$(SEED) -q
TWO_CORES := -n 2 --dist loadfile
# Two control planes, one a process; a cluster that KUBECONFIG names is one. In the order of the names: the long stories are not all last.
TWO_CLUSTERS := $(if $(KUBECONFIG),,$(TWO_CORES) --no-loadscope-reorder)
CLUSTER := PYTHONPATH=. $(BIN)/python -m tools.cluster
SERVICES := PYTHONPATH=. $(BIN)/python -m tools.services
IMAGE_TOOL := PYTHONPATH=. $(BIN)/python -m tools.images
IMAGE_OPTIONS = $(if $(BASE),--base $(BASE)) $(if $(BUILDER),--builder $(BUILDER)) $(if $(PREFIX),--prefix $(PREFIX)) \
	$(if $(TAG),--tag $(TAG)) $(if $(ENGINE),--engine $(ENGINE)) $(if $(THIN),--thin $(THIN))
BENCHMARKS := $(subst _,-,$(patsubst benchmarks/%/run.py,%,$(wildcard benchmarks/*/run.py)))
GPU_PEERS := $(or $(POLYREME_GPU_PEERS),$(HOME)/.cache/polyreme/gpu-peers)
SOAKS := $(subst _,-,$(patsubst tests/soak/%.py,%,$(wildcard tests/soak/*.py)))

.PHONY: help setup quickstart lint check test test-concurrent test-whole test-servers test-all test-services test-browser servers services-build services-up services-down services-status cluster-up cluster-path cluster-down test-cluster test-nodes test-device gpu-day images images-list images-load release-check audit docs docs-site pictures manifests lock format clean bench gpu-peers

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z%-]+:.*## / {printf "make %-16s %s\n", $$1, $$2}' Makefile
	@echo "benchmarks: $(or $(BENCHMARKS),none yet); soaks: $(or $(SOAKS),none yet)"

setup: $(DEV) ## make the developer's environment in .venv, from the locks

$(VENV)/.setup/%-$(KEY):
	@test -n "$(PYTHON)" || { echo "no Python from 3.11 to 3.14 on PATH: install one, or say make PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" tools/setup_venv.py --venv $(VENV) --lock requirements/$*.lock --stamp $@

quickstart: $(RUN) ## set up and run the main job, with a rank killed half-way
	@POLYREME_SETUP_TIMES="$(SETUP_TIMES)" $(BIN)/python -m polyreme.commands.quickstart

lint: $(DEV) ## style, format, types, layers, avoided words
	@# mypy takes most of the time. Its parallel workers must start within 3 s each, which a busy machine misses.
	@mkdir -p build; status=0; \
	$(BIN)/mypy --no-error-summary > build/types.txt 2>&1 & typing=$$!; \
	$(BIN)/ruff check --output-format=concise --quiet . || status=1; \
	$(BIN)/ruff format --check --output-format=concise --quiet . || status=1; \
	$(BIN)/lint-imports > build/layers.txt 2>&1 || { cat build/layers.txt; status=1; }; \
	$(BIN)/python tools/avoided_words.py || status=1; \
	wait $$typing || { cat build/types.txt; status=1; }; \
	exit $$status

check: lint ## the developer's loop: lint, unit, property, contracts on the embedded parts
	@$(PYTEST) $(TWO_CORES) -m "$(ANYWHERE)" $(wildcard tests/unit tests/property tests/contract)

test: $(DEV) ## set up and pass the tests that need no server
	@$(BIN)/python tools/run_targets.py lint test-concurrent test-whole

test-servers: $(DEV) ## the tests on real servers: PostgreSQL, Pulsar, S3, Kubernetes; gets what it needs once
	@# Kubernetes is compiled beside the tests that need none.
	@$(BIN)/python tools/run_targets.py services-build test-services test-browser servers test-cluster test-nodes

test-all: $(DEV) ## both: what CI runs
	@# The servers are built beside the tests that need none, with what these leave of the cores; who needs one waits.
	@mkdir -p build; nice -n 19 env $(MAKE) servers > build/servers.log 2>&1 & \
	building=$$!; status=0; $(MAKE) test || status=1; $(MAKE) test-servers || status=1; \
	kill $$building 2> /dev/null || true; exit $$status

services-build: $(DEV) ## get the S3 server (by Go), Pulsar (by Maven) and, as root, Debian packages, once for all checkouts
	@$(SERVICES) build
	@PYTHONPATH=. $(BIN)/python -m tools.debian

servers: services-build ## get all servers: those of services-build, and Kubernetes (by Go)
	@$(CLUSTER) build

test-concurrent: $(DEV) ## the tests that share nothing, on two cores
	@$(PYTEST) $(TWO_CORES) -m "$(ANYWHERE)" --junit-xml=build/reports/$@.xml $(CONCURRENT)

test-whole: $(DEV) ## the folders of tests that start many processes each
	@$(if $(OTHER),$(PYTEST) --timeout=900 -n 3 --dist loadfile -m "$(ANYWHERE)" --junit-xml=build/reports/$@.xml $(OTHER),echo "no such folder yet")

test-services: $(DEV) ## the tests on PostgreSQL, Pulsar and S3
	@$(PYTEST) --timeout=900 $(TWO_CORES) -m "services and not cluster" --junit-xml=build/reports/$@.xml tests

services-up: $(DEV) ## start PostgreSQL, Pulsar and S3, on loopback or LISTEN=bridge|ADDRESS; prints the variables that name them, as lines for a shell
	@$(SERVICES) up $(if $(LISTEN),--listen $(LISTEN))

services-down: $(DEV) ## stop what services-up started, and delete its data
	@$(SERVICES) down

services-status: $(DEV) ## which of the services run
	@$(SERVICES) status

cluster-up: $(DEV) ## a Kubernetes control plane on this machine (KUBECONFIG, KUBEBUILDER_ASSETS, or built once with Go); with NODES=2, nodes that run pods
	@$(CLUSTER) up --nodes $(or $(NODES),0)

cluster-path: $(DEV) ## print the folders of kubectl and Helm for PATH, building what is missing
	@$(CLUSTER) path

cluster-down: $(DEV) ## stop what cluster-up started, and nothing else
	@$(CLUSTER) down

# BASE=local where no registry is reached: the base is then made of Debian packages, which takes root.
images: $(DEV) ## build the images into build/images (IMAGES="operator datahub" THIN= BASE=IMAGE|local BUILDER= PREFIX= TAG= ENGINE=)
	@$(IMAGE_TOOL) build $(IMAGES) $(IMAGE_OPTIONS)

images-list: $(DEV) ## print the names of all images, one a line, for a mirror (PREFIX= TAG=)
	@$(IMAGE_TOOL) list $(if $(PREFIX),--prefix $(PREFIX)) $(if $(TAG),--tag $(TAG))

images-load: $(DEV) ## load the archives of build/images into the nodes of a cluster (CLUSTER=kind|kind-NAME|k3s|local)
	@test "$(origin CLUSTER)" = "command line" || { echo "which cluster? make images-load CLUSTER=kind|kind-NAME|k3s|local" >&2; exit 2; }
	@$(IMAGE_TOOL) load $(CLUSTER)

test-browser: $(DEV) ## the console, the report and the docs' site in Chromium (Debian's, which root gets once)
	@$(MAKE) --no-print-directory docs-site
	@$(PYTEST) --timeout=900 -m browser --junit-xml=build/reports/$@.xml tests/browser

test-cluster: $(DEV) ## the tests on a real API server: the one that is up, or one of their own
	@$(CLUSTER) build > /dev/null
	@$(PYTEST) $(TWO_CLUSTERS) -m "cluster and not soak" --junit-xml=build/reports/$@.xml tests/cluster

test-nodes: $(DEV) ## the tests on nodes that run pods in containers (root): those that KUBECONFIG names, or on this machine
	@$(CLUSTER) build > /dev/null
	@$(PYTEST) --timeout=900 -m nodes --junit-xml=build/reports/$@.xml tests/nodes

format: $(DEV) ## rewrite the sources in the house's format
	@$(BIN)/ruff check --fix --quiet . ; $(BIN)/ruff format --quiet .

docs: $(DEV) ## regenerate the generated pages, check every link and the form of pages
	@PYTHONPATH=. $(BIN)/python -m tools.generate_crds
	@$(BIN)/python tools/exit_codes.py docs/reference/exit-codes.md
	@$(BIN)/python tools/metrics_page.py docs/reference/metrics.md
	@$(BIN)/python tools/python_page.py docs/reference/python.md
	@$(BIN)/python tools/links.py
	@PYTHONPATH=. $(BIN)/python -m tools.page_form

docs-site: build/site-tools/.made ## the docs as a site with search in build/site, for a browser or any web server; broken links end it
	@PYTHONPATH=. $(BIN)/python -m tools.docs_site build/site-tools/bin/mkdocs

pictures: $(DEV) ## take the pictures of the README, with Debian's chromium
	@$(BIN)/python tools/pictures.py

manifests: $(DEV) ## write manifests/ and the chart's golden files from charts/polyreme (by Helm, built once)
	@PYTHONPATH=. $(BIN)/python -m tools.charts

lock: $(DEV) ## renew the locks from pyproject.toml (UPGRADE=1 for newer versions)
	@BIN=$(BIN) tools/lock.sh $(if $(UPGRADE),--upgrade)

bench-%: $(DEV) ## one benchmark
	@test -f benchmarks/$(subst -,_,$*)/run.py || { echo "no benchmark $*; there are: $(BENCHMARKS)" >&2; exit 2; }
	@$(BIN)/python benchmarks/$(subst -,_,$*)/run.py

# The GPU suite is by itself: without a CUDA device it ends with code 7.
bench: $(addprefix bench-,$(filter-out gpu,$(BENCHMARKS))) ## every benchmark that needs no accelerator, one after the other

# twine and pip-audit, and MkDocs, each from a lock of their own: they bring 70 packages that nothing else needs.
RELEASE_TOOLS := build/release/tools
$(RELEASE_TOOLS)/.made: requirements/release.lock $(DEV)
build/site-tools/.made: requirements/site.lock $(DEV)
$(RELEASE_TOOLS)/.made build/site-tools/.made:
	@rm -rf $(@D); $(BIN)/uv venv --quiet --python $(BIN)/python $(@D)
	@$(BIN)/uv pip install --quiet --python $(@D)/bin/python --require-hashes --no-deps -r $<
	@touch $@

release-check: $(RELEASE_TOOLS)/.made ## wheel, sdist, each extra alone, one version of wheel, chart and images
	@PYTHONPATH=. $(BIN)/python -m tools.release_check

# --strict: a package that could not be looked up is a failure, and not an audit.
audit: $(RELEASE_TOOLS)/.made ## known vulnerabilities of what images and developers install; asks the package index
	@$(RELEASE_TOOLS)/bin/pip-audit --strict --progress-spinner off --disable-pip --require-hashes \
		$(foreach lock,operator datahub trainer cli dev,-r requirements/$(lock).lock)

gpu-peers: $(DEV) ## whom the GPU suite compares with, in a folder of their own
	@$(BIN)/python -m pip install --quiet --no-deps --upgrade --target "$(GPU_PEERS)" -r benchmarks/gpu/peers.txt

test-device: $(DEV) ## the tests on an accelerator; they fail where there is none
	@$(PYTEST) --timeout=900 -m device --junit-xml=build/reports/$@.xml tests/device

gpu-day: $(DEV) ## a first day with GPUs, in 25 minutes: tests, a traced step, the suite beside its peers, a table; continues where it was
	@$(BIN)/python benchmarks/gpu/day.py

soak-%: $(DEV) ## one test that is too long for CI
	@test -f tests/soak/$(subst -,_,$*).py || { echo "no soak is called $*; there are: $(SOAKS)" >&2; exit 2; }
	@$(BIN)/python tests/soak/$(subst -,_,$*).py

clean: ## remove the environment and every cache
	@rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
