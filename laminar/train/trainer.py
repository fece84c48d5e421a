"""Trains the policy: one optimizer update for each mini-batch of finished, scored trajectories.

    experiences → mini-batch (advantages, weights) → micro-batches → loss, gradients → one update → metrics
                                                                                          ↓
                                                    weights(), probe() ← between steps: publish, save

Each rank has a trainer and gives it the same mini-batches. The weights of tokens and the plan of micro-batches follow
from the mini-batch alone, so the ranks agree without a word, and each forwards its own share of the trajectories.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers import PreTrainedModel

from laminar.config import Config
from laminar.data.records import Experience
from laminar.relay.manifest import Probe
from laminar.relay.shards import Rows
from laminar.train.diagnostics import (
    ForwardedTokens,
    batch_metrics,
    join,
    k3,
    mismatch_metrics,
    nothing_forwarded,
    policy_metrics,
)
from laminar.train.frozen import FrozenPolicy
from laminar.train.learning_rate import learning_rate
from laminar.train.losses.build import build_loss
from laminar.train.losses.loss import TokenBatch
from laminar.train.mini_batch import MiniBatch, prepare
from laminar.train.model import build_optimizer
from laminar.train.packing import MicroBatch, lay_out, lay_out_text, num_tokens
from laminar.train.policy import build_policy, held, held_rows, whole
from laminar.train.ranks import ALONE, Ranks, compute_dtype, publish_dtype
from laminar.train.sharded_state import State, read_state, write_state
from laminar.train.split import plan_for_rank
from laminar.train.turns import turn_metrics

NUM_PROBE_TOKENS = 24
PROBE_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""By what the trainer computes in."""
WEIGHT = "weight."
OPTIMIZER_TENSORS = ("step", "exp_avg", "exp_avg_sq")
"""What AdamW keeps of each weight."""


class Trainer:
    """Owns the weights being trained and their optimizer.

    version: the newest weight version published from these weights. Whoever publishes sets it; staleness is measured
    against it.
    num_steps_done: the step whose updates the weights hold. Exact between steps, which is when weights are published
    and saved; from the first mini-batch of a step on it names that step.
    """

    def __init__(self, config: Config, ranks: Ranks = ALONE) -> None:
        self.version = 0
        self.num_steps_done = 0
        self.config = config
        self.ranks = ranks
        self.policy = build_policy(config, ranks)
        self._optimizer = build_optimizer(list(self.policy.parameters()), config.trainer)
        self._num_updates_done = 0
        self._loss = build_loss(config.trainer.loss)
        self._proximal = FrozenPolicy(build_policy(config, ranks)) if self._loss.needs_proximal else None
        self._num_updates_done_at_proximal = 0
        # The initial weights, of a resumed run too: whatever is restored comes later.
        self._reference = FrozenPolicy(build_policy(config, ranks)) if config.trainer.kl_coefficient else None
        torch.manual_seed(config.seed)

    @property
    def model(self) -> PreTrainedModel:
        """The policy's; over several ranks its weights are gathered only while the policy is called."""
        return self.policy.model

    def train_mini_batch(self, step: int, index: int, experiences: Sequence[Experience]) -> dict[str, float]:
        """Make one optimizer update from whole prompt groups, in any order; returns its metrics, on rank 0 alone.

        Every rank gets the whole mini-batch. step counts from 1, index from 0. A mini-batch in which nothing has a
        gradient makes no update, and neither does one whose loss or gradient is not finite: the former teaches nothing
        and would only let Adam forget, the latter is counted in `actor/num_updates_skipped`.
        """
        if not experiences:
            raise ValueError(f"mini-batch {index} of step {step} has no trajectories")
        assert step in (self.num_steps_done, self.num_steps_done + 1), (step, self.num_steps_done)
        begins_step = step > self.num_steps_done
        if begins_step:
            self._take_proximal()
        with self.ranks.device:
            mini_batch = prepare(experiences, self.config, self.version)
        self._optimizer.zero_grad()
        forwarded = self.accumulate_gradient(mini_batch)
        metrics = self._update(self._loss_of(forwarded, mini_batch))
        tokens = self._gather(forwarded)
        self.num_steps_done = step
        if self.ranks.is_first:
            metrics |= self._batch_metrics(mini_batch, tokens) | turn_metrics(experiences)
            if len(tokens.rows):
                metrics |= policy_metrics(tokens, mini_batch)
                metrics |= mismatch_metrics(tokens, mini_batch) if begins_step else {}
        return metrics if self.ranks.is_first else {}

    def accumulate_gradient(self, mini_batch: MiniBatch) -> ForwardedTokens:
        """Add the mini-batch's gradient to the parameters'; returns what this rank's forward passes saw.

        Neither the order of the experiences nor the micro-batches' budget nor the number of ranks matters.
        """
        useful = mini_batch.num_trained > 0
        if self._reference is None:
            # Without an advantage the gradient is zero: such a trajectory counts in the mean but needs no forward pass.
            useful &= mini_batch.advantages != 0
        indices: list[int] = useful.nonzero()[:, 0].tolist()
        lengths = [num_tokens(mini_batch.experiences[i]) for i in indices]
        ranks, tokens_max = self.ranks, self.config.trainer.micro_batch_tokens_max
        parts: list[ForwardedTokens] = []
        for planned in plan_for_rank(lengths, ranks.rank, ranks.num_ranks, tokens_max):
            with ranks.device:
                micro_batch = lay_out(mini_batch.experiences, [indices[i] for i in planned])
            parts.append(self._backward(micro_batch, mini_batch))
        return join(parts) if parts else nothing_forwarded(ranks.device)

    def _backward(self, micro_batch: MicroBatch, mini_batch: MiniBatch) -> ForwardedTokens:
        logprobs, entropies = self.policy(micro_batch, self.config.rollout.temperature)
        rows = micro_batch.rows
        token_loss = self._loss(
            TokenBatch(
                policy_logprobs=logprobs,
                behaviour_logprobs=micro_batch.behaviour_logprobs,
                proximal_logprobs=self._proximal_logprobs(micro_batch, logprobs.detach()),
                advantages=mini_batch.advantages[rows],
                rows=rows,
            )
        )
        reference_kl = self._reference_kl(micro_batch, logprobs)
        total = token_loss.loss + self.config.trainer.kl_coefficient * reference_kl
        mini_batch.weighted_sum(total, rows).backward()
        return ForwardedTokens(
            policy_logprobs=logprobs.detach(),
            behaviour_logprobs=micro_batch.behaviour_logprobs,
            entropies=entropies,
            loss=token_loss.loss.detach(),
            clipped=token_loss.clipped,
            clipped_lower=token_loss.clipped_lower,
            truncated=token_loss.truncated,
            reference_kl=reference_kl.detach(),
            rows=rows,
        )

    def _take_proximal(self) -> None:
        if self._proximal is not None:
            self._proximal.take(self.policy)
            self._num_updates_done_at_proximal = self._num_updates_done

    def _proximal_logprobs(self, micro_batch: MicroBatch, policy_logprobs: Tensor) -> Tensor | None:
        if self._proximal is None:
            return None
        if self._num_updates_done == self._num_updates_done_at_proximal:
            return policy_logprobs  # no update since: they are the same weights
        return self._proximal.logprobs(micro_batch, self.config.rollout.temperature)

    def _reference_kl(self, micro_batch: MicroBatch, policy_logprobs: Tensor) -> Tensor:
        if self._reference is None:
            return torch.zeros_like(policy_logprobs)
        return k3(policy_logprobs, self._reference.logprobs(micro_batch, self.config.rollout.temperature))

    def _loss_of(self, forwarded: ForwardedTokens, mini_batch: MiniBatch) -> float:
        """The policy loss of the whole mini-batch, on every rank."""
        return self.ranks.sum(mini_batch.weighted_sum(forwarded.loss, forwarded.rows)).item()

    def _gather(self, forwarded: ForwardedTokens) -> ForwardedTokens:
        """What all ranks' forward passes saw, on rank 0."""
        return ForwardedTokens(*map(self.ranks.gather_on_first, forwarded))

    def _batch_metrics(self, mini_batch: MiniBatch, tokens: ForwardedTokens) -> dict[str, float]:
        with self.ranks.device:
            metrics = batch_metrics(mini_batch, self.config.data.prompt_tokens_max)
        metrics |= {
            "actor/pg_clipfrac": 0.0,
            "actor/pg_clipfrac_lower": 0.0,
            "actor/forwarded_token_ratio": 0.0,
        }
        if self._reference is not None:
            metrics["actor/kl_loss"] = mini_batch.weighted_sum(tokens.reference_kl, tokens.rows).item()
            metrics["actor/kl_coef"] = self.config.trainer.kl_coefficient
        return metrics

    def _update(self, loss: float) -> dict[str, float]:
        """Apply the accumulated gradient, if there is one and it is finite. All ranks decide the same."""
        parameters = [parameter for parameter in self.policy.parameters() if parameter.grad is not None]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        grad_norm = whole(get_total_norm(gradients))
        clip_grads_with_norm_(parameters, self.config.trainer.grad_norm_max, grad_norm)
        finite = math.isfinite(grad_norm.item()) and math.isfinite(loss)
        rate = learning_rate(self.config, self._num_updates_done)
        if parameters and finite:
            self._optimizer.param_groups[0]["lr"] = rate
            self._optimizer.step()
            self._num_updates_done += 1
        return {
            "actor/pg_loss": loss,
            "actor/grad_norm": grad_norm.item(),
            "actor/lr": rate,
            "actor/num_updates_skipped": float(not finite),
        }

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor under its Hugging Face name, tied ones once, whole; they change with the next update.

        Every rank must go through all of them, as each is put together from all ranks.
        """
        for name, weight in self.policy.weights():
            yield name, whole(weight.detach())

    def held_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The rows of every tensor that this rank holds; nothing is gathered."""
        for name, weight in self.policy.weights():
            yield name, held(weight.detach())

    def held_rows(self) -> dict[str, Rows]:
        """Which rows those are, of each tensor that is sharded over several ranks."""
        if self.ranks.num_ranks == 1:
            return {}
        return {name: held_rows(weight) for name, weight in self.policy.weights() if isinstance(weight, DTensor)}

    @property
    def publish_dtype(self) -> torch.dtype:
        return publish_dtype(self.config.trainer)

    @torch.no_grad()
    def probe(self) -> Probe:
        """The log-probs that anyone who serves these weights must find, at temperature 1. Every rank takes part."""
        vocabulary = self.model.config.vocab_size
        token_ids = [(2 * i + 1) * vocabulary // (2 * NUM_PROBE_TOKENS) for i in range(NUM_PROBE_TOKENS)]
        with self.ranks.device:
            logprobs, _ = self.policy(lay_out_text(token_ids), 1.0)
        tolerance = PROBE_TOLERANCE[compute_dtype(self.config.trainer)]
        return Probe(tuple(token_ids), tuple(logprobs.tolist()), tolerance)

    def state(self) -> State:
        """All that the next update depends on, by name. Weights and optimizer are the very tensors, not copies."""
        tensors: dict[str, Tensor] = {
            "num_steps_done": torch.tensor(self.num_steps_done),
            "num_updates_done": torch.tensor(self._num_updates_done),
            # The ranks draw alike, from one seed, and nothing is drawn on the accelerator.
            "rng": torch.get_rng_state(),
        }
        for name, weight in self.policy.weights():
            tensors[WEIGHT + name] = weight.detach()
            for kind in OPTIMIZER_TENSORS:
                tensors[f"{kind}.{name}"] = self._optimizer.state[weight][kind]
        return tensors

    def save(self, folder: Path) -> None:
        """Write the state into an existing folder. Raises OSError if it does not fit."""
        write_state(folder, self.state(), self.ranks)

    def restore(self, folder: Path) -> None:
        """Take up where `save` wrote this folder, on any number of ranks; on as many, the next update is the same bit
        for bit. Raises ValueError for a damaged folder, after which the trainer must not be used."""
        state = self.state()
        read_state(folder, state, self.ranks)
        self.num_steps_done = int(state["num_steps_done"])
        self._num_updates_done = int(state["num_updates_done"])
        torch.set_rng_state(state["rng"])
