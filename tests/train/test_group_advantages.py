import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from laminar.train.advantages import equal_reward_ratio, group_advantages

FINITE = st.floats(-10, 10, width=32)


def advantages(rewards: list[float], groups: list[int]) -> list[float]:
    return group_advantages(torch.tensor(rewards), torch.tensor(groups)).tolist()


def by_hand(rewards: list[float], groups: list[int]) -> list[float]:
    result = []
    for reward, group in zip(rewards, groups, strict=True):
        members = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        if len(set(members)) == 1:
            result.append(0.0)
        else:
            result.append((reward - statistics.mean(members)) / (statistics.stdev(members) + 1e-6))
    return result


def test_rewards_are_standardised_by_the_sample_deviation():
    assert advantages([1.0, 0.0], [7, 7]) == pytest.approx([0.5**0.5, -(0.5**0.5)], rel=1e-5)


@given(st.lists(st.tuples(FINITE, st.integers(0, 4)), min_size=1, max_size=30))
def test_groups_are_told_apart_by_id_whatever_their_order_and_size(rows):
    rewards, groups = [r for r, _ in rows], [g for _, g in rows]
    assert advantages(rewards, groups) == pytest.approx(by_hand(rewards, groups), rel=1e-4, abs=1e-4)


def test_a_missing_member_changes_its_own_group_only():
    rewards, groups = [1.0, 0.0, 0.0, 1.0, 1.0, 0.0], [5, 5, 5, 9, 9, 9]
    whole = advantages(rewards, groups)
    without = advantages(rewards[:2] + rewards[3:], groups[:2] + groups[3:])
    assert without[2:] == whole[3:]
    assert without[:2] == pytest.approx(by_hand([1.0, 0.0], [5, 5]), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -1e8, 1e-30])
@pytest.mark.parametrize("size", [1, 2, 3, 16, 17])
def test_equal_rewards_give_exact_zeros(reward, size, dtype):
    rewards = torch.tensor([reward] * size + [1.0, 0.0], dtype=dtype)
    assert group_advantages(rewards, torch.tensor([3] * size + [4, 4]))[:size].tolist() == [0.0] * size


def test_share_of_groups_with_equal_rewards_counts_groups():
    assert equal_reward_ratio(torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0]), torch.tensor([2, 2, 2, 8, 8])) == 0.5
