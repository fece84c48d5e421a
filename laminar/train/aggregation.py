"""Weighs the tokens of a mini-batch, so that the sum of their weighted losses is the mean that was asked for.

The weights follow from lengths and prompt groups alone, before any forward pass, so micro-batches and ranks only ever
add up: however a mini-batch is split, its loss and gradient stay the same.
"""

from typing import assert_never

import torch
from torch import Tensor

from laminar.config.losses import Aggregation


def token_weights(aggregation: Aggregation, num_trained: Tensor, groups: Tensor, response_tokens_max: int) -> Tensor:
    """The weight of each token of a trajectory: [num_trajectories], float64.

    num_trained: [num_trajectories], int, trained tokens; groups: [num_trajectories], int. A trajectory without trained
    tokens counts nowhere.

    - token_mean: every token of the mini-batch weighs the same (DAPO).
    - sequence_mean: every trajectory does, whatever its length (GRPO as published).
    - prompt_mean: every prompt group does, and in it every token (ScaleRL).
    - budget_mean: every token weighs one part in `response_tokens_max` of a trajectory (Dr. GRPO).
    """
    trained = num_trained > 0
    match aggregation:
        case "token_mean":
            divisors = num_trained.sum().expand(len(num_trained))
        case "sequence_mean":
            divisors = num_trained * trained.sum()
        case "prompt_mean":
            _, group_of = groups.unique(return_inverse=True)
            tokens_of_group = torch.zeros_like(num_trained).index_add_(0, group_of, num_trained)
            divisors = tokens_of_group[group_of] * (tokens_of_group > 0).sum()
        case "budget_mean":
            divisors = (response_tokens_max * trained.sum()).expand(len(num_trained))
        case _:
            assert_never(aggregation)
    return torch.where(trained, 1 / divisors.double(), 0.0)
