# Two commands are all a newcomer needs: `make quickstart` and `make test`. Both set up everything they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS := 1

.PHONY: quickstart quickstart-tools test check setup bench seeds compare docs clean

quickstart: $(VENV)/core  ## train the quickstart model on CPU and write runs/quickstart/report.html
	$(BIN)/laminar run configs/quickstart.yaml --fresh $(ARGS)

quickstart-tools: $(VENV)/core  ## the same with a tool, which runs in a sandbox; runs/quickstart_tools/report.html
	$(BIN)/laminar run configs/quickstart_tools.yaml --fresh $(ARGS)

test: $(VENV)/dev check  ## every test that is not slow or on a GPU
	$(BIN)/pytest $(ARGS)

check: $(VENV)/dev  ## format, lint, types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports

setup: $(VENV)/dev  ## a virtual environment with everything for development

bench: $(VENV)/dev  ## the engine beside Hugging Face generate, the control loop, the sandbox
	$(BIN)/laminar bench engine --json
	$(BIN)/laminar bench loop --json
	$(BIN)/laminar bench sandbox --json

seeds: $(VENV)/core  ## the quickstart with ten seeds, as in docs/results.md
	$(BIN)/python -m scripts.seeds

compare: $(VENV)/dev  ## trajectory_level against synchronous, repack on against off, three seeds each
	$(BIN)/python -m scripts.compare

docs: $(VENV)/dev  ## the generated pages of docs/
	$(BIN)/python -m scripts.generate_docs

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis

$(VENV)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	touch $@

$(VENV)/core: $(VENV)/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/dev: $(VENV)/core
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@
