"""Settings of what is trained, on which prompts, in which batches."""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from laminar.config.section import Count, Section


class ModelConfig(Section):
    path: Path
    """Folder of a Hugging Face causal LM (Qwen2, Qwen3 or Llama): config.json, safetensors, tokenizer."""


class DataConfig(Section):
    train_files: tuple[Path, ...]
    """Parquet, json or jsonl files in verl's schema; read in this order."""
    val_files: tuple[Path, ...] = ()
    """Held-out problems, same schema; used by evaluation only."""
    prompt_key: str = "prompt"
    """Column with the prompt: chat messages, or plain text."""
    prompt_tokens_max: Count = 2048
    """Longer prompts are left out, and counted."""
    response_tokens_max: Count = 8192
    """A trajectory is cut here (tokens, tool output included) and counts as truncated."""
    num_epochs: Count = 1
    """Passes over the training prompts; the last, smaller step is trained too."""
    shuffle: bool = True
    """Whether each epoch visits the prompts in a new order, drawn from `seed`."""
    dedup: bool = False
    """Whether identical prompts are kept once; duplicates are counted and reported either way."""


class BatchConfig(Section):
    num_prompts_per_step: Count = 512
    """Prompt groups trained on between two weight versions."""
    group_size: Annotated[int, Field(ge=2)] = 16
    """Trajectories a prompt group."""
    num_mini_batches: Count = 16
    """Optimizer updates a step, on an equal share of its prompt groups each; a smaller step makes fewer updates."""

    @property
    def num_prompts_per_mini_batch(self) -> int:
        return self.num_prompts_per_step // self.num_mini_batches

    @property
    def num_trajectories_per_step(self) -> int:
        return self.num_prompts_per_step * self.group_size


class BufferConfig(Section):
    capacity_steps: Annotated[float, Field(gt=0)] = 4.0
    """Steps' worth of prompt groups that may be dispatched and not yet trained; less than 1 is refused."""
    filter_equal_rewards: bool = False
    """Whether groups whose rewards are all equal are dropped, by name, and replaced."""
    max_refill_factor: Annotated[float, Field(ge=1)] = 3.0
    """With the filter on: prompt groups dispatched for one step at most, in steps."""
