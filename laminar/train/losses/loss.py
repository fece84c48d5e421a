"""Defines the one signature of every policy loss: log-probs and advantages of tokens in, one loss a token out."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The trained tokens of a micro-batch (loss_mask 1), laid end to end, so that no loss ever sees padding."""

    policy_logprobs: Tensor
    """[num_tokens], nats, under the weights being trained; the gradient flows through it."""
    behaviour_logprobs: Tensor
    """[num_tokens], nats, as the engine recorded them while it sampled; never recomputed by the trainer."""
    advantages: Tensor
    """[num_tokens]; each token has its trajectory's."""
    rows: Tensor
    """[num_tokens], int: which trajectory a token belongs to; for losses with a ratio a sequence."""


@dataclass(frozen=True, slots=True)
class TokenLoss:
    loss: Tensor
    """[num_tokens]. The caller sums it and divides by all trained tokens of the mini-batch, so a loss cannot depend
    on how the mini-batch was split."""
    clipped: Tensor
    """[num_tokens], bool: the clip took this token's gradient away."""
    clipped_lower: Tensor
    """[num_tokens], bool: the dual clip did, for its advantage is negative and its ratio far above 1."""


class Loss(Protocol):
    def __call__(self, tokens: TokenBatch) -> TokenLoss: ...
