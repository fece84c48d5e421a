"""Computes GRPO advantages: how much better than its prompt group's mean a trajectory did."""

import torch
from torch import Tensor

STD_EPSILON = 1e-6


def group_advantages(rewards: Tensor, group_ids: Tensor, *, divide_by_std: bool = True) -> Tensor:
    """Each reward standardised within its prompt group (DeepSeekMath, eq. 3), or only centred (Dr. GRPO).

    rewards: [num_trajectories], any real; group_ids: [num_trajectories], int. Returns [num_trajectories].
    Divides by the sample standard deviation (n - 1) plus 1e-6, as verl does. Groups may lack members and be in any
    order. A group whose rewards are all equal, one of a single member included, gets exact zeros, never a division
    by a rounding error.
    """
    groups, counts = _group_numbers(group_ids)
    exact = rewards.double()
    mean = _sum_by_group(exact, groups, counts) / counts
    centred = exact - mean[groups]
    if divide_by_std:
        variance = _sum_by_group(centred.square(), groups, counts) / (counts - 1).clamp_min(1)
        centred = centred / (variance.sqrt()[groups] + STD_EPSILON)
    return torch.where(_all_equal(exact, groups, counts)[groups], 0.0, centred).to(rewards.dtype)


def equal_reward_ratio(rewards: Tensor, group_ids: Tensor) -> float:
    """Share of the prompt groups whose rewards are all equal: they teach nothing."""
    groups, counts = _group_numbers(group_ids)
    return _all_equal(rewards.double(), groups, counts).double().mean().item()


def _group_numbers(group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Number the groups 0, 1, …: each trajectory's number, and each group's size."""
    _, groups, counts = group_ids.unique(return_inverse=True, return_counts=True)
    return groups, counts


def _sum_by_group(values: Tensor, groups: Tensor, counts: Tensor) -> Tensor:
    return values.new_zeros(len(counts)).index_add_(0, groups, values)


def _all_equal(rewards: Tensor, groups: Tensor, counts: Tensor) -> Tensor:
    empty = rewards.new_zeros(len(counts))
    highest = empty.scatter_reduce(0, groups, rewards, "amax", include_self=False)
    lowest = empty.scatter_reduce(0, groups, rewards, "amin", include_self=False)
    return highest == lowest
