import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.train.aggregation import token_weights

TOKENS_MAX = 10
TRAJECTORIES = st.lists(st.tuples(st.integers(0, TOKENS_MAX), st.integers(0, 3)), min_size=1, max_size=12).filter(
    lambda trajectories: any(length for length, _ in trajectories)
)
"""Trained tokens and prompt group of each."""


def naive_mean(aggregation: str, losses: list[list[float]], groups: list[int]) -> float:
    trained = [row for row in losses if row]
    match aggregation:
        case "token_mean":
            every = [loss for row in trained for loss in row]
            return sum(every) / len(every)
        case "sequence_mean":
            return sum(sum(row) / len(row) for row in trained) / len(trained)
        case "prompt_mean":
            of_group = {}
            for row, group in zip(losses, groups, strict=True):
                of_group.setdefault(group, []).extend(row)
            means = [sum(every) / len(every) for every in of_group.values() if every]
            return sum(means) / len(means)
        case _:
            return sum(sum(row) for row in trained) / (len(trained) * TOKENS_MAX)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "prompt_mean", "budget_mean"])
@settings(deadline=None)
@given(TRAJECTORIES, st.randoms(use_true_random=False))
def test_the_weighted_sum_is_the_mean_that_was_asked_for(aggregation, trajectories, rng):
    lengths, groups = zip(*trajectories, strict=True)
    losses = [[rng.uniform(-3, 3) for _ in range(length)] for length in lengths]
    weights = token_weights(aggregation, torch.tensor(lengths), torch.tensor(groups), TOKENS_MAX).tolist()
    total = sum(weight * loss for weight, row in zip(weights, losses, strict=True) for loss in row)
    assert total == pytest.approx(naive_mean(aggregation, losses, list(groups)), abs=1e-9)
    assert all(weight == 0 for weight, length in zip(weights, lengths, strict=True) if not length)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "prompt_mean", "budget_mean"])
def test_a_mini_batch_without_trained_tokens_weighs_nothing(aggregation):
    weights = token_weights(aggregation, torch.tensor([0, 0]), torch.tensor([1, 2]), TOKENS_MAX)
    assert weights.tolist() == [0, 0]
