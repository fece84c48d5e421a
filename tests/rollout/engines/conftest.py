"""Makes the tiny models that the engine tests compare with, once a session."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.12,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "bos_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@dataclass(frozen=True)
class TinyModel:
    """A Hugging Face model and its folder, where an engine reads its configuration."""

    path: Path
    reference: PreTrainedModel


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> dict[str, TinyModel]:
    configs = {
        "qwen2_tied": (Qwen2ForCausalLM, Qwen2Config(**SHAPE, tie_word_embeddings=True)),
        "qwen2_tied_later": (Qwen2ForCausalLM, Qwen2Config(**SHAPE, tie_word_embeddings=True)),
        "qwen2_untied": (Qwen2ForCausalLM, Qwen2Config(**SHAPE, tie_word_embeddings=False)),
        "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True)),
        "llama": (LlamaForCausalLM, LlamaConfig(**SHAPE, tie_word_embeddings=False)),
        "llama_biased": (LlamaForCausalLM, LlamaConfig(**SHAPE, attention_bias=True, tie_word_embeddings=False)),
        "llama3_rope": (LlamaForCausalLM, LlamaConfig(**SHAPE, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=True)),
        "linear_rope": (
            LlamaForCausalLM,
            LlamaConfig(**SHAPE, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}),
        ),
    }
    return {
        name: make_model(model_class, config, tmp_path_factory.mktemp(name), seed)
        for seed, (name, (model_class, config)) in enumerate(configs.items())
    }


def make_model(model_class, config, path: Path, seed: int) -> TinyModel:
    """Random, biases and norms too, so that a forgotten one shows."""
    torch.manual_seed(seed)
    reference = model_class(config).eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    reference.save_pretrained(path)
    return TinyModel(path, reference)


@pytest.fixture(scope="session")
def model(models) -> TinyModel:
    return models["qwen2_tied"]
