"""Gives the trainer tests a tiny model, configurations, and trajectories that Hugging Face sampled."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from laminar.config import BatchConfig, Config, DataConfig, ModelConfig, RolloutConfig, TrainerConfig
from laminar.control.messages import GroupId, TrajectoryId
from laminar.data.records import Experience, Response

VOCAB_SIZE = 97

SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    # Far from uniform predictions, as a trained model's are.
    "initializer_range": 0.4,
}


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


MakeModel = Callable[[PreTrainedConfig], Path]


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    def make(config: PreTrainedConfig) -> Path:
        folder = tmp_path_factory.mktemp(config.model_type)
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def qwen2_path(make_model: MakeModel) -> Path:
    return make_model(Qwen2Config(**SHAPE, tie_word_embeddings=True))


@pytest.fixture(scope="session", params=["qwen2", "qwen3", "llama"])
def any_model_path(request: pytest.FixtureRequest, make_model: MakeModel) -> Path:
    match request.param:
        case "qwen2":
            return make_model(Qwen2Config(**SHAPE, tie_word_embeddings=True))
        case "qwen3":
            return make_model(Qwen3Config(**SHAPE, head_dim=8, tie_word_embeddings=False))
        case _:
            return make_model(LlamaConfig(**SHAPE, tie_word_embeddings=False))


MakeConfig = Callable[..., Config]


@pytest.fixture(scope="session")
def make_config() -> MakeConfig:
    """Settings of a run on `path`; keywords are those of `trainer`."""

    def make(path: Path, *, temperature: float = 1.0, **trainer: object) -> Config:
        return Config(
            model=ModelConfig(path=path),
            data=DataConfig(train_files=(Path("unused.parquet"),)),
            batch=BatchConfig(num_prompts_per_step=8, group_size=4, num_mini_batches=2),
            rollout=RolloutConfig(temperature=temperature),
            trainer=TrainerConfig.model_validate({"learning_rate": 1e-3, **trainer}),
        )

    return make


Sample = Callable[..., list[Experience]]


@pytest.fixture(scope="session")
def sample() -> Sample:
    """Trajectories that `model` sampled itself, in groups of 4, of lengths 1 to 32, with log-probs as it sampled."""

    def draw(
        model: PreTrainedModel, num_groups: int, *, temperature: float = 1.0, seed: int = 0, version: int = 0
    ) -> list[Experience]:
        torch.manual_seed(seed)
        prompts = [torch.randint(VOCAB_SIZE, (8,)).tolist() for _ in range(num_groups)]
        token_ids, logprobs = _decode(model, [prompt for prompt in prompts for _ in range(4)], 32, temperature)
        lengths = torch.randint(1, 33, (4 * num_groups,)).tolist()
        return [
            Experience(
                trajectory=TrajectoryId(i),
                group=GroupId(100 + i // 4),
                prompt_token_ids=tuple(prompts[i // 4]),
                response=Response(
                    token_ids=token_ids[i][:length],
                    logprobs=logprobs[i][:length],
                    loss_mask=[1] * length,
                    versions=[version] * length,
                ),
                score=float(i % 4 in (0, i // 4 % 3 + 1)),
                version=version,
                truncated=False,
            )
            for i, length in enumerate(lengths)
        ]

    return draw


@torch.no_grad()
def _decode(
    model: PreTrainedModel, prompts: Sequence[list[int]], num_tokens: int, temperature: float
) -> tuple[list[list[int]], list[list[float]]]:
    """Sample with Hugging Face, without a cache; all prompts have the same length."""
    used = torch.tensor(prompts)
    logprobs = []
    for _ in range(num_tokens):
        distribution = (model(input_ids=used).logits[:, -1] / temperature).log_softmax(-1)
        drawn = torch.multinomial(distribution.exp(), 1)
        used = torch.cat([used, drawn], 1)
        logprobs.append(distribution.gather(1, drawn))
    return used[:, len(prompts[0]) :].tolist(), torch.cat(logprobs, 1).tolist()
