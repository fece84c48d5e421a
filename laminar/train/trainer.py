"""Trains the policy: one optimizer update for each mini-batch of finished, scored trajectories.

    experiences → mini-batch (advantages, weights) → micro-batches → loss, gradients → one update → metrics
                                                                                          ↓
                                                    weights(), probe() ← between steps: publish, save

This is one rank. A mini-batch's weights of tokens and its plan of micro-batches are known before the first forward
pass, so ranks that share a mini-batch need to agree on nothing else.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from laminar.config import Config
from laminar.data.records import Experience
from laminar.relay.manifest import Probe
from laminar.train.diagnostics import ForwardedTokens, batch_metrics, join, k3, mismatch_metrics, policy_metrics
from laminar.train.frozen import FrozenPolicy
from laminar.train.learning_rate import learning_rate
from laminar.train.logprobs import token_logprobs
from laminar.train.losses.build import build_loss
from laminar.train.losses.loss import TokenBatch
from laminar.train.mini_batch import MiniBatch, prepare
from laminar.train.model import build_optimizer, load_model
from laminar.train.packing import MicroBatch, lay_out, num_tokens, plan_micro_batches

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
        self.config = config
        self.model = load_model(config.model.path)
        self._optimizer = build_optimizer(self.model, config.trainer)
        self._num_updates_done = 0
        self._loss = build_loss(config.trainer.loss)
        self._proximal = FrozenPolicy(self.model) if self._loss.needs_proximal else None
        self._num_updates_done_at_proximal = 0
        # The initial weights, of a resumed run too: whatever is restored comes later.
        self._reference = FrozenPolicy(self.model) if config.trainer.kl_coefficient else None
        torch.manual_seed(config.seed)

    def train_mini_batch(self, step: int, index: int, experiences: Sequence[Experience]) -> dict[str, float]:
        """Make one optimizer update from whole prompt groups, in any order; returns the mini-batch's metrics.

        step counts from 1, index from 0. A mini-batch in which nothing has a gradient makes no update, and neither
        does one whose loss or gradient is not finite: the former teaches nothing and would only let Adam forget, the
        latter is counted in `actor/num_updates_skipped`.
        """
        if not experiences:
            raise ValueError(f"mini-batch {index} of step {step} has no trajectories")
        assert step in (self.num_steps_done, self.num_steps_done + 1), (step, self.num_steps_done)
        begins_step = step > self.num_steps_done
        if begins_step:
            self._take_proximal()
        mini_batch = prepare(experiences, self.config, self.version)
        self._optimizer.zero_grad()
        parts = self.accumulate_gradient(mini_batch)
        metrics = batch_metrics(mini_batch, self.config.data.prompt_tokens_max) | self._loss_metrics(mini_batch, parts)
        metrics |= self._update(metrics["actor/pg_loss"])
        if parts:
            tokens = join(parts)
            metrics |= policy_metrics(tokens, mini_batch)
            metrics |= mismatch_metrics(tokens, mini_batch) if begins_step else {}
        self.num_steps_done = step
        return metrics

    def accumulate_gradient(self, mini_batch: MiniBatch) -> list[ForwardedTokens]:
        """Add the mini-batch's gradient to the parameters'; returns what each micro-batch's forward pass saw.

        Neither the order of the experiences nor the micro-batches' budget matters.
        """
        useful = mini_batch.num_trained > 0
        if self._reference is None:
            # Without an advantage the gradient is zero: such a trajectory counts in the mean but needs no forward pass.
            useful &= mini_batch.advantages != 0
        indices: list[int] = useful.nonzero()[:, 0].tolist()
        lengths = [num_tokens(mini_batch.experiences[i]) for i in indices]
        plan = plan_micro_batches(lengths, self.config.trainer.micro_batch_tokens_max)
        return [
            self._backward(lay_out(mini_batch.experiences, [indices[i] for i in planned]), mini_batch)
            for planned in plan
        ]

    def _backward(self, micro_batch: MicroBatch, mini_batch: MiniBatch) -> ForwardedTokens:
        logprobs, entropies = token_logprobs(self.model, micro_batch, self.config.rollout.temperature)
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
            self._proximal.take(self.model)
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

    def _loss_metrics(self, mini_batch: MiniBatch, parts: Sequence[ForwardedTokens]) -> dict[str, float]:
        metrics = {
            "actor/pg_loss": sum(mini_batch.weighted_sum(part.loss, part.rows).item() for part in parts),
            "actor/pg_clipfrac": 0.0,
            "actor/pg_clipfrac_lower": 0.0,
            "actor/forwarded_token_ratio": 0.0,
        }
        if self._reference is not None:
            metrics["actor/kl_loss"] = sum(
                mini_batch.weighted_sum(part.reference_kl, part.rows).item() for part in parts
            )
            metrics["actor/kl_coef"] = self.config.trainer.kl_coefficient
        return metrics

    def _update(self, loss: float) -> dict[str, float]:
        """Apply the accumulated gradient, if there is one and it is finite."""
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        grad_norm = torch.nn.utils.clip_grad_norm_(parameters, self.config.trainer.grad_norm_max)
        finite = bool(torch.isfinite(grad_norm)) and torch.isfinite(torch.tensor(loss)).item()
        rate = learning_rate(self.config, self._num_updates_done)
        if parameters and finite:
            self._optimizer.param_groups[0]["lr"] = rate
            self._optimizer.step()
            self._num_updates_done += 1
        return {
            "actor/grad_norm": grad_norm.item(),
            "actor/lr": rate,
            "actor/num_updates_skipped": float(not finite),
        }

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
