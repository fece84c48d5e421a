from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.observe.pass_at_k import num_prompts_scored, pass_at_k

PROMPTS = st.lists(st.lists(st.booleans(), min_size=1, max_size=7), min_size=1, max_size=6)
"""Whether each response of each prompt passed."""


def counted(prompts: list[list[bool]]) -> dict[int, dict[int, int]]:
    table: dict[int, dict[int, int]] = {}
    for responses in prompts:
        passed = table.setdefault(len(responses), {})
        passed[sum(responses)] = passed.get(sum(responses), 0) + 1
    return table


@settings(deadline=None)
@given(PROMPTS)
def test_it_is_the_share_of_subsets_in_which_one_passed(prompts):
    estimates = pass_at_k(counted(prompts))
    most = max(map(len, prompts))
    assert set(estimates) == {k for k in (1, 2, 4, most) if k <= most}
    for k, estimate in estimates.items():
        subsets = [list(combinations(responses, k)) for responses in prompts if len(responses) >= k]
        shares = [sum(any(subset) for subset in each) / len(each) for each in subsets]
        assert estimate == pytest.approx(sum(shares) / len(shares))


def test_prompts_without_a_scored_response_count_nowhere():
    assert pass_at_k({0: {0: 3}}) == {}
    assert num_prompts_scored({0: {0: 3}}) == 0
    table = {0: {0: 3}, 2: {0: 1, 1: 2}, 1: {1: 1}}
    assert num_prompts_scored(table) == 4
    assert pass_at_k(table) == {1: pytest.approx((0 + 0.5 + 0.5 + 1) / 4), 2: pytest.approx(2 / 3)}
