"""Trains the quickstart's model for a few synchronous steps, the embedded engine sampling: the reward must rise."""

import pytest

from scripts.staleness import StaleRun, make_config

NUM_STEPS = 12


def test_a_few_steps_raise_the_reward():
    run = StaleRun(make_config(seed=3), staleness=0)
    steps = [run.step() for _ in range(NUM_STEPS)]
    rewards = [step.reward for step in steps]
    print(f"rewards {[round(reward, 2) for reward in rewards]}")
    for step in steps:
        assert step.ratio_max_first == pytest.approx(1, abs=1e-4)
        assert step.ratio_min_first == pytest.approx(1, abs=1e-4)
    # A step's reward has a standard deviation of 0.05 by its prompts alone; the rise is 0.2 to 0.3.
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1
