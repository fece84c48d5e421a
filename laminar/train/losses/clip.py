"""Clips the surrogate objective of PPO: the part that most losses share."""

import torch
from torch import Tensor

from laminar.train.losses.loss import TokenLoss, none_of


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, *, clip_ratio_low: float, clip_ratio_high: float, clip_ratio_c: float | None
) -> TokenLoss:
    """-min(ratio * A, clip(ratio, 1 - low, 1 + high) * A), a token at a time (PPO eq. 7, DAPO eq. 8).

    Where A < 0 that has no bound: the more likely a bad token has become since it was sampled, the harder it is pushed.
    The dual clip (Ye et al. 2020, eq. 5; verl's clip_ratio_c) bounds its loss at c * |A|, and so takes the gradient of
    a token away whose ratio is above c. None: no such bound.
    """
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high) * advantages
    surrogate = torch.minimum(unclipped, clipped)
    clipped_lower = none_of(ratio)
    if clip_ratio_c is not None:
        lowest = advantages * clip_ratio_c
        clipped_lower = (advantages < 0) & (surrogate < lowest)
        surrogate = torch.where(clipped_lower, lowest, surrogate)
    return TokenLoss(-surrogate, clipped < unclipped, clipped_lower, none_of(ratio))
