"""Loads the policy to be trained, and makes its optimizer."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from laminar.config import TrainerConfig

MODEL_TYPES = ("qwen2", "qwen3", "llama")


def load_model(path: Path) -> PreTrainedModel:
    """The policy in float32. Raises ValueError for a folder that holds no model of a kind that Laminar serves."""
    if not (path / "config.json").is_file():
        raise ValueError(f"model.path={path} has no config.json; name the folder of a Hugging Face model")
    model_type = AutoConfig.from_pretrained(path, local_files_only=True).model_type
    if model_type not in MODEL_TYPES:
        raise ValueError(f"model.path={path} is of type {model_type!r}; Laminar trains {', '.join(MODEL_TYPES)}")
    model: Any = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
    )
    # A padding id may be a real token (the stop token, often), and an embedding's padding_idx gets no gradient.
    model.get_input_embeddings().padding_idx = None
    # Evaluation mode for good: dropout would give fresh data a ratio other than 1.
    return model.eval()


def build_optimizer(model: PreTrainedModel, config: TrainerConfig) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        model.parameters(),
        lr=config.learning_rate,
        betas=config.adam_betas,
        weight_decay=config.weight_decay,
        fused=True,
    )
