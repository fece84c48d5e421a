"""Computes GRPO's clipped surrogate with a wider clip above than below (DAPO's clip-higher)."""

from dataclasses import dataclass

import torch

from laminar.train.losses.loss import TokenBatch, TokenLoss


@dataclass(frozen=True, slots=True)
class ClipHigher:
    """-min(ratio * A, clip(ratio, 1 - low, 1 + high) * A), a token at a time (DeepSeekMath eq. 3, DAPO eq. 8).

    Where A < 0 that has no bound: the more likely a bad token has become since it was sampled, the harder it is pushed.
    The dual clip (Ye et al. 2020, eq. 5; verl's clip_ratio_c) bounds its loss at c * |A|, and so takes the gradient of
    a token away whose ratio is above c. None: no such bound.

    The ratio's denominator is the behaviour log-prob. One that the trainer recomputed with newer weights would make
    the ratio of a stale token 1: the clip could not see the staleness, and training collapses from one or two
    versions on.
    """

    clip_ratio_low: float
    clip_ratio_high: float
    clip_ratio_c: float | None

    def __call__(self, tokens: TokenBatch) -> TokenLoss:
        ratio = torch.exp(tokens.policy_logprobs - tokens.behaviour_logprobs)
        unclipped = ratio * tokens.advantages
        clipped = ratio.clamp(1 - self.clip_ratio_low, 1 + self.clip_ratio_high) * tokens.advantages
        surrogate = torch.minimum(unclipped, clipped)
        if self.clip_ratio_c is None:
            return TokenLoss(-surrogate, clipped < unclipped, torch.zeros_like(ratio, dtype=torch.bool))
        lowest = tokens.advantages * self.clip_ratio_c
        clipped_lower = (tokens.advantages < 0) & (surrogate < lowest)
        return TokenLoss(-torch.where(clipped_lower, lowest, surrogate), clipped < unclipped, clipped_lower)
