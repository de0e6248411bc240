# `make help` lists what there is.
VENV ?= .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed-
PROTOC_FLAGS := -Iedgewater/wire=proto/edgewater/v1 --plugin=protoc-gen-mypy=$(VENV)/bin/protoc-gen-mypy

.DEFAULT_GOAL := help
.PHONY: help demo test test-all nightly test-data test-images soak fuzz simulate quick check docs proto reference release lock vendor audit sbom bench goals results compare clean

help: ## what can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-9s %s\n", $$1, $$2}'

$(PY):
	@python3 -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Edgewater needs Python 3.11 or newer; python3 here is %d.%d. Install it and run: make VENV=.venv ..." % sys.version_info[:2])'
	python3 -m venv $(VENV)
	$(PY) -m pip install -q --upgrade pip

# Only files with the hashes of the lock are installed; the checkout itself is built without fetching anything.
$(STAMP)%: $(PY) pyproject.toml requirements/%.txt
	@echo "installing edgewater with the extra $* into $(VENV) …"
	@PYTHONWARNINGS=ignore $(PY) -m pip install -q --require-hashes -r requirements/$*.txt
	@PYTHONWARNINGS=ignore $(PY) -m pip install -q --no-deps --no-build-isolation -e .
	@touch $@

$(STAMP)audit $(STAMP)images: $(STAMP)%: $(PY) requirements/%.txt
	@$(PY) -m pip install -q --require-hashes -r requirements/$*.txt
	@touch $@

# Java's class archive saves the tests' many JVMs half of their start.
$(STAMP)prepared: $(STAMP)dev
	@$(VENV)/bin/edgewater center prepare || echo "tests start Spark without an archive of its classes"
	@touch $@

demo: $(STAMP)demo ## run everything on a year of New York flights: center, three edges, a table at the end
	@$(VENV)/bin/edgewater demo $(ARGS)

# Three workers on two cores: one has the tests that start a JVM and one those that start processes, which wait half of the time
# (tests/conftest.py).
# Bytecode is kept: each process that a test starts would compile the product anew.
# A worker that ends is not replaced: pytest-xdist 3.8 waits for ever for the rest of its group.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(PY) -m pytest -n 3 --dist loadgroup --max-worker-restart 0

test: $(STAMP)prepared ## all tests but the heavy ones, on two cores; ARGS="tests/center -k ledger" picks some
	@$(PYTEST) $(ARGS)

test-all: $(STAMP)prepared ## the same with every law of the synopses on every data set, and the nightly tests
	@$(PYTEST) --full -m "not data and not images" $(ARGS)

nightly: $(STAMP)prepared ## the heavy tests: whole runs, kills, statistics, further cells
	@$(PYTEST) -m "nightly and not data and not images" $(ARGS)

test-data: $(STAMP)dev ## the tests that need the data sets in ../shared/data
	@test -d ../shared/data || { echo "make test-data: there is no ../shared/data; make test needs none"; exit 1; }
	@$(PYTEST) -m data $(ARGS)

# One process: containers share ports, memory and a storage of images.
test-images: $(STAMP)dev $(STAMP)images ## build both images and run them: compose, the dev overlay; root, Debian's podman, 6 to 12 minutes
	@env -u PYTHONDONTWRITEBYTECODE $(PY) -m pytest tests/images -m images -rP -o faulthandler_timeout=0 $(ARGS)

SECONDS ?= 600
SEED ?= 1
soak: $(STAMP)dev ## real processes under drawn faults, all answers compared with the truth; SECONDS=600 SEED=1 ARGS="--faults rename,cut"
	@$(PY) -m tests.e2e.soak --seconds $(SECONDS) --seed $(SEED) $(ARGS)

fuzz: $(STAMP)dev ## frames, synopses and what else comes from outside, changed at random; SECONDS=600 SEED=1 ARGS="--only partial/kll"
	@$(PY) -m bench.hostile --seconds $(SECONDS) --seed $(SEED) $(ARGS)

SEEDS ?= 0..1000
simulate: $(STAMP)dev ## the whole system in virtual time, killed at every step, checked against the truth; SEEDS=A..B
	@$(PY) -m tests.simulation --seeds $(SEEDS) $(ARGS)

# The cores, where most faults are found. Left out: faces, targets, offline tools, and what starts processes.
QUICK := tests/edge tests/edgewater tests/golden tests/docs/test_citations.py tests/docs/test_docstrings.py \
	$(addprefix tests/center/,batch budgets catalog early ingest ledger results serving storage) \
	$(addprefix tests/center/api/test_api_,answers.py queries.py)

quick: $(STAMP)dev ## lint, and one cell of each fast test of the cores; less than a minute
	@$(VENV)/bin/ruff check -q .
	@$(PYTEST) -n 2 --quick --ignore=tests/edgewater/client --ignore=tests/edgewater/runtime $(QUICK) $(ARGS)

check: $(STAMP)dev ## lint, format, types, import rules, generated code up to date
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	@$(MAKE) -s proto OUT=build/proto && for f in build/proto/edgewater/wire/*; do \
		cmp "$$f" "edgewater/wire/$$(basename $$f)" || { echo "run: make proto"; exit 1; }; done
	@$(PY) -m tests.docs.configuration_reference --check
	@$(PY) -m tests.docs.constants_reference --check
	@$(MAKE) -s docs

docs: $(STAMP)dev ## build the site in build/site, with search; a link without a target fails
	@mkdir -p build && NO_MKDOCS_2_WARNING=1 $(PY) -W ignore -m mkdocs build >build/site.log 2>&1 || { cat build/site.log; exit 1; }

OUT ?= .
proto: $(STAMP)dev ## generate edgewater/wire from proto/
	@mkdir -p $(OUT)
	@$(PY) -m grpc_tools.protoc $(PROTOC_FLAGS) --python_out=$(OUT) --mypy_out=quiet:$(OUT) \
		edgewater/wire/synopsis.proto edgewater/wire/uplink.proto edgewater/wire/remote_write.proto
	@$(PY) -m grpc_tools.protoc $(PROTOC_FLAGS) --grpc_python_out=$(OUT) edgewater/wire/uplink.proto

reference: $(STAMP)dev ## write what follows from the code: commands, metrics and configuration in docs/reference, rules in k8s
	@$(PY) -m tests.docs.cli_reference
	@$(PY) -m tests.docs.configuration_reference
	@$(PY) -m tests.docs.metrics_reference
	@$(PY) -m tests.docs.causes_reference
	@$(PY) deploy/monitoring.py

SOURCES = kafka mqtt otlp remote-write
# One resolution, `dev`; the other files are parts of it.
COMPILE = $(VENV)/bin/uv pip compile -q --universal --generate-hashes --no-annotate --no-header --python-version 3.11

release: $(STAMP)dev ## the commits of a release, VERSION=0.3.0, without a tag
	@$(PY) deploy/release.py $(VERSION)

lock: $(STAMP)audit ## renew requirements/: versions and hashes of all packages; ARGS=--upgrade takes the newest
	@$(COMPILE) $(ARGS) pyproject.toml requirements/build.in --extra dev -o requirements/dev.txt
	@$(COMPILE) -c requirements/dev.txt pyproject.toml requirements/build.in --extra demo -o requirements/demo.txt
	@$(COMPILE) -c requirements/dev.txt pyproject.toml requirements/build.in --extra center --extra postgres --extra sql --extra kafka --extra remote-write \
		-o requirements/center.txt
	@$(COMPILE) -c requirements/dev.txt pyproject.toml requirements/build.in -o requirements/edge.txt
	@$(COMPILE) -c requirements/dev.txt pyproject.toml requirements/build.in $(SOURCES:%=--extra %) \
		-o requirements/edge-sources.txt
	@$(COMPILE) $(ARGS) -c requirements/dev.txt requirements/audit.in -o requirements/audit.txt
	@$(COMPILE) $(ARGS) -c requirements/dev.txt requirements/images.in -o requirements/images.txt
	@echo "requirements/ is renewed; run: make check test"

vendor: $(PY) ## renew the console's libraries in center/api/ui/vendor, with npm
	@$(PY) deploy/vendor.py

audit: $(STAMP)audit ## bandit on the product, and known vulnerabilities of what it installs
	$(VENV)/bin/bandit -q -c pyproject.toml -r edgewater edge center sim
	$(VENV)/bin/pip-audit --disable-pip --no-deps -r requirements/center.txt -r requirements/edge-sources.txt

sbom: $(STAMP)dev $(STAMP)audit ## what edge and center consist of, with licences and Spark's jars, as CycloneDX, in build/sbom
	@mkdir -p build/sbom
	@for part in edge edge-sources center; do \
		PYTHONWARNINGS=ignore $(VENV)/bin/cyclonedx-py requirements requirements/$$part.txt --pyproject pyproject.toml --mc-type application \
			--output-reproducible -o build/sbom/$$part.cdx.json && $(PY) deploy/sbom.py build/sbom/$$part.cdx.json && echo build/sbom/$$part.cdx.json; done

bench: $(STAMP)dev ## one edge and one center, in bench/out; docs/results.md names the other benches
	$(PY) -m bench.first_light $(ARGS)

goals: $(STAMP)dev ## the figures that pages state, against their limits: benches below ten minutes; ARGS=--all, --list or names
	@$(PY) -m bench.goals $(ARGS)

results: $(STAMP)dev ## put the figures of bench/out into docs/results.md and docs/explanation/papers.md; says what is missing
	@$(PY) -m bench.results

FLINK := .venv-flink/bin/python
$(FLINK):
	python3 -m venv .venv-flink
	@PYTHONWARNINGS=ignore $@ -m pip install -q apache-flink==2.3.0 zstandard || { rm -rf .venv-flink; exit 1; }

# Flink needs versions of its packages that the product does not have.
compare: $(STAMP)dev $(if $(findstring quick,$(ARGS)),,$(FLINK)) ## Edgewater beside scripts, Spark and Flink on narrow links; ARGS=quick takes five minutes
	@$(PY) -m bench.compare $(if $(wildcard $(FLINK)),--flink $(FLINK)) $(ARGS)

clean: ## remove what was built, not the virtual environment
	rm -rf build dist .edgewater bench/out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
