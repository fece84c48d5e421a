"""Trains the policy: one optimizer update for each mini-batch of finished, scored trajectories.

    experiences → advantages by prompt group → micro-batches → loss, gradients → one update → metrics
                                                                                     ↓
                                               weights(), probe() ← between steps: publish, save

This is one rank. A mini-batch's divisor (its trained tokens) and its plan of micro-batches are known before the first
forward pass, so ranks that share a mini-batch need to agree on nothing else.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from laminar.config import Config, TrainerConfig
from laminar.data.records import Experience
from laminar.relay.manifest import Probe
from laminar.train.advantages import equal_reward_ratio, group_advantages
from laminar.train.diagnostics import ForwardedTokens, batch_metrics, join, policy_metrics
from laminar.train.logprobs import token_logprobs
from laminar.train.losses.grpo import ClipHigher
from laminar.train.losses.loss import TokenBatch
from laminar.train.packing import lay_out, num_tokens, num_trained_tokens, plan_micro_batches
from laminar.train.turns import turn_metrics

MODEL_TYPES = ("qwen2", "qwen3", "llama")
NUM_PROBE_TOKENS = 24
PROBE_TOLERANCE = 1e-4
STATE_FILE = "trainer.pt"


class Trainer:
    """Owns the weights being trained and their optimizer.

    version: the newest weight version published from these weights. Whoever publishes sets it; staleness is measured
    against it.
    num_steps_done: the step whose updates the weights hold. Exact between steps, which is when weights are published
    and saved; from the first mini-batch of a step on it names that step.
    """

    def __init__(self, config: Config) -> None:
        self.version = 0
        self.num_steps_done = 0
        self._config = config
        self.model = load_model(config.model.path)
        self._optimizer = build_optimizer(self.model, config.trainer)
        self._num_updates_done = 0
        self._loss = ClipHigher(config.trainer.clip_ratio_low, config.trainer.clip_ratio_high)
        torch.manual_seed(config.seed)

    def train_mini_batch(self, step: int, index: int, experiences: Sequence[Experience]) -> dict[str, float]:
        """Make one optimizer update from whole prompt groups, in any order; returns the mini-batch's metrics.

        step counts from 1, index from 0. The loss is the mean over all trained tokens of the mini-batch. A mini-batch
        in which no trajectory has an advantage makes no update, and neither does one whose loss or gradient is not
        finite: the former teaches nothing and would only let Adam forget, the latter is counted in
        `actor/num_updates_skipped`.
        """
        if not experiences:
            raise ValueError(f"mini-batch {index} of step {step} has no trajectories")
        assert step in (self.num_steps_done, self.num_steps_done + 1), (step, self.num_steps_done)
        rewards = torch.tensor([experience.score for experience in experiences])
        groups = torch.tensor([experience.group for experience in experiences])
        advantages = group_advantages(rewards, groups)

        self._optimizer.zero_grad()
        losses, forwarded = self.accumulate_gradient(experiences, advantages)
        metrics = batch_metrics(experiences, advantages, self._config.data.prompt_tokens_max)
        metrics |= turn_metrics(experiences)
        metrics["frac_reward_zero_std"] = equal_reward_ratio(rewards, groups)
        metrics["actor/pg_loss"] = sum(losses)
        metrics |= self._update(metrics["actor/pg_loss"])
        metrics |= self._policy_metrics(experiences, forwarded)
        self.num_steps_done = step
        return metrics

    def accumulate_gradient(
        self, experiences: Sequence[Experience], advantages: Tensor
    ) -> tuple[list[float], list[ForwardedTokens]]:
        """Add the mini-batch's gradient to the parameters'; returns each micro-batch's share of the loss, and tokens.

        advantages: [num_trajectories]. Neither the order of the experiences nor the micro-batches' budget matters.
        """
        num_trained = sum(map(num_trained_tokens, experiences))
        # Without an advantage the gradient is zero: such a trajectory counts in the mean but needs no forward pass.
        useful = [i for i, advantage in enumerate(advantages.tolist()) if advantage != 0]
        useful = [i for i in useful if num_trained_tokens(experiences[i])]
        lengths = [num_tokens(experiences[i]) for i in useful]
        losses: list[float] = []
        forwarded: list[ForwardedTokens] = []
        for planned in plan_micro_batches(lengths, self._config.trainer.micro_batch_tokens_max):
            micro_batch = lay_out(experiences, [useful[i] for i in planned])
            logprobs, entropies = token_logprobs(self.model, micro_batch, self._config.rollout.temperature)
            behaviour, rows = micro_batch.behaviour_logprobs, micro_batch.rows
            token_loss = self._loss(TokenBatch(logprobs, behaviour, advantages[rows], rows))
            loss = token_loss.loss.sum() / num_trained
            loss.backward()
            losses.append(loss.item())
            forwarded.append(ForwardedTokens(logprobs.detach(), behaviour, entropies, token_loss.clipped, rows))
        return losses, forwarded

    def _update(self, loss: float) -> dict[str, float]:
        """Apply the accumulated gradient, if there is one and it is finite."""
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        grad_norm = torch.nn.utils.clip_grad_norm_(parameters, self._config.trainer.grad_norm_max)
        finite = bool(torch.isfinite(grad_norm)) and torch.isfinite(torch.tensor(loss)).item()
        learning_rate = self._learning_rate()
        if parameters and finite:
            self._optimizer.param_groups[0]["lr"] = learning_rate
            self._optimizer.step()
            self._num_updates_done += 1
        return {
            "actor/grad_norm": grad_norm.item(),
            "actor/lr": learning_rate,
            "actor/num_updates_skipped": float(not finite),
        }

    def _learning_rate(self) -> float:
        warmup = self._config.trainer.num_warmup_updates
        share = min(1.0, (self._num_updates_done + 1) / warmup) if warmup else 1.0
        return self._config.trainer.learning_rate * share

    def _policy_metrics(self, experiences: Sequence[Experience], parts: list[ForwardedTokens]) -> dict[str, float]:
        if not parts:
            return {"actor/pg_clipfrac": 0.0, "actor/forwarded_token_ratio": 0.0}
        num_trained_per_row = torch.tensor([num_trained_tokens(experience) for experience in experiences])
        staleness = torch.tensor([self.version - experience.version for experience in experiences])
        return policy_metrics(join(parts), num_trained_per_row, staleness)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor under its Hugging Face name, tied ones once; they change with the next update."""
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach()

    @torch.no_grad()
    def probe(self) -> Probe:
        """The log-probs that anyone who serves these weights must find, at temperature 1."""
        vocabulary = self.model.config.vocab_size
        token_ids = torch.tensor([(2 * i + 1) * vocabulary // (2 * NUM_PROBE_TOKENS) for i in range(NUM_PROBE_TOKENS)])
        logits = self.model(input_ids=token_ids[None], use_cache=False).logits[0, :-1]
        logprobs = logits.log_softmax(-1).gather(1, token_ids[1:, None])[:, 0]
        return Probe(tuple(token_ids.tolist()), tuple(logprobs.tolist()), PROBE_TOLERANCE)

    def save(self, folder: Path) -> None:
        """Write all that the next update depends on into an existing folder. Raises OSError if it does not fit."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "num_steps_done": self.num_steps_done,
            "num_updates_done": self._num_updates_done,
            "rng": torch.get_rng_state(),
        }
        # Given a path instead of a file, torch turns a full disk into a RuntimeError about positions.
        with (folder / STATE_FILE).open("wb") as file:
            torch.save(state, file)

    def restore(self, folder: Path) -> None:
        """Take up where `save` wrote this folder; the next update is then the same, bit for bit."""
        state = torch.load(folder / STATE_FILE, map_location="cpu", weights_only=True)
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.num_steps_done = state["num_steps_done"]
        self._num_updates_done = state["num_updates_done"]
        torch.set_rng_state(state["rng"])


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
