"""Computes GRPO's clipped surrogate with a wider clip above than below (DAPO's clip-higher)."""

from laminar.config import GrpoLoss
from laminar.train.losses.clip import clipped_surrogate
from laminar.train.losses.loss import TokenBatch, TokenLoss, ratio_of


class Grpo:
    """Policy over behaviour, clipped (DeepSeekMath eq. 3, DAPO eq. 8), with verl's dual clip.

    The ratio's denominator is the behaviour log-prob. One that the trainer recomputed with newer weights would make
    the ratio of a stale token 1: the clip could not see the staleness, and training collapses from one or two
    versions on.
    """

    needs_proximal = False

    def __init__(self, config: GrpoLoss) -> None:
        self._config = config

    def __call__(self, tokens: TokenBatch) -> TokenLoss:
        return clipped_surrogate(
            ratio_of(tokens.policy_logprobs, tokens.behaviour_logprobs),
            tokens.advantages,
            clip_ratio_low=self._config.clip_ratio_low,
            clip_ratio_high=self._config.clip_ratio_high,
            clip_ratio_c=self._config.clip_ratio_c,
        )
