"""Puts trajectories through TRL's own GRPO loss and optimizer, on a model folder: what ours is compared with.

Needs the `dev` extra. Nothing is generated or scored: TRL gets the completions, the log-probs recorded as they were
sampled, and the advantages, padded as it pads a generation batch (prompts left, completions right, all to the longest).
"""

# The dev extra is not everywhere where types are checked.
# pyright: reportMissingImports=false

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from laminar.config import Config, GrpoLoss
from laminar.data.records import Experience

# TRL's progress bars and notices would stand between the lines of a benchmark.
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

TrlBatch = dict[str, Tensor]
"""TRL's own inputs of a loss: ids and masks [num_trajectories, longest], advantages [num_trajectories]."""


class TrlUpdate:
    """TRL's trainer with the settings of `config`: token-mean loss ("dapo"), clip-higher, its `delta` as dual clip.

    In float32 and without activation checkpointing, as ours on CPU. tokenizer: TRL wants one for its padding id.
    """

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
        loss = config.trainer.loss
        assert isinstance(loss, GrpoLoss), "TRL's loss is set up for GRPO"
        group_size = config.batch.group_size
        arguments = GRPOConfig(
            output_dir=str(folder),
            per_device_train_batch_size=group_size,
            num_generations=group_size,
            max_completion_length=config.data.response_tokens_max,
            loss_type="dapo",
            epsilon=loss.clip_ratio_low,
            epsilon_high=loss.clip_ratio_high,
            delta=loss.clip_ratio_c,
            beta=0.0,
            temperature=config.rollout.temperature,
            learning_rate=config.trainer.learning_rate,
            adam_beta1=config.trainer.adam_betas[0],
            adam_beta2=config.trainer.adam_betas[1],
            weight_decay=config.trainer.weight_decay,
            max_grad_norm=config.trainer.grad_norm_max,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            disable_tqdm=True,
        )
        model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
        self._trainer = GRPOTrainer(
            model=model,
            args=arguments,
            reward_funcs=_no_reward,
            train_dataset=Dataset.from_dict({"prompt": ["unused"] * group_size}),
            processing_class=tokenizer,
        )
        # Its training loop would set it; one accumulation window is one optimizer update here.
        self._trainer.current_gradient_accumulation_steps = 1
        self.model = model.train()  # it has no dropout; TRL divides by other numbers in evaluation mode
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=config.trainer.learning_rate,
            betas=config.trainer.adam_betas,
            weight_decay=config.trainer.weight_decay,
            fused=True,
        )
        self._grad_norm_max = config.trainer.grad_norm_max

    def accumulate_gradient(self, batch: TrlBatch, num_rows: int) -> float:
        """Add the gradient of the whole batch, `num_rows` trajectories at a time; returns the loss."""
        total = 0.0
        for begin in range(0, len(batch["advantages"]), num_rows):
            rows = slice(begin, begin + num_rows)
            part = {name: tensor[rows] if tensor.ndim else tensor for name, tensor in batch.items()}
            loss = self._trainer.compute_loss(self.model, part)
            self._trainer.accelerator.backward(loss)
            total += loss.item()
        return total

    def update(self, batch: TrlBatch, num_rows: int) -> float:
        """One optimizer update; returns the loss."""
        self.optimizer.zero_grad()
        loss = self.accumulate_gradient(batch, num_rows)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._grad_norm_max)
        self.optimizer.step()
        return loss


def trl_batch(experiences: Sequence[Experience], advantages: Tensor, filler: int) -> TrlBatch:
    """As TRL lays out a generation batch; advantages: [num_trajectories]."""
    prompts = [list(e.prompt_token_ids) for e in experiences]
    responses = [e.response for e in experiences]
    widest, longest = max(map(len, prompts)), max(len(r.token_ids) for r in responses)

    def right(rows: list[list[int]] | list[list[float]], value: float) -> Tensor:
        return torch.tensor([row + [value] * (longest - len(row)) for row in rows])

    masks = right([r.loss_mask for r in responses], 0)
    return {
        "prompt_ids": torch.tensor([[filler] * (widest - len(p)) + p for p in prompts]),
        "prompt_mask": torch.tensor([[0] * (widest - len(p)) + [1] * len(p) for p in prompts]),
        "completion_ids": right([r.token_ids for r in responses], filler),
        "completion_mask": right([[1] * len(r.token_ids) for r in responses], 0),
        "tool_mask": masks,
        "old_per_token_logps": right([r.logprobs for r in responses], 0.0),
        "advantages": advantages,
        "num_items_in_batch": masks.sum(),
    }


def _no_reward(completions: list[str]) -> list[float | None]:
    raise AssertionError(f"nothing is generated here, so the {len(completions)} completions are none of ours")
