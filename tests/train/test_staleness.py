"""The ratio's denominator is the behaviour log-prob: recomputed, training on data four versions old goes wrong."""

import pytest

from scripts.staleness import StaleRun, make_config

STALENESS = 4
LEARNING_RATE = 1e-3
"""Twice what is usual, so that it shows in few steps."""
NUM_STEPS = 22
NUM_LAST = 6


@pytest.mark.timeout(1200)
def test_recomputing_the_denominator_is_clearly_worse_at_staleness_4():
    late = {}
    for recompute in (False, True):
        run = StaleRun(make_config(learning_rate=LEARNING_RATE), staleness=STALENESS, recompute=recompute)
        steps = [run.step() for _ in range(NUM_STEPS)]
        assert steps[-1].version == NUM_STEPS - 1 - STALENESS, "the data is as stale as it is said to be"
        late[recompute] = sum(step.reward for step in steps[-NUM_LAST:]) / NUM_LAST
    print(f"mean reward of the last {NUM_LAST} steps: {late[False]:.3f} recorded, {late[True]:.3f} recomputed")
    assert late[True] < late[False] - 0.15
