"""Computes AReaL's decoupled PPO loss: trust region around the proximal policy, data from another one."""

from dataclasses import replace

import torch

from laminar.config import DecoupledPpoLoss
from laminar.train.losses.clip import clipped_surrogate
from laminar.train.losses.loss import TokenBatch, TokenLoss, none_of, ratio_of


class DecoupledPpo:
    """(proximal / behaviour) * clipped surrogate of (policy / proximal) (Hilton et al. 2022; AReaL eq. 5).

    The proximal policy are the weights that the step began with. A token whose weight proximal / behaviour is above
    `behaviour_weight_max` is left out of the loss and still counts in its mean, as in AReaL.
    """

    needs_proximal = True

    def __init__(self, config: DecoupledPpoLoss) -> None:
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
        weight = ratio_of(tokens.proximal_logprobs, tokens.behaviour_logprobs)
        largest = self._config.behaviour_weight_max
        truncated = none_of(weight) if largest is None else weight > largest
        return replace(surrogate, loss=surrogate.loss * torch.where(truncated, 0.0, weight), truncated=truncated)
