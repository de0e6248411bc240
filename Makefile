# `make help` lists what there is.
VENV ?= .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed-
PROTOC_FLAGS := -Iedgewater/wire=proto/edgewater/v1 --plugin=protoc-gen-mypy=$(VENV)/bin/protoc-gen-mypy

.DEFAULT_GOAL := help
.PHONY: help demo test quick check proto bench clean

help: ## what can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-8s %s\n", $$1, $$2}'

$(PY):
	@python3 -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Edgewater needs Python 3.11 or newer; python3 here is %d.%d. Install it and run: make VENV=.venv ..." % sys.version_info[:2])'
	python3 -m venv $(VENV)
	$(PY) -m pip install -q --upgrade pip

$(STAMP)%: $(PY) pyproject.toml
	@echo "installing edgewater[$*] into $(VENV) …"
	@PYTHONWARNINGS=ignore $(PY) -m pip install -q -e '.[$*]'
	@touch $@

demo: $(STAMP)demo ## run everything on a year of New York flights: center, three edges, a table at the end
	@$(VENV)/bin/edgewater demo $(ARGS)

test: $(STAMP)dev ## all tests: what needs no JVM and no processes on both cores, then the rest one by one
	@$(PY) -m pytest -q -n 2 -m "not spark and not e2e" $(ARGS) || [ $$? -eq 5 ]
	@$(PY) -m pytest -m "spark or e2e" $(ARGS) || [ $$? -eq 5 ]

quick: $(STAMP)dev ## the fast tests: no JVM, no processes
	@$(PY) -m pytest -q -n 2 -m "not spark and not e2e and not slow" $(ARGS)

check: $(STAMP)dev ## lint, format, types, import rules, generated code up to date
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	@$(MAKE) -s proto OUT=build/proto && for f in build/proto/edgewater/wire/*; do \
		cmp "$$f" "edgewater/wire/$$(basename $$f)" || { echo "run: make proto"; exit 1; }; done

OUT ?= .
proto: $(STAMP)dev ## generate edgewater/wire from proto/
	@mkdir -p $(OUT)
	@$(PY) -m grpc_tools.protoc $(PROTOC_FLAGS) --python_out=$(OUT) --mypy_out=quiet:$(OUT) \
		edgewater/wire/synopsis.proto edgewater/wire/uplink.proto
	@$(PY) -m grpc_tools.protoc $(PROTOC_FLAGS) --grpc_python_out=$(OUT) edgewater/wire/uplink.proto

bench: $(STAMP)dev ## the measurements of docs/results.md; results in bench/out
	$(PY) -m bench.first_light $(ARGS)

clean: ## remove what was built, not the virtual environment
	rm -rf build dist .edgewater demo-report.json bench/out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
