"""Defines the one signature of every policy loss: log-probs and advantages of tokens in, one loss a token out."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The trained tokens of a micro-batch (loss_mask 1), laid end to end, so that no loss ever sees padding.

    All [num_tokens]. A trajectory's tokens are all there: micro-batches never cut one in two.
    """

    policy_logprobs: Tensor
    """Nats, under the weights being trained; the gradient flows through it."""
    behaviour_logprobs: Tensor
    """Nats, as the engine recorded them while it sampled; never recomputed by the trainer."""
    proximal_logprobs: Tensor | None
    """Nats, under the weights that the step began with; none unless the loss asks for them (`needs_proximal`)."""
    advantages: Tensor
    """Each token has its trajectory's."""
    rows: Tensor
    """Int: which trajectory a token belongs to; for losses with a ratio a sequence."""


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """All [num_tokens]."""

    loss: Tensor
    """The caller weighs and sums it (laminar/train/aggregation.py), so a loss cannot depend on how the mini-batch was
    split."""
    clipped: Tensor
    """Bool: the clip took this token's gradient away."""
    clipped_lower: Tensor
    """Bool: the dual clip did, for its advantage is negative and its ratio far above 1."""
    truncated: Tensor
    """Bool: its importance weight was above the maximum, and was cut or left out."""


class Loss(Protocol):
    needs_proximal: bool
    """Whether TokenBatch must have proximal log-probs, which cost a second copy of the weights and a forward pass."""

    def __call__(self, tokens: TokenBatch) -> TokenLoss: ...


def ratio_of(numerator_logprobs: Tensor, denominator_logprobs: Tensor) -> Tensor:
    """Not clamped: one that overflows, 88 nats in float32, is a damaged log-prob, and its update is better skipped."""
    return torch.exp(numerator_logprobs - denominator_logprobs)


def none_of(values: Tensor) -> Tensor:
    """False for every token."""
    return torch.zeros_like(values, dtype=torch.bool)


def sum_over_rows(values: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """For every token, the sum over its trajectory's tokens, and their number; both [num_tokens]."""
    _, row_of, counts = rows.unique(return_inverse=True, return_counts=True)
    sums = values.new_zeros(len(counts)).index_add(0, row_of, values)
    return sums[row_of], counts[row_of]
