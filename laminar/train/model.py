"""Loads the policy to be trained, and makes its optimizer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from laminar.config import TrainerConfig
from laminar.train.packed_attention import PACKED_ATTENTION, register_packed_attention

MODEL_TYPES = ("qwen2", "qwen3", "llama")


def load_model(path: Path) -> PreTrainedModel:
    """The policy in float32. Raises ValueError for a folder that holds no model of a kind that Laminar serves."""
    if not (path / "config.json").is_file():
        raise ValueError(f"model.path={path} has no config.json; name the folder of a Hugging Face model")
    model_type = AutoConfig.from_pretrained(path, local_files_only=True).model_type
    if model_type not in MODEL_TYPES:
        raise ValueError(f"model.path={path} is of type {model_type!r}; Laminar trains {', '.join(MODEL_TYPES)}")
    register_packed_attention()
    model: Any = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation=PACKED_ATTENTION, local_files_only=True
    )
    # A padding id may be a real token (the stop token, often), and an embedding's padding_idx gets no gradient.
    model.get_input_embeddings().padding_idx = None
    # Evaluation mode for good: dropout would give fresh data a ratio other than 1.
    return model.eval()


def build_optimizer(parameters: Sequence[nn.Parameter], config: TrainerConfig) -> torch.optim.AdamW:
    """AdamW whose state is all there from the beginning, as its first update would make it: memory is taken at the
    start, and a checkpoint before that update holds the same tensors as one after it."""
    optimizer = torch.optim.AdamW(
        parameters, lr=config.learning_rate, betas=config.adam_betas, weight_decay=config.weight_decay, fused=True
    )
    for parameter in parameters:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer
