"""Treats responses that were too long as DAPO does: a punishment that grows before the limit, or no loss at all."""

from collections.abc import Sequence

import torch
from torch import Tensor

from laminar.config import OverlongConfig
from laminar.data.records import Experience
from laminar.train.packing import num_trained_tokens


def overlong_punishments(num_tokens: Tensor, config: OverlongConfig, response_tokens_max: int) -> Tensor:
    """What the length adds to each reward, 0 or less (DAPO eq. 13): [num_trajectories], float.

    num_tokens: [num_trajectories], of the responses, tool output included. 0 up to `buffer_tokens` before the limit,
    then linear down to -`penalty_max` at the limit.
    """
    if not config.buffer_tokens:
        return torch.zeros(len(num_tokens))
    num_over = num_tokens - (response_tokens_max - config.buffer_tokens)
    return -(num_over.float() / config.buffer_tokens).clamp(0, 1) * config.penalty_max


def count_trained(experiences: Sequence[Experience], config: OverlongConfig) -> Tensor:
    """Tokens of each trajectory that are trained on: [num_trajectories], int; 0 for a truncated one that is filtered.

    A response that was cut says nothing about the answer that it was going to give. Filtered, it still counts in its
    prompt group's mean reward.
    """
    return torch.tensor(
        [0 if config.filtered and e.truncated else num_trained_tokens(e) for e in experiences], dtype=torch.long
    )
