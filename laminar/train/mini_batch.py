"""Prepares a mini-batch: all that an update must know of its trajectories before the first forward pass.

scores → rewards (punished for length) → advantages by prompt group ┐
lengths, truncation → trained tokens → weight of each token         ├─► MiniBatch
versions → staleness                                                ┘
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laminar.config import Config
from laminar.data.records import Experience
from laminar.train.advantages import group_advantages
from laminar.train.aggregation import token_weights
from laminar.train.overlong import count_trained, overlong_punishments


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """Whole prompt groups, in any order. Every tensor is [num_trajectories], in the order of `experiences`."""

    experiences: Sequence[Experience]
    groups: Tensor
    """Int: the trajectory's prompt group."""
    rewards: Tensor
    """The score, minus what its length costs."""
    advantages: Tensor
    num_trained: Tensor
    """Int: tokens that count in the loss."""
    token_weights: Tensor
    """What each trained token of the trajectory weighs in the loss."""
    staleness: Tensor
    """Int: the trainer's version minus the trajectory's."""

    def weighted_sum(self, values: Tensor, rows: Tensor) -> Tensor:
        """Some tokens' part in the mean over the mini-batch: values, rows are [num_tokens]; a scalar, float64."""
        return (values * self.token_weights[rows]).sum()


def prepare(experiences: Sequence[Experience], config: Config, version: int) -> MiniBatch:
    """version: the newest one published from the weights being trained."""
    loss, overlong = config.trainer.loss, config.trainer.overlong
    response_tokens_max = config.data.response_tokens_max
    groups = torch.tensor([e.group for e in experiences])
    scores = torch.tensor([e.score for e in experiences])
    lengths = torch.tensor([len(e.response.token_ids) for e in experiences])
    rewards = scores + overlong_punishments(lengths, overlong, response_tokens_max)
    num_trained = count_trained(experiences, overlong)
    return MiniBatch(
        experiences=experiences,
        groups=groups,
        rewards=rewards,
        advantages=group_advantages(rewards, groups, divide_by_std=loss.divide_by_std),
        num_trained=num_trained,
        token_weights=token_weights(loss.aggregation, num_trained, groups, response_tokens_max),
        staleness=torch.tensor([version - e.version for e in experiences]),
    )
