"""Computes PPO's loss corrected by truncated importance sampling (Ionides 2008; verl's rollout correction)."""

from dataclasses import replace

import torch

from laminar.config import TisLoss
from laminar.train.losses.clip import clipped_surrogate
from laminar.train.losses.loss import TokenBatch, TokenLoss, ratio_of, sum_over_rows


class Tis:
    """min(proximal / behaviour, C) * clipped surrogate of (policy / proximal).

    At the level of tokens each has its own weight, which bounds the variance at the price of a bias; at that of
    sequences all tokens of a trajectory have the product of theirs, which is unbiased up to the truncation.
    """

    needs_proximal = True

    def __init__(self, config: TisLoss) -> None:
        self._config = config

    def __call__(self, tokens: TokenBatch) -> TokenLoss:
        assert tokens.proximal_logprobs is not None, "the trainer gives them to a loss that needs them"
        surrogate = clipped_surrogate(
            ratio_of(tokens.policy_logprobs, tokens.proximal_logprobs),
            tokens.advantages,
            clip_ratio_low=self._config.clip_ratio_low,
            clip_ratio_high=self._config.clip_ratio_high,
            clip_ratio_c=self._config.clip_ratio_c,
        )
        log_weight = tokens.proximal_logprobs - tokens.behaviour_logprobs
        if self._config.level == "sequence":
            log_weight, _ = sum_over_rows(log_weight, tokens.rows)
        weight = torch.exp(log_weight)  # may be infinite for a sequence, until it is truncated
        truncated = weight > self._config.weight_max
        return replace(surrogate, loss=surrogate.loss * weight.clamp_max(self._config.weight_max), truncated=truncated)
