"""Estimates pass@k: how likely one of k responses to a held-out prompt passes."""

from collections.abc import Mapping
from math import comb

NumPrompts = Mapping[int, Mapping[int, int]]
"""Responses scored → responses passed → prompts, as an evaluation counts them."""


def num_prompts_scored(num_prompts: NumPrompts) -> int:
    """Prompts with a scored response at least."""
    return sum(count for num_scored, passed in num_prompts.items() if num_scored for count in passed.values())


def pass_at_k(num_prompts: NumPrompts) -> dict[int, float]:
    """By k = 1, 2, 4, … and the most responses that a prompt has, over the prompts with k responses or more.

    Unbiased (Chen et al. 2021, "Evaluating Large Language Models Trained on Code", eq. 1): of n responses of which c
    passed, the share of subsets of size k with one that passed, 1 - C(n - c, k) / C(n, k).
    """
    most = max((num_scored for num_scored, passed in num_prompts.items() if passed), default=0)
    sizes = sorted({1 << power for power in range(most.bit_length())} | {most}) if most else []
    return {k: _mean(k, num_prompts) for k in sizes}


def _mean(k: int, num_prompts: NumPrompts) -> float:
    counted = [
        (1 - comb(n - num_passed, k) / comb(n, k), count)
        for n, passed in num_prompts.items()
        if n >= k
        for num_passed, count in passed.items()
    ]
    return sum(share * count for share, count in counted) / sum(count for _, count in counted)
