"""Computes Dr. GRPO's clipped surrogate (Liu et al. 2025, "Understanding R1-Zero-Like Training")."""

from laminar.config import DrGrpoLoss
from laminar.train.losses.clip import clipped_surrogate
from laminar.train.losses.loss import TokenBatch, TokenLoss, ratio_of


class DrGrpo:
    """PPO's surrogate, a token at a time. What makes it Dr. GRPO is around it: advantages that are not divided by
    the standard deviation, and token losses summed over a trajectory and divided by a constant, never by its length.
    """

    needs_proximal = False

    def __init__(self, config: DrGrpoLoss) -> None:
        self._config = config

    def __call__(self, tokens: TokenBatch) -> TokenLoss:
        return clipped_surrogate(
            ratio_of(tokens.policy_logprobs, tokens.behaviour_logprobs),
            tokens.advantages,
            clip_ratio_low=self._config.clip_ratio_low,
            clip_ratio_high=self._config.clip_ratio_high,
            clip_ratio_c=None,
        )
