"""Computes GRPO's clipped surrogate with a wider clip above than below (DAPO's clip-higher)."""

from dataclasses import dataclass

import torch

from laminar.train.losses.loss import TokenBatch, TokenLoss


@dataclass(frozen=True, slots=True)
class ClipHigher:
    """-min(ratio * A, clip(ratio, 1 - low, 1 + high) * A), a token at a time (DeepSeekMath eq. 3, DAPO eq. 8).

    The ratio's denominator is the behaviour log-prob. One that the trainer recomputed with newer weights would make
    the ratio of a stale token 1: the clip could not see the staleness, and training collapses from one or two
    versions on.
    """

    clip_ratio_low: float
    clip_ratio_high: float

    def __call__(self, tokens: TokenBatch) -> TokenLoss:
        ratio = torch.exp(tokens.policy_logprobs - tokens.behaviour_logprobs)
        unclipped = ratio * tokens.advantages
        clipped = ratio.clamp(1 - self.clip_ratio_low, 1 + self.clip_ratio_high) * tokens.advantages
        return TokenLoss(loss=-torch.minimum(unclipped, clipped), clipped=clipped < unclipped)
