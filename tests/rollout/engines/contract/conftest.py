"""Builds the engines that must keep the contract, whatever decodes, on models that all of them can serve."""

import asyncio
import importlib.util
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from laminar.config import EmbeddedEngineConfig, VllmEngineConfig
from laminar.rollout.engines.embedded import EmbeddedEngine
from laminar.rollout.engines.engine import Engine
from laminar.rollout.engines.vllm_setup import WORKER_EXTENSION, start_vllm
from tests.rollout.engines.conftest import SHAPE, TinyModel, make_model

if TYPE_CHECKING:
    from laminar.rollout.engines.vllm import VllmEngine

DEADLINE_S = 900.0
"""For whatever one test waits for: a vLLM engine starts in 15 s, and in minutes on a machine that has better to do."""
NUM_VLLM_ENGINES_MAX = 3
"""Alive at once: each takes 1.4 GiB."""
# vLLM's attention on CPU has heads of 32 or 64, none of the other tests' 12.
WIDE = SHAPE | {"hidden_size": 128, "intermediate_size": 160, "num_hidden_layers": 2}
ROOMY = {"num_slots": 8, "kv_capacity_tokens": 4096}
TIGHT = {"num_slots": 8, "kv_capacity_tokens": 512, "prefill_chunk_tokens": 64}
"""Neither the KV of a few requests fits, nor do the prompts of a few into one step."""
NEEDS_VLLM = (
    pytest.mark.vllm,
    pytest.mark.timeout(DEADLINE_S + 60),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here; `make test-vllm` runs these"
    ),
)

Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> dict[str, TinyModel]:
    configs = {
        "qwen2_tied": (Qwen2ForCausalLM, Qwen2Config(**WIDE, tie_word_embeddings=True)),
        "qwen2_tied_later": (Qwen2ForCausalLM, Qwen2Config(**WIDE, tie_word_embeddings=True)),
        "qwen2_untied": (Qwen2ForCausalLM, Qwen2Config(**WIDE, tie_word_embeddings=False)),
        "qwen3": (Qwen3ForCausalLM, Qwen3Config(**WIDE, head_dim=64, tie_word_embeddings=True)),
        "llama": (LlamaForCausalLM, LlamaConfig(**WIDE, tie_word_embeddings=False)),
    }
    return {
        name: make_model(model_class, config, tmp_path_factory.mktemp(name), seed)
        for seed, (name, (model_class, config)) in enumerate(configs.items())
    }


@pytest.fixture(scope="session")
def model(models) -> TinyModel:
    """Of this folder's models: pytest would share the outer folder's, whichever was made first."""
    return models["qwen2_tied"]


@pytest.fixture(scope="session")
def run() -> Iterator[Run]:
    """Runs a scenario in the session's event loop, which an engine in processes of its own belongs to."""
    with asyncio.Runner() as runner:
        yield lambda scenario: runner.run(asyncio.wait_for(scenario, DEADLINE_S))


@dataclass
class Engines:
    """Makes engines of one kind. Embedded ones cost nothing and are made anew; vLLM's are kept, as many as fit."""

    kind: str
    kept: dict[tuple, Engine] = field(default_factory=dict)

    async def __call__(
        self,
        model: TinyModel,
        size: dict[str, int] = ROOMY,
        *,
        stop_token_ids: tuple[int, ...] | None = (),
        tensor_parallel_size: int = 1,
    ) -> Engine:
        if self.kind == "embedded":
            return EmbeddedEngine(EmbeddedEngineConfig(**size), model.path, stop_token_ids=stop_token_ids)
        architecture = type(model.reference), model.reference.config.tie_word_embeddings
        key = (architecture, tuple(size.items()), stop_token_ids, tensor_parallel_size)
        engine = self.kept.pop(key, None)
        if engine is None:
            if len(self.kept) == NUM_VLLM_ENGINES_MAX:
                await self.kept.pop(next(iter(self.kept))).close()
            engine = await start_tiny_vllm(
                model, size, stop_token_ids=stop_token_ids, tensor_parallel_size=tensor_parallel_size
            )
        self.kept[key] = engine
        return engine

    async def idle(self) -> None:
        """A test may fail with requests alive; the next one must not meet them."""
        for engine in self.kept.values():
            await engine.abort(range(1000))

    async def close(self) -> None:
        for engine in self.kept.values():
            await engine.close()


async def start_tiny_vllm(
    model: TinyModel,
    size: dict[str, int] = ROOMY,
    *,
    stop_token_ids: tuple[int, ...] | None = (),
    tensor_parallel_size: int = 1,
    step_deadline_s: float = DEADLINE_S,
    worker_extension: str = WORKER_EXTENSION,
) -> "VllmEngine":
    config = VllmEngineConfig(
        device="cpu",
        dtype="float32",
        eager=True,
        tensor_parallel_size=tensor_parallel_size,
        step_deadline_s=step_deadline_s,
        **size,
    )
    return await start_vllm(
        config,
        model.path,
        num_tokens_max=size["kv_capacity_tokens"],
        stop_token_ids=stop_token_ids,
        worker_extension=worker_extension,
    )


@pytest.fixture(scope="session", params=["embedded", pytest.param("vllm", marks=NEEDS_VLLM)])
def engines(request, run) -> Iterator[Engines]:
    made = Engines(request.param)
    yield made
    run(made.close())


@pytest.fixture
def make_engine(engines, run) -> Iterator[Engines]:
    """`await make_engine(model, size)`: an engine of each kind, without a stop token unless asked."""
    yield engines
    run(engines.idle())
